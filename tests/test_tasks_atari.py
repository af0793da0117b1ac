"""The Atari adapter on the real ale_py: frames, resets, lives, actions, pixels against a slow truth."""

import gc
import inspect
import os
from typing import Any

import ale_py
import numpy as np
import pytest
from ale_py import roms
from ale_py.vector_env import AtariVectorEnv
from gymnasium.vector import AutoresetMode

from tasks.atari import ACTION_NAMES, NUM_ACTIONS, action_map, atari_options
from tasks.environment import EnvironmentSettings, TaskVectorEnv, make_vector_env, probe, suite_spaces
from tasks.registry import load_suite

ATARI = load_suite("atari57")
IMPALA = EnvironmentSettings()
MACHADO = EnvironmentSettings(atari_protocol="machado")


def make(game: str, seeds: list[int], settings: EnvironmentSettings = IMPALA, training: bool = True) -> TaskVectorEnv:
    return make_vector_env(ATARI, ATARI.task(game), len(seeds), settings, seeds, training)


def play(env: TaskVectorEnv, num_steps: int, seed: int = 0) -> list[Any]:
    """Rows (frame copy, reward, terminated, truncated, infos) of random play."""
    generator = np.random.default_rng(seed)
    rows = []
    for _ in range(num_steps):
        observation, reward, terminated, truncated, infos = env.step(generator.integers(18, size=env.num_envs))
        rows.append((observation["frame"].copy(), reward, terminated, truncated, infos))
    return rows


def test_spaces() -> None:
    spaces = suite_spaces(ATARI, IMPALA)
    assert (spaces.frame_shape, spaces.frame_dtype, spaces.instruction_length) == ((84, 84, 4), "uint8", 0)
    assert spaces.num_actions == (18,) * 57 and spaces.frames_per_step == 4
    env = make("pong", [1, 2])
    observation, infos = env.reset()
    assert set(observation) == {"frame"} and observation["frame"].shape == (2, 84, 84, 4)
    assert env.single_observation_space["frame"].contains(observation["frame"][0])
    assert env.metadata["autoreset_mode"] is AutoresetMode.NEXT_STEP
    assert infos["reset"].tolist() == [True, True] and infos["frames"].tolist() == [0, 0]
    row = play(env, 1)[0]
    assert (row[1].dtype, row[2].dtype, row[3].dtype) == (np.float64, np.bool_, np.bool_)
    assert (row[4]["frames"].dtype, row[4]["reset"].dtype) == (np.int32, np.bool_)
    env.close()


@pytest.mark.parametrize(("game", "count"), [("pong", 6), ("breakout", 4), ("qbert", 6), ("skiing", 3), ("boxing", 18)])
def test_minimal_actions_are_the_games_own(game: str, count: int) -> None:
    """The same buttons as the full set has under other numbers: equal games, frame by frame."""
    minimal = EnvironmentSettings(atari_actions="minimal")
    assert suite_spaces(load_suite("atari57", [game]), minimal).num_actions == (count,)
    env, full = make(game, [5], minimal), make(game, [5])
    names = [action.name for action in env._games.ale.get_action_set()]  # type: ignore[attr-defined]
    assert env.single_action_space.n == count == len(names)
    env.reset()
    full.reset()
    generator = np.random.default_rng(0)
    for action in generator.integers(count, size=60):
        here, reward, *_ = env.step(np.array([action]))
        there, same_reward, *_ = full.step(np.array([ACTION_NAMES.index(names[action])]))
        np.testing.assert_array_equal(here["frame"], there["frame"])
        assert reward == same_reward
    with pytest.raises(ValueError, match=str(count)):
        env.step(np.array([count]))
    env.close()
    full.close()


@pytest.mark.parametrize("action_repeat", [1, 4])
def test_one_step_is_action_repeat_emulator_frames(action_repeat: int) -> None:
    env = make("pong", [1, 2], EnvironmentSettings(action_repeat=action_repeat))
    env.reset()
    before = env._games.reset()[1]["frame_number"]  # type: ignore[attr-defined]
    env._games.send(np.zeros(2, np.int32))  # type: ignore[attr-defined]
    after = env._games.recv()[4]["frame_number"]  # type: ignore[attr-defined]
    assert (after - before).tolist() == [action_repeat] * 2
    env.reset()
    assert all((row[4]["frames"] == action_repeat).all() for row in play(env, 20))


def test_no_ops_at_a_start() -> None:
    env = make("pong", [1, 2, 3, 4], EnvironmentSettings(max_episode_frames=4))
    env.reset()
    counts = env._episode_frame.tolist()  # type: ignore[attr-defined]
    for _ in range(120):  # every second step starts a new game
        if env.step(np.zeros(4, int))[4]["reset"].all():
            counts += env._episode_frame.tolist()  # type: ignore[attr-defined]
    assert len(counts) == 4 * 61 and min(counts) == 0 and max(counts) == 30 and len(set(counts)) == 31
    env = make("pong", [1, 2, 3], MACHADO)
    env.reset()
    assert env._episode_frame.tolist() == [0, 0, 0]  # type: ignore[attr-defined]


def test_every_option_is_passed_and_protocols_differ_as_published() -> None:
    impala, machado = atari_options(IMPALA, True), atari_options(MACHADO, True)
    assert set(impala) == set(inspect.signature(AtariVectorEnv.__init__).parameters) - {"self", "game", "num_envs"}
    differing = {key: (impala[key], machado[key]) for key in impala if impala[key] != machado[key]}
    assert differing == {
        "repeat_action_probability": (0.0, 0.25),
        "noop_max": (31, 1),
        "life_loss_info": (True, False),
    }
    assert atari_options(IMPALA, False)["life_loss_info"] is False
    assert (impala["reward_clipping"], impala["use_fire_reset"], impala["episodic_life"]) == (False, False, False)


def test_a_truncated_game_and_its_reset_row() -> None:
    env = make("breakout", [0, 1], EnvironmentSettings(max_episode_frames=80))
    first = env.reset()[0]["frame"].copy()
    rows = play(env, 42)
    truncated = [int(row[3].sum()) for row in rows]
    assert truncated == [2 if t in (19, 40) else 0 for t in range(42)]
    for t, (frame, reward, terminated, truncation, infos) in enumerate(rows):
        is_reset = t in (20, 41)
        assert infos["reset"].tolist() == [is_reset] * 2
        assert infos["frames"].tolist() == [0 if is_reset else 4] * 2
        if is_reset:
            assert not reward.any() and not terminated.any() and not truncation.any()
            # The first observation of a game: older frames of the stack are black.
            assert not frame[..., :3].any() and frame[..., 3].any()
    assert not first[..., :3].any()


def test_a_lost_life_ends_for_the_learner_but_not_the_game() -> None:
    training, evaluation = make("breakout", [5, 6]), make("breakout", [5, 6], training=False)
    training.reset()
    evaluation.reset()
    lives, game = np.zeros(2), 0
    rows, plain = play(training, 300), play(evaluation, 300)
    for t, (row, other) in enumerate(zip(rows, plain, strict=True)):
        # The same game, the same score, the same resets; only `terminated` says more.
        assert np.array_equal(row[0], other[0]) and np.array_equal(row[1], other[1])
        assert np.array_equal(row[4]["frames"], other[4]["frames"])
        assert np.array_equal(row[4]["reset"], other[4]["reset"])
        assert not (other[2] & ~row[2]).any()
        for e in np.flatnonzero(row[2]):
            if t + 1 < len(rows) and other[2][e]:
                assert rows[t + 1][4]["reset"][e] and rows[t + 1][4]["frames"][e] == 0
                assert lives[e] == 4  # breakout has five, and the fifth ends the game
                lives[e], game = 0, game + 1
            elif t + 1 < len(rows):
                assert not rows[t + 1][4]["reset"][e] and rows[t + 1][4]["frames"][e] == 4
                lives[e] += 1
    assert game >= 2
    resets = np.array([row[4]["reset"] for row in rows])
    ends = np.array([other[2] for other in plain])
    assert np.array_equal(resets[1:], ends[:-1])
    # A repeat cut short by the game's end counts the frames that were played.
    assert {int(row[4]["frames"][e]) for row in rows for e in (0, 1)} > {0, 4}


def test_action_names_are_ale_s_global_set() -> None:
    assert [ale_py.Action(i).name for i in range(NUM_ACTIONS)] == ACTION_NAMES
    assert action_map(ACTION_NAMES).tolist() == list(range(NUM_ACTIONS))


def test_skiing_drops_fire() -> None:
    env = make("skiing", [1])
    assert env.single_action_space.n == NUM_ACTIONS
    names = [action.name for action in env._games.ale.get_action_set()]  # type: ignore[attr-defined]
    assert len(names) == 9
    mapped = [names[i] for i in env._action_map]  # type: ignore[attr-defined]
    assert mapped == [name.replace("FIRE", "") or "NOOP" for name in ACTION_NAMES]

    def last_frame(action: int) -> np.ndarray:
        env.reset()
        for _ in range(30):
            observation, *_ = env.step(np.array([action]))
        return observation["frame"].copy()

    right, right_fire, left = (last_frame(ACTION_NAMES.index(name)) for name in ("RIGHT", "RIGHTFIRE", "LEFT"))
    assert np.array_equal(right, right_fire) and not np.array_equal(right, left)


@pytest.mark.parametrize(
    "actions", [np.array([18, 0]), np.array([0, -1]), np.array([0.0, 1.0]), np.array([0]), np.array([True, False])]
)
def test_actions_that_would_hang_are_refused(actions: np.ndarray) -> None:
    env = make("pong", [1, 2])
    env.reset()
    with pytest.raises(ValueError, match="actions: "):
        env.step_async(actions)
    env.step(np.array([17, 0], np.int32))  # and the environment still works


def test_same_seed_same_game_whatever_the_threads() -> None:
    one, two = make("ms_pacman", [7, 8, 7]), make("ms_pacman", [7, 8, 7], EnvironmentSettings(threads=2))
    assert np.array_equal(one.reset()[0]["frame"], two.reset()[0]["frame"])
    for row, other in zip(play(one, 60), play(two, 60), strict=True):
        assert all(np.array_equal(row[i], other[i]) for i in range(4))
    first = one.reset()[0]["frame"].copy()
    assert np.array_equal(first[0], first[2]) and not np.array_equal(first[0], first[1])
    assert np.array_equal(first, one.reset()[0]["frame"])
    assert np.array_equal(first[1], one.reset(seed=[8, 7, 7])[0]["frame"][0])


@pytest.mark.parametrize("seeds", [[1], [1, -1], [1, 2**31], [1, np.int64(3)], [1, True], 3])
def test_bad_seeds(seeds: Any) -> None:
    env = make("pong", [1, 2])
    with pytest.raises(ValueError, match="seeds: "):
        env.reset(seed=seeds)


def area_weights(size: int, target: int) -> np.ndarray:
    """Rows of shares with which source pixels cover a target pixel [target, size]."""
    scale = size / target
    edges = np.arange(target)[:, None] * scale
    source = np.arange(size)[None, :]
    return np.clip(np.minimum(edges + scale, source + 1) - np.maximum(edges, source), 0, None) / scale


def test_pixels_and_rewards_equal_a_slow_truth() -> None:
    """Mnih et al. 2015 on the bare emulator: maximum of the last two of four grey screens, shrunk by areas, stacked."""
    env = make("breakout", [11])
    frame = env.reset()[0]["frame"][0].astype(int)
    ale = ale_py.ALEInterface()
    ale.setInt("random_seed", 11)
    ale.setFloat("repeat_action_probability", 0.0)
    rom = roms.get_rom_path("breakout")
    assert rom is not None
    ale.loadROM(rom)
    for _ in range(env._episode_frame[0]):  # type: ignore[attr-defined]
        ale.act(0)
    rows, columns = area_weights(210, 84), area_weights(160, 84)
    stack = [np.zeros((84, 84))] * 3 + [rows @ ale.getScreenGrayscale() @ columns.T]
    generator = np.random.default_rng(3)
    for _ in range(60):
        # Half a grey level of rounding, and no more.
        assert np.abs(np.stack(stack, axis=-1) - frame).max() <= 0.5 + 1e-4
        action = int(generator.integers(NUM_ACTIONS))
        reward, screens = 0, []
        for _ in range(4):
            reward += ale.act(action)
            screens.append(ale.getScreenGrayscale())
        stack = [*stack[1:], rows @ np.maximum(screens[2], screens[3]) @ columns.T]
        observation, rewards, *_ = env.step(np.array([action]))
        frame = observation["frame"][0].astype(int)
        assert rewards[0] == reward


def test_two_in_one_process_overlap_and_close_ends_threads() -> None:
    def num_threads() -> int:
        gc.collect()
        return len(os.listdir("/proc/self/task"))  # noqa: PTH208

    before = num_threads()
    envs = [make("pong", [1, 2]), make("pong", [3])]
    assert num_threads() == before + 2
    for env in envs:
        env.reset()
    for env in envs:
        env.step_async(np.zeros(env.num_envs, int))
    for env in envs:
        assert env.step_wait()[0]["frame"].shape[0] == env.num_envs
    for env in envs:
        env.close()
    assert num_threads() == before


def test_probe_passes_a_real_game() -> None:
    seen = probe(ATARI, ATARI.task("skiing"), IMPALA, 0)
    assert 0 < seen.step_seconds < seen.reset_seconds < 60
    assert not seen.has_instruction
