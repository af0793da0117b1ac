"""The toy suite: exact scores recomputed by enumeration, rules by value, games independent of their neighbours."""

import time
from collections.abc import Callable
from fractions import Fraction
from functools import cache
from itertools import product

import numpy as np
import pytest

from tasks.environment import EnvironmentSettings, TaskVectorEnv, make_vector_env, probe, suite_spaces
from tasks.instruction import word_ids
from tasks.registry import load_suite

TOY = load_suite("toy")
SETTINGS = EnvironmentSettings(instruction_length=3)


def make(level: str, seeds: list[int]) -> TaskVectorEnv:
    return make_vector_env(TOY, TOY.task(level), len(seeds), SETTINGS, seeds)


def cells(observation: dict[str, np.ndarray]) -> np.ndarray:
    """The grey levels of the 5 x 5 cells [E, 5, 5], each cell being uniform."""
    frame = observation["frame"][..., 0].reshape(-1, 5, 4, 5, 4)
    assert (frame == frame[:, :, :1, :, :1]).all()
    return frame[:, :, 0, :, 0]


def expected(values: list[Fraction], optimal: bool) -> Fraction:
    """Value of a state from the values of its actions, under optimal or uniformly random play."""
    return max(values) if optimal else sum(values, Fraction(0)) / len(values)


def catch_score(optimal: bool) -> Fraction:
    @cache
    def value(step: int, ball: int, paddle: int) -> Fraction:
        if step == 4:
            return Fraction(1 if ball == paddle else -1)
        return expected([value(step + 1, ball, min(4, max(0, paddle + move))) for move in (-1, 0, 1)], optimal)

    return sum((value(0, ball, 2) for ball in range(5)), Fraction(0)) / 5


def memory_score(optimal: bool) -> Fraction:
    """The player saw the cue: only the last of five actions counts."""
    return expected([Fraction(1), Fraction(-1)], optimal)


def instruction_score(optimal: bool) -> Fraction:
    return 5 * expected([Fraction(1), Fraction(0), Fraction(0), Fraction(0)], optimal)


def large_rewards_score(optimal: bool) -> Fraction:
    @cache
    def value(step: int, target: tuple[int, int], row: int, column: int) -> Fraction:
        values = []
        for move in ((0, 0), (-1, 0), (1, 0), (0, -1), (0, 1)):
            place = (min(2, max(0, row + move[0])), min(2, max(0, column + move[1])))
            if place == target:
                values.append(Fraction(100))
            else:
                values.append(Fraction(-100) if step == 5 else value(step + 1, target, *place))
        return expected(values, optimal)

    targets = [target for target in product(range(3), range(3)) if target != (1, 1)]
    return sum((value(0, target, 1, 1) for target in targets), Fraction(0)) / 8


SCORES: dict[str, Callable[[bool], Fraction]] = {
    "catch": catch_score,
    "memory": memory_score,
    "instruction": instruction_score,
    "large_rewards": large_rewards_score,
}


@pytest.mark.parametrize("level", TOY.task_names)
def test_scores_are_exact(level: str) -> None:
    assert TOY.task(level).random_score == float(SCORES[level](False))
    assert TOY.task(level).human_score == float(SCORES[level](True))


def returns_of(env: TaskVectorEnv, act: Callable[[dict[str, np.ndarray]], np.ndarray], num_steps: int) -> np.ndarray:
    """Returns of all episodes that ended in `num_steps` steps."""
    observation, _ = env.reset()
    total, returns = np.zeros(env.num_envs), []
    for _ in range(num_steps):
        observation, rewards, terminated, truncated, infos = env.step(act(observation))
        assert not truncated.any() and not rewards[infos["reset"]].any()
        assert infos["frames"].tolist() == (~infos["reset"]).astype(int).tolist()
        total += rewards
        returns += total[terminated].tolist()
        total[terminated] = 0
    return np.array(returns)


@pytest.mark.parametrize("level", TOY.task_names)
def test_random_play_agrees_with_the_random_score(level: str) -> None:
    env, generator = make(level, list(range(64))), np.random.default_rng(1)
    num_actions = env.single_action_space.n
    returns = returns_of(env, lambda _: generator.integers(num_actions, size=64), 1500)
    error = returns.std() / np.sqrt(len(returns))
    assert abs(returns.mean() - float(SCORES[level](False))) < 4 * error


def play_catch(observation: dict[str, np.ndarray]) -> np.ndarray:
    grid = cells(observation)
    paddle = (grid == 128).any(axis=1).argmax(axis=1)  # hidden under a caught ball, when no action counts any more
    return 1 + np.sign((grid == 255).any(axis=1).argmax(axis=1) - paddle)


def play_instruction(observation: dict[str, np.ndarray]) -> np.ndarray:
    firsts = [word_ids(word, 1)[0] for word in ("up", "down", "left", "right")]
    return np.array([firsts.index(word) for word in observation["instruction"][:, 0]])


def play_large_rewards(observation: dict[str, np.ndarray]) -> np.ndarray:
    grid, actions = cells(observation), []
    for game in grid:
        walker, target = np.argwhere(game == 128), np.argwhere(game == 255)  # one hides the other when the game is over
        row, column = target[0] - walker[0] if len(walker) and len(target) else (0, 0)
        actions.append(1 if row < 0 else 2 if row > 0 else 3 if column < 0 else 4 if column > 0 else 0)
    return np.array(actions)


def make_memory_player() -> Callable[[dict[str, np.ndarray]], np.ndarray]:
    cues = np.zeros(16, int)

    def play(observation: dict[str, np.ndarray]) -> np.ndarray:
        grid = cells(observation)
        first = (grid == 255).any(axis=(1, 2))
        cues[first] = (grid[first, 0, 4] == 255).astype(int)
        return cues.copy()

    return play


@pytest.mark.parametrize(
    ("level", "player"),
    [
        ("catch", play_catch),
        ("memory", make_memory_player()),
        ("instruction", play_instruction),
        ("large_rewards", play_large_rewards),
    ],
)
def test_a_perfect_player_gets_the_optimal_score(level: str, player: Callable[[dict[str, np.ndarray]], np.ndarray]) -> None:
    returns = returns_of(make(level, list(range(16))), player, 60)
    assert len(returns) > 100 and (returns == float(SCORES[level](True))).all()


def test_the_cue_is_gone_when_the_choice_comes() -> None:
    env = make("memory", list(range(40)))
    first = cells(env.reset()[0])
    left, right = first[:, 0, 0] == 255, first[:, 0, 4] == 255
    assert (left ^ right).all() and 5 < left.sum() < 35
    for _ in range(5):
        observation, _, terminated, _, _ = env.step(np.zeros(40, int))
        assert (observation["frame"] == observation["frame"][0]).all()
        assert not observation["instruction"].any()
    assert terminated.all()


def test_only_the_instruction_tells_the_direction() -> None:
    env = make("instruction", list(range(40)))
    observation, _ = env.reset()
    assert {tuple(words) for words in observation["instruction"].tolist()} == {
        tuple(word_ids(text, 3).tolist()) for text in ("up please", "down please", "left please", "right please")
    }
    for _ in range(6):
        assert (observation["frame"] == observation["frame"][0]).all()
        observation, *_ = env.step(np.zeros(40, int))


@pytest.mark.parametrize("level", TOY.task_names)
def test_games_do_not_depend_on_their_neighbours(level: str) -> None:
    seeds = [11, 12, 13, 14, 15, 16, 17, 11]
    many, one = make(level, seeds), make(level, [13])
    generator = np.random.default_rng(0)
    actions = generator.integers(many.single_action_space.n, size=(2000, 8))  # more episodes than are drawn at once
    actions[:, 7] = actions[:, 0]
    seen, alone = many.reset()[0]["frame"].copy(), one.reset()[0]["frame"].copy()
    for row in actions:
        assert np.array_equal(seen[2], alone[0]) and np.array_equal(seen[0], seen[7])
        step, single = many.step(row), one.step(row[2:3])
        seen, alone = step[0]["frame"], single[0]["frame"]
        assert (step[1][2], step[2][2], step[4]["reset"][2]) == (single[1][0], single[2][0], single[4]["reset"][0])


def test_seeds_matter_and_a_reset_starts_over() -> None:
    env = make("catch", [1, 2, 3, 4, 5, 6])
    columns = [cells(env.reset(seed=[s] * 6)[0])[0, 0].argmax() for s in range(20)]
    assert set(columns) == {0, 1, 2, 3, 4}
    first = env.reset()[0]["frame"].copy()
    for _ in range(7):
        env.step(np.ones(6, int))
    assert np.array_equal(first, env.reset()[0]["frame"])


def test_spaces_and_probe() -> None:
    spaces = suite_spaces(TOY, SETTINGS)
    assert (spaces.frame_shape, spaces.frame_dtype, spaces.instruction_length) == ((20, 20, 1), "uint8", 3)
    assert (spaces.num_actions, spaces.frames_per_step) == ((3, 2, 4, 5), 1)
    for task in TOY.tasks:
        probe(TOY, task, SETTINGS, 3)


def test_a_step_is_cheap() -> None:
    """Microseconds per game: 2 to 5 were measured with 16 games."""
    env = make("large_rewards", list(range(16)))
    env.reset()
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(100):
            env.step(np.ones(16, int))
        best = min(best, (time.perf_counter() - start) / 1600)
    assert best < 30e-6
