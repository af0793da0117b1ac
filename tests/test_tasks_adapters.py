"""Foreign environments: ends and cuts, observations of all kinds, actions that start elsewhere, frames."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dm_env import specs  # type: ignore[import-untyped]
from gymnasium import spaces
from gymnasium.vector import AutoresetMode

import my_envs
from tasks.adapters import DmEnvAdapter, OwnEnv
from tasks.environment import EnvironmentSettings, TaskVectorEnv, check_suite, make_vector_env, probe, suite_spaces
from tasks.instruction import word_ids
from tasks.own_suite import parse_suite
from tasks.suite import Suite

SETTINGS = EnvironmentSettings(instruction_length=4)


def own_suite(*functions: str, **kwargs: Any) -> Suite:
    tasks = [{"name": f"t{i}", "env": f"my_envs:{name}", "env_kwargs": kwargs} for i, name in enumerate(functions)]
    return parse_suite({"name": "mine", "tasks": tasks}, "test", str(Path(__file__).parent))


def own_env(function: str, num_envs: int = 2, **kwargs: Any) -> TaskVectorEnv:
    suite = own_suite(function, **kwargs)
    return make_vector_env(suite, suite.tasks[0], num_envs, SETTINGS, list(range(num_envs)))


@pytest.mark.parametrize("truncates", [False, True])
def test_own_gymnasium_environment_step_by_step(truncates: bool) -> None:
    env = own_env("make_counting", length=3, truncates=truncates)
    assert env.metadata["autoreset_mode"] is AutoresetMode.NEXT_STEP
    observations, infos = env.reset()
    assert set(observations) == {"frame"} and infos["reset"].all() and not infos["frames"].any()
    seen = []
    for _ in range(5):
        observations, rewards, terminated, truncated, infos = env.step(np.array([1, 2]))
        assert rewards.dtype == np.float64 and infos["frames"].dtype == np.int32
        row = (observations["frame"][1, 0, 0, 0], rewards[1], terminated[1], truncated[1])
        seen.append((*row, infos["frames"][1], infos["reset"][1]))
    end = (not truncates, truncates)
    assert seen == [
        (1, 2.0, False, False, 3, False),
        (2, 102.0, False, False, 3, False),
        (3, 202.0, *end, 3, False),
        (0, 0.0, False, False, 0, True),
        (1, 2.0, False, False, 3, False),
    ]


def test_reset_in_the_middle_forgets_the_end() -> None:
    env = own_env("make_counting", length=1)
    env.reset()
    assert env.step(np.array([0, 0]))[2].all()
    env.reset()
    assert not env.step(np.array([0, 0]))[4]["reset"].any()


def test_actions_that_start_elsewhere() -> None:
    env = own_env("make_counting", first_action=5, num_actions=2)
    assert env.single_action_space == spaces.Discrete(2)
    env.reset()
    assert env.step(np.array([0, 1]))[1].tolist() == [5.0, 6.0]
    with pytest.raises(ValueError, match="outside of 0 to 1"):
        env.step(np.array([0, 2]))


def test_seeds_reach_the_function_as_plain_ints() -> None:
    suite = own_suite("make_counting")
    env: Any = make_vector_env(suite, suite.tasks[0], 2, SETTINGS, [0, 2**31 - 1])
    games = [game._environment for game in env._games.envs]
    assert [(game.seed, type(game.seed)) for game in games] == [(0, int), (2**31 - 1, int)]
    env.close()
    assert all(game.closed for game in games)


@pytest.mark.parametrize(("discount", "terminates"), [(0.0, True), (0.9, False), (1.0, False)])
def test_dm_env_ends_and_cuts(discount: float, terminates: bool) -> None:
    env = own_env("make_dm_counting", length=2, discount=discount)
    observations, _ = env.reset()
    assert observations["instruction"].tolist() == [word_ids("step 0", 4).tolist()] * 2
    assert env.single_action_space.n == 4
    observations, rewards, terminated, truncated, _ = env.step(np.array([0, 3]))
    assert rewards.tolist() == [0.0, 3.0] and not terminated.any() and not truncated.any()
    assert observations["instruction"].dtype == np.int32
    observations, rewards, terminated, truncated, _ = env.step(np.array([0, 3]))
    assert terminated.tolist() == [terminates] * 2 and truncated.tolist() == [not terminates] * 2
    assert (observations["frame"] == 2).all() and rewards.tolist() == [100.0, 103.0]
    observations, rewards, *_, infos = env.step(np.array([0, 3]))
    assert infos["reset"].all() and not rewards.any() and not observations["frame"].any()


def test_dm_env_specs() -> None:
    class Specs(my_envs.DmCounting):
        def observation_spec(self) -> Any:
            return {
                "bounded": specs.BoundedArray((2,), np.float64, -1.0, [2.0, 3.0]),
                "floats": specs.Array((3, 2), np.float32),
                "ints": specs.Array((2,), np.int16),
                "flag": specs.Array((), np.bool_),
                "class": specs.DiscreteArray(5),
                "words": specs.StringArray(()),
            }

    space: Any = DmEnvAdapter(Specs(3, 0.0)).observation_space
    assert space["bounded"] == spaces.Box(np.full(2, -1.0), np.array([2.0, 3.0]), (2,), np.float64)
    assert space["floats"].shape == (3, 2) and space["floats"].contains(np.full((3, 2), 1e30, np.float32))
    assert space["ints"].contains(np.full(2, -(2**15), np.int16))
    assert space["flag"].contains(np.array(True)) and space["class"] == spaces.Discrete(5)
    assert isinstance(space["words"], spaces.Text)


@pytest.mark.parametrize(
    ("space", "value", "shape", "dtype", "first"),
    [
        (spaces.Box(0, 255, (4, 5, 3), np.uint8), np.full((4, 5, 3), 9, np.uint8), (4, 5, 3), np.uint8, 9),
        (spaces.Box(0, 255, (4, 5), np.uint8), np.full((4, 5), 9, np.uint8), (4, 5, 1), np.uint8, 9),
        (spaces.Box(0, 255, (4,), np.uint8), np.full(4, 9, np.uint8), (4, 1, 1), np.float32, 9),
        (spaces.Box(-1, 1, (6,), np.float64), np.full(6, 0.5), (6, 1, 1), np.float32, 0.5),
        (spaces.Box(-1, 1, (6, 2), np.float32), np.full((6, 2), 0.5), (6, 2, 1), np.float32, 0.5),
        (spaces.Box(-9, 9, (), np.int64), 7, (1, 1, 1), np.float32, 7),
        (spaces.Discrete(3, start=5), 5, (3, 1, 1), np.float32, 1),
    ],
)
def test_frames_of_all_kinds(space: Any, value: Any, shape: Any, dtype: Any, first: float) -> None:
    env = OwnEnv(my_envs.Fixed(space, [value]), 0, "t")
    frame = env.reset()[0]["frame"]
    assert frame.shape == shape and frame.dtype == dtype and frame.ravel()[0] == first
    assert env.observation_space["frame"].contains(frame)  # type: ignore[index]


def test_one_hot() -> None:
    env = OwnEnv(my_envs.Fixed(spaces.Discrete(3, start=5), [5, 6, 7]), 0, "t")
    frames = [env.reset()[0]["frame"].ravel().tolist() for _ in range(3)]
    assert frames == [[0, 1, 0], [0, 0, 1], [1, 0, 0]]


@pytest.mark.parametrize("value", ["go left", b"go left", np.array("go left"), np.array("go left", object)])
def test_instructions_as_text(value: Any) -> None:
    space = spaces.Dict({"frame": spaces.Box(0, 255, (2, 2), np.uint8), "instruction": spaces.Text(100)})
    env = OwnEnv(my_envs.Fixed(space, [{"frame": np.zeros((2, 2), np.uint8), "instruction": value}]), 3, "t")
    assert env.reset()[0]["instruction"].tolist() == word_ids("go left", 3).tolist()


def test_instructions_as_ids() -> None:
    words = spaces.Box(0, 2000, (4,), np.int64)
    space = spaces.Dict({"frame": spaces.Box(0, 255, (2, 2), np.uint8), "instruction": words})

    def ids(values: list[int], length: int) -> list[int]:
        observation = {"frame": np.zeros((2, 2), np.uint8), "instruction": np.array(values)}
        return OwnEnv(my_envs.Fixed(space, [observation]), length, "t").reset()[0]["instruction"].tolist()

    assert ids([1, 1000, 0, 7], 2) == [1, 1000]
    assert ids([1, 1000, 0, 7], 6) == [1, 1000, 0, 7, 0, 0]
    with pytest.raises(ValueError, match=r"env of task t: its instruction is .* word ids are 0 to 1000"):
        ids([1, 1001, 0, 7], 6)


def test_split_picks_the_level() -> None:
    suite = own_suite("make_counting")
    task = replace(suite.tasks[0], test_level="my_envs:make_dm_counting")
    for split, num_actions in (("train", 3), ("test", 4)):
        env = make_vector_env(suite, task, 1, SETTINGS, [0], split=split)
        assert env.single_action_space.n == num_actions


def test_tasks_without_instruction_get_empty_ones() -> None:
    suite = own_suite("make_counting", "make_dm_counting")
    spaces_ = suite_spaces(suite, SETTINGS)
    assert spaces_.instruction_length == 4
    env = make_vector_env(suite, suite.tasks[0], 1, SETTINGS, [0], spaces=spaces_)
    assert env.reset()[0]["instruction"].tolist() == [[0, 0, 0, 0]]


@pytest.mark.parametrize(
    ("functions", "message"),
    [
        (["make_counting", "make_small"], r"t0 are uint8 \(6, 5, 2\) and those of t1 are uint8 \(4, 4, 1\)"),
        (["make_counting", "make_too_bright"], "t1 are float32"),
        (["make_continuous"], "t0: its actions are Box"),
        (["make_nothing"], "t0: it returned str"),
        (["make_exit"], r"t0: my_envs:make_exit failed: SystemExit: 7"),
    ],
)
def test_suites_that_do_not_fit(functions: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_suite(own_suite(*functions), SETTINGS)


@pytest.mark.parametrize(
    ("space", "message"),
    [
        (spaces.Dict({"image": spaces.Discrete(2)}), "keys \\['image'\\]"),
        (spaces.Dict({"frame": spaces.Discrete(2), "speed": spaces.Discrete(2)}), "'speed'"),
        (spaces.Box(0, 1, (1, 2, 3, 4)), "at most 3 dimensions"),
        (spaces.Tuple([spaces.Discrete(2)]), "its frame is Tuple"),
        (spaces.Dict({"frame": spaces.Discrete(2), "instruction": spaces.Discrete(2)}), "its instruction is Discrete"),
    ],
)
def test_observations_that_do_not_fit(space: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"env of task t: .*{message}"):
        OwnEnv(my_envs.Fixed(space, [0]), 0, "t")


@pytest.mark.parametrize("value", [np.zeros((6, 5, 2)), np.zeros((6, 5, 1), np.uint8), np.zeros((6, 5), np.uint8)])
def test_a_frame_other_than_declared_is_refused(value: np.ndarray) -> None:
    env = OwnEnv(my_envs.Fixed(spaces.Box(0, 255, (6, 5, 2), np.uint8), [value]), 0, "t")
    with pytest.raises(ValueError, match="env of task t: it returned a frame"):
        env.reset()


@pytest.mark.parametrize("frames", [-1, 1.5, True, "4"])
def test_bad_frames_in_info(frames: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    env = own_env("make_counting", num_envs=1)
    env.reset()
    row: Any = (np.zeros((6, 5, 2), np.uint8), 0.0, False, False, {"frames": frames})
    monkeypatch.setattr(my_envs.Counting, "step", lambda self, action: row)
    with pytest.raises(ValueError, match='env of task t0: info\\["frames"\\] is'):
        env.step(np.array([0]))


def test_a_nan_reward_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    env = own_env("make_counting", num_envs=1)
    env.reset()
    row: Any = (np.zeros((6, 5, 2), np.uint8), float("nan"), False, False, {})
    monkeypatch.setattr(my_envs.Counting, "step", lambda self, action: row)
    *_, infos = stepped = env.step(np.array([0]))
    assert np.isnan(stepped[1][0]) and infos["frames"].tolist() == [1]


def test_probe() -> None:
    for function, message in (
        ("make_black", "probe: the frame of task t0 did not change in 50 random steps, all its values lie from 0 to 0"),
        ("make_too_bright", "probe: frame of task t0 at step 0 is float32 .* from 2.0 to 2.0"),
    ):
        suite = own_suite(function)
        with pytest.raises(ValueError, match=f"{message}.*environment.probe=false"):
            probe(suite, suite.tasks[0], SETTINGS, 0)
    for function in ("make_counting", "make_dm_counting"):
        suite = own_suite(function)
        probe(suite, suite.tasks[0], SETTINGS, 0)
