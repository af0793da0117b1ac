"""The DeepMind Lab adapter: levels, actions, clocks, seeds and refusals on the engine or its stand-in."""

import os
import signal
import subprocess
import sys
import unittest
from dataclasses import replace
from pathlib import Path
from typing import Any

import dm_env
import numpy as np
import psutil
import pytest
from dm_env import test_utils

import standin
from agent.network import Network, NetworkSettings, NetworkSpec
from eval.rollouts import Game, play_games
from runs import wait_for
from tasks.contract import ENGINE_COUNTS, EnvironmentSettings, TaskVectorEnv
from tasks.dmlab import ACTION_SETS, DmLab, DmLabSettings, check_dmlab, clock_frames, engine_config
from tasks.engine import EngineError
from tasks.environment import check_suite, make_vector_env
from tasks.instruction import word_ids
from tasks.registry import load_suite
from tasks.seeds import evaluation_seed

SUITE = load_suite("dmlab30")
SETTINGS = DmLabSettings(level_cache="", dummy_dataset=True)
SHORT = {"episodeLengthSeconds": "1"}
LEVEL = "contributed/dmlab30/rooms_watermaze"
WORDS = 8


@pytest.fixture(autouse=True)
def engine(monkeypatch: pytest.MonkeyPatch) -> None:
    standin.install(monkeypatch)


def lab(level: str = LEVEL, repeat: int = 4, seed: int = 3, test: bool = False, **settings: Any) -> DmLab:
    return DmLab(level, replace(SETTINGS, **settings), repeat, seed, test)


def vector(num_envs: int, task: str = "rooms_watermaze", split: str = "train", training: bool = True, **dmlab: Any) -> Any:
    settings = EnvironmentSettings(instruction_length=WORDS, dmlab=replace(SETTINGS, **{"wait_seconds": 20, **dmlab}))
    seeds = [evaluation_seed(0, task, i) if split == "test" else i for i in range(num_envs)]
    return make_vector_env(SUITE, SUITE.task(task), num_envs, settings, seeds, training=training, split=split)


def children() -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if "tasks.engine_worker" in child.cmdline()]


@pytest.mark.parametrize("split", ["train", "test"])
def test_all_thirty_levels_construct_reset_and_step(split: str) -> None:
    for task in SUITE.tasks:
        env = lab(task.train_level if split == "train" else task.test_level, test=split == "test")
        first, second = env.reset(), env.step(0)
        assert first.first() and second.mid()
        assert first.observation["frame"].shape == (72, 96, 3) and first.observation["frame"].dtype == np.uint8
        assert bool(first.observation["instruction"]) == task.name.startswith("language_"), task.name
        assert env.last_frames == 4
        assert clock_frames(task.train_level, SETTINGS) == clock_frames(task.test_level, SETTINGS) is not None
        env.close()


class TestDmEnv(test_utils.EnvironmentTestMixin, unittest.TestCase):  # type: ignore[misc]
    """dm_env's own checks of an environment."""

    def make_object_under_test(self) -> DmLab:
        return lab(engine=SHORT)

    def make_action_sequence(self) -> Any:
        return [i % 9 for i in range(40)]

    def assertValidStep(self, step: dm_env.TimeStep) -> None:
        # The mixin compares a text with an array spec of shape (); everything else of it holds.
        assert self.environment.observation_spec()["frame"].validate(step.observation["frame"]) is not None
        assert isinstance(step.observation["instruction"], str)


def test_the_published_action_sets() -> None:
    nine, fifteen = (np.array(ACTION_SETS[name]) for name in ("impala9", "popart15"))
    assert nine.shape == (9, 7) and fifteen.shape == (15, 7)
    assert len(np.unique(nine, axis=0)) == 9 and len(np.unique(fifteen, axis=0)) == 15
    assert nine[:, 0].tolist() == [0, 0, 0, 0, -20, 20, -20, 20, 0]  # yaw: negative looks left
    assert nine[:, 2].tolist() == [0, 0, -1, 1, 0, 0, 0, 0, 0]  # strafe: negative goes left
    assert nine[:, 3].tolist() == [1, -1, 0, 0, 0, 0, 1, 1, 0]  # move: positive goes forward
    assert nine[:, 4].tolist() == [0] * 8 + [1] and not nine[:, 5:].any() and not nine[:, 1].any()
    assert fifteen[:, 0].tolist() == [0, 0, 0, 0, -10, 10, -60, 60, 0, 0, -10, 10, -60, 60, 0]
    assert fifteen[:, 1].tolist() == [0] * 8 + [10, -10] + [0] * 5
    assert fifteen[:, 3].tolist() == [1, -1] + [0] * 8 + [1, 1, 1, 1, 0]
    assert fifteen[:, 4].tolist() == [0] * 14 + [1]


def test_the_last_repeat_is_cut_at_the_clock_and_the_last_frame_is_shown_again() -> None:
    env = lab(repeat=7, engine=SHORT)  # 60 frames: 8 whole repeats and 4 frames
    steps, played = [env.reset()], []
    while not steps[-1].last():
        steps.append(env.step(len(steps) % 9))
        played.append(env.last_frames)
    env.close()
    assert played == [7] * 8 + [4]
    assert (steps[-1].discount, steps[-2].discount) == (0, 1)
    np.testing.assert_array_equal(steps[-1].observation["frame"], steps[-2].observation["frame"])
    assert not np.array_equal(steps[-3].observation["frame"], steps[-2].observation["frame"])


def test_an_end_at_the_clock_can_be_a_truncation_and_an_early_one_cannot() -> None:
    env = lab(engine=SHORT, episode_end="truncate_at_clock")
    step = env.reset()
    while not step.last():
        step = env.step(0)
    env.close()
    assert step.discount == 1


@standin.standin_only
def test_an_early_end_is_a_termination() -> None:
    env = lab("contributed/dmlab30/rooms_keys_doors_puzzle", episode_end="truncate_at_clock")
    step, frames = env.reset(), 0
    while not step.last():
        # The patch is at the side that pays: left, right, top (forward), bottom (fire).
        frame = step.observation["frame"].astype(int)
        height, width = frame.shape[0] // 4, frame.shape[1] // 4
        sides = [frame[:, :width], frame[:, -width:], frame[:height], frame[-height:]]
        step = env.step([4, 5, 0, 8][int(np.argmax([(side == 255).all(-1).mean() for side in sides]))])
        frames += env.last_frames
    env.close()
    assert step.discount == 0
    assert frames < (clock_frames("contributed/dmlab30/rooms_keys_doors_puzzle", SETTINGS) or 0)


def test_a_seed_fixes_all_episodes_and_stays_in_its_half() -> None:
    def frames(seed: int) -> list[np.ndarray]:
        env = lab(seed=seed, engine=SHORT)
        shown = [env.reset().observation["frame"] for _ in range(3)]
        seeds.append(env._next_seed)
        env.close()
        return shown

    seeds: list[int] = []
    np.testing.assert_array_equal(frames(5), frames(5))
    low, high = frames(5), frames(2**31 - 1)
    assert not any(np.array_equal(a, b) for a in low for b in [*low, *high] if a is not b)
    assert seeds[0] < 2**30 <= seeds[-1] < 2**31
    assert type(seeds[0]) is int


def test_what_the_engine_is_told() -> None:
    config = engine_config(replace(SETTINGS, engine={"logLevel": "WARN"}, renderer="hardware", gpu_index=1), LEVEL, False)
    assert config == {"width": "96", "height": "72", "logLevel": "WARN", "gpuDeviceIndex": "1"}
    held_out = engine_config(
        replace(SETTINGS, dummy_dataset=False, dataset_path="/images"), "x/psychlab_continuous_recognition", True
    )
    assert held_out == {
        "width": "96",
        "height": "72",
        "datasetPath": "/images",
        "allowHoldOutLevels": "true",
        "mixerSeed": "1611489005",
    }


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"dummy_dataset": False},
            r"dataset_path is empty, and psychlab.* need the Brady images: get them as .*dummy_dataset=true",
        ),
        ({"dummy_dataset": False, "dataset_path": "/nowhere"}, r"dataset_path=/nowhere has no 0001.png, and psychlab.* 2400"),
        ({"width": 90}, r"environment.dmlab.width=90 does not fit: .* multiple of 4"),
        ({"engine": {"episodeLengthSeconds": "abc"}}, r"engine.episodeLengthSeconds=abc is no number of seconds above 0"),
        ({"engine": {"mixerSeed": "1"}}, r"environment.dmlab.engine.mixerSeed is set by this program"),
    ],
)
def test_what_is_missing_is_found_before_a_start(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        check_suite(SUITE, EnvironmentSettings(dmlab=replace(SETTINGS, **settings)))
    assert "\n" not in str(caught.value)


def test_the_images_are_counted_to_the_last(tmp_path: Path) -> None:
    settings = replace(SETTINGS, dummy_dataset=False, dataset_path=str(tmp_path))
    for number in range(1, 2401):
        (tmp_path / f"{number:04d}.png").touch()
    check_dmlab(SUITE, settings)
    check_dmlab(SUITE.subset(["rooms_watermaze"]), replace(SETTINGS, dummy_dataset=False))
    (tmp_path / "2400.png").unlink()
    with pytest.raises(ValueError, match=r"has no 2400\.png"):
        check_dmlab(SUITE, settings)


def test_engines_step_together_and_leave_nothing() -> None:
    env = vector(3, task="language_execute_random_task", engine=SHORT)
    observation, _ = env.reset()
    alone = lab("contributed/dmlab30/language_execute_random_task", seed=1, engine=SHORT)
    step = alone.reset()
    total = np.zeros(3)
    for t in range(40):
        np.testing.assert_array_equal(observation["frame"][1], step.observation["frame"])
        np.testing.assert_array_equal(observation["instruction"][1], word_ids(step.observation["instruction"], WORDS))
        was_last = step.last()
        step = alone.step(t % 9)
        observation, rewards, terminated, truncated, infos = env.step(np.full(3, t % 9))
        assert rewards[1] == (0 if was_last else step.reward)
        assert (terminated[1], truncated[1]) == (step.last(), False)
        assert (infos["reset"][1], infos["frames"][1]) == (was_last, 0 if was_last else 4)
        assert not infos["lost"].any()
        total += rewards
    alone.close()
    assert len(children()) == 3 and len(set(total)) > 1
    env.close()
    assert children() == []


def step_until(env: TaskVectorEnv, what: str, limit: int = 200) -> Any:
    """The first step whose infos hold `what`."""
    for _ in range(limit):
        step = env.step(np.zeros(env.num_envs, int))
        if step[4][what].any():
            return step
    raise AssertionError(f"no {what} in {limit} steps")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "hangs"])
def test_an_engine_that_dies_or_hangs_is_named_and_replaced(number: signal.Signals, capfd: pytest.CaptureFixture[str]) -> None:
    env = vector(2, wait_seconds=4)
    env.reset()
    step_until(env, "frames")
    first, second = children()
    first.send_signal(number)
    observation, rewards, terminated, truncated, infos = step_until(env, "lost")
    assert (infos["lost"].tolist(), infos["reset"].tolist(), infos["frames"].tolist()) == ([True, False], [True, False], [0, 4])
    assert (rewards[0], terminated.any(), truncated.any()) == (0, False, False)
    assert observation["frame"][0].any()
    why = "was killed by SIGKILL" if number == signal.SIGKILL else "gave no answer in time"
    assert f"the engine of level {LEVEL}, first seed 0, {why}: its game is lost" in capfd.readouterr().err
    assert second in children() and first not in children() and len(children()) == 2
    assert env.new_counts()[ENGINE_COUNTS.index("engine_restarts")] == 1
    assert not env.step(np.zeros(2, int))[4]["lost"].any()
    env.close()


@standin.standin_only
def test_exit_and_an_exception_within_the_engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: Any) -> None:
    faults = [
        f"exit@step:5,once={tmp_path / 'a'}",
        f"error@step:9,once={tmp_path / 'b'}",
        f"abort@step:13,once={tmp_path / 'c'}",
    ]
    monkeypatch.setenv("DMLAB_STANDIN_FAULT", ";".join(faults))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    env = vector(2)
    env.reset()
    lost = sum(env.step(np.zeros(2, int))[4]["lost"].sum() for _ in range(40))
    env.close()
    said = capfd.readouterr().err
    assert lost == 3
    assert {path.name for path in tmp_path.iterdir()} == {"a", "b", "c"}, "an engine's temporary files went with it"
    for why in ("ended with exit code 1", "raised ValueError: Failed to advance", "was killed by SIGABRT"):
        assert why in said


@standin.standin_only
def test_a_game_that_was_over_is_not_lost_with_its_engine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Engines die most where they build the next map: the game before was whole."""
    monkeypatch.setenv("DMLAB_STANDIN_FAULT", f"exit@reset:2,once={tmp_path / 'once'}")
    env = vector(1, engine=SHORT)
    env.reset()
    *_, infos = step_until(env, "reset")
    env.close()
    assert (infos["reset"].tolist(), infos["lost"].tolist()) == ([True], [False])
    assert "its game was over, another engine takes its place" in capfd.readouterr().err


@standin.standin_only
def test_an_evaluated_game_whose_engine_dies_once_is_played_anew(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    settings = EnvironmentSettings(instruction_length=WORDS, dmlab=replace(SETTINGS, engine=SHORT))
    sizes = NetworkSettings(torso="shallow", hidden_size=8, core_size=8)
    network = Network(NetworkSpec(sizes, (72, 96, 3), "uint8", WORDS, 9, {"rooms_watermaze": 9})).double()

    def play() -> list[Game]:
        games = play_games(SUITE, "rooms_watermaze", network, settings, range(3), 2, 0, "test")
        return sorted(games, key=lambda game: game.index)

    whole = play()
    assert [game.frames for game in whole] == [60, 60, 60]
    for where in ("step:10", "reset:1"):
        once = tmp_path / where.replace(":", "-")
        monkeypatch.setenv("DMLAB_STANDIN_FAULT", f"exit@{where},once={once}")
        assert play() == whole
        assert once.exists()
    monkeypatch.setenv("DMLAB_STANDIN_FAULT", "exit@step:10")
    with pytest.raises(ValueError, match=r"game \d cannot be played: the engine of level .*rooms_watermaze.*, 2 times"):
        play()


@standin.standin_only
def test_an_engine_that_always_dies_is_an_error_that_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DMLAB_STANDIN_FAULT", "exit@reset:1")
    env = vector(2)
    with pytest.raises(EngineError, match=rf"level {LEVEL}, first seed \d+, ended with exit code 1"):
        env.reset()
    env.close()


def test_a_game_that_is_evaluated_is_never_replaced() -> None:
    env = vector(1, split="test", training=False)
    env.reset()
    children()[0].kill()
    with pytest.raises(EngineError, match="was killed by SIGKILL"):
        step_until(env, "lost")
    env.close()


def test_engines_end_with_a_parent_that_is_killed_even_when_they_hang(tmp_path: Path) -> None:
    code = (
        "import sys; sys.path[:0] = sys.argv[1:]\n"
        "import test_tasks_dmlab as here\n"
        "env = here.vector(2); env.reset(); print(*[child.pid for child in here.children()], flush=True); input()"
    )
    command = [sys.executable, "-c", code, str(Path(__file__).parent)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        engines = [psutil.Process(int(pid)) for pid in parent.stdout.readline().split()]
        assert len(engines) == 2
        os.kill(engines[0].pid, signal.SIGSTOP)
        parent.kill()
    wait_for(lambda: not any(engine.is_running() and engine.status() != psutil.STATUS_ZOMBIE for engine in engines), timeout=10)
