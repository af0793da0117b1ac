"""Four tiny levels that an agent learns in seconds on a CPU, and that together prove the pipeline.

- `catch`: a ball falls 4 rows in 4 steps; +1 if the paddle is under it then, else -1.
- `memory`: a cue is seen on the first row only; 4 steps later the choice pays +1 if it matches the cue, else -1.
- `instruction`: each of 5 steps pays 1 for the direction that only the instruction names.
- `large_rewards`: +100 for walking onto a target within 6 steps, else -100: other levels' rewards times 100.

A frame is uint8 [20, 20, 1]: 5 x 5 cells of 4 x 4 pixels. All E games of a level step together in NumPy. Each game has
a random generator of its own, so its episodes do not depend on how many games run beside it.
Exact scores (uniform random play, optimal play) lie in data/toy.csv; tests/test_tasks_toy.py computes them anew.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from gymnasium import spaces

from tasks.contract import Observations, Step, TaskVectorEnv
from tasks.instruction import word_ids

CELLS = 5  # per side
CELL_PIXELS = 4
FRAME_SHAPE = (CELLS * CELL_PIXELS, CELLS * CELL_PIXELS, 1)
EPISODES_DRAWN = 256  # random numbers are drawn for so many episodes at once, one call is dear
DRAWS = 2  # random numbers in [0, 1) that an episode may use

CATCH_STEPS = 4
MEMORY_STEPS = 5
INSTRUCTION_STEPS = 5
WALK_STEPS = 6
WALK_CELLS = 3  # the walk's field has 3 x 3 places, on every second cell of the frame
DIRECTIONS = np.array([[0, 0], [-1, 0], [1, 0], [0, -1], [0, 1]])  # stay, up, down, left, right: (row, column)

# State of E games, int64 [E, 4]: steps played in this episode, then what a level needs.
State = np.ndarray


@dataclass(frozen=True)
class Level:
    """The rules of a level.

    num_actions: legal actions.
    start: uniform draws [n, 2] -> states [n, 4].
    advance: (states before the step, actions [E]) -> rewards [E], over [E]; changes the states in place.
    paint: (states, cells [E, 5, 4, 5, 4] of zeros) -> None, draws the frames.
    texts: the instruction of a game is `texts[state[1]]`; empty for a level without instructions.
    """

    num_actions: int
    start: Callable[[np.ndarray], State]
    advance: Callable[[State, np.ndarray], tuple[np.ndarray, np.ndarray]]
    paint: Callable[[State, np.ndarray], None]
    texts: tuple[str, ...] = ()


def _state(*columns: np.ndarray | int) -> State:
    """States [n, 4] from their last columns; steps played are 0."""
    return np.stack(np.broadcast_arrays(0, *columns, *[0] * (3 - len(columns))), axis=1).astype(np.int64)


def _pick(draws: np.ndarray, count: int) -> np.ndarray:
    """Uniform numbers in [0, 1) -> uniform integers in [0, count)."""
    return (draws * count).astype(np.int64)


def _fill(cells: np.ndarray, row: np.ndarray | int, column: np.ndarray | int, grey: int) -> None:
    """Fill one cell per game."""
    cells[np.arange(len(cells)), row, :, column, :] = grey


def _catch_start(draws: np.ndarray) -> State:  # ball column, paddle column
    return _state(_pick(draws[:, 0], CELLS), CELLS // 2)


def _catch_advance(state: State, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    state[:, 0] += 1
    state[:, 2] = np.clip(state[:, 2] + actions - 1, 0, CELLS - 1)
    over = state[:, 0] == CATCH_STEPS
    return np.where(over, np.where(state[:, 1] == state[:, 2], 1.0, -1.0), 0.0), over


def _catch_paint(state: State, cells: np.ndarray) -> None:
    _fill(cells, CELLS - 1, state[:, 2], 128)
    _fill(cells, state[:, 0], state[:, 1], 255)


def _memory_start(draws: np.ndarray) -> State:  # cue: 0 = left, 1 = right
    return _state(_pick(draws[:, 0], 2))


def _memory_advance(state: State, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    state[:, 0] += 1
    over = state[:, 0] == MEMORY_STEPS
    return np.where(over, np.where(actions == state[:, 1], 1.0, -1.0), 0.0), over


def _memory_paint(state: State, cells: np.ndarray) -> None:
    """The cue on the first row of an episode, then a clock in the middle; from the cue on, all games look alike."""
    _fill(cells, np.minimum(state[:, 0], CELLS - 1), CELLS // 2, 128)
    cue = np.flatnonzero(state[:, 0] == 0)
    cells[cue, 0, :, state[cue, 1] * (CELLS - 1), :] = 255


def _instruction_start(draws: np.ndarray) -> State:  # index of the direction
    return _state(_pick(draws[:, 0], 4))


def _instruction_advance(state: State, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    state[:, 0] += 1
    return np.where(actions == state[:, 1], 1.0, 0.0), state[:, 0] == INSTRUCTION_STEPS


def _instruction_paint(state: State, cells: np.ndarray) -> None:
    """A clock, the same for all directions."""
    _fill(cells, np.minimum(state[:, 0], CELLS - 1), CELLS // 2, 128)


def _walk_start(draws: np.ndarray) -> State:  # target row and column; the walker starts in the middle
    target = _pick(draws[:, 0], WALK_CELLS**2 - 1)
    target += target >= WALK_CELLS**2 // 2  # not in the middle
    return _state(target, WALK_CELLS // 2, WALK_CELLS // 2)


def _walk_advance(state: State, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    state[:, 0] += 1
    state[:, 2:] = np.clip(state[:, 2:] + DIRECTIONS[actions], 0, WALK_CELLS - 1)
    there = state[:, 2] * WALK_CELLS + state[:, 3] == state[:, 1]
    over = there | (state[:, 0] == WALK_STEPS)
    return np.where(over, np.where(there, 100.0, -100.0), 0.0), over


def _walk_paint(state: State, cells: np.ndarray) -> None:
    row, column = np.divmod(state[:, 1], WALK_CELLS)
    _fill(cells, 2 * row, 2 * column, 255)
    _fill(cells, 2 * state[:, 2], 2 * state[:, 3], 128)


LEVELS = {
    "catch": Level(3, _catch_start, _catch_advance, _catch_paint),
    "memory": Level(2, _memory_start, _memory_advance, _memory_paint),
    "instruction": Level(
        4,
        _instruction_start,
        _instruction_advance,
        _instruction_paint,
        ("up please", "down please", "left please", "right please"),
    ),
    "large_rewards": Level(5, _walk_start, _walk_advance, _walk_paint),
}


class ToyVectorEnv(TaskVectorEnv):
    """E games of one level, one frame per step. An episode's end is always a termination."""

    def __init__(self, level: str, instruction_length: int, seeds: Sequence[int]) -> None:
        """Games of `LEVELS[level]`, one per seed."""
        self._level = LEVELS[level]
        super().__init__(spaces.Box(0, 255, FRAME_SHAPE, np.uint8), instruction_length, self._level.num_actions, seeds)
        texts = [word_ids(text, instruction_length) for text in self._level.texts or ("",)]
        self._words = np.stack(texts)
        self._frame = np.zeros((self.num_envs, *FRAME_SHAPE), np.uint8)
        self._cells = self._frame.reshape(self.num_envs, CELLS, CELL_PIXELS, CELLS, CELL_PIXELS)
        self._state = np.zeros((self.num_envs, 4), np.int64)
        self._over = np.zeros(self.num_envs, np.bool_)
        self._draws = np.zeros((self.num_envs, EPISODES_DRAWN, DRAWS))
        self._episode = np.zeros(self.num_envs, np.int64)
        self._actions = np.zeros(self.num_envs, np.int32)
        self._generators: list[np.random.Generator] = []

    def _start(self, seeds: tuple[int, ...]) -> Observations:
        self._generators = [np.random.default_rng(seed) for seed in seeds]
        self._episode[:] = 0
        self._restart(np.arange(self.num_envs))
        self._over = np.zeros(self.num_envs, np.bool_)
        return self._observe()

    def _begin(self, actions: np.ndarray) -> None:
        self._actions = actions

    def _finish(self) -> Step:
        reset = self._over
        rewards, over = self._level.advance(self._state, self._actions)
        if reset.any():
            self._restart(np.flatnonzero(reset))
            rewards[reset], over[reset] = 0.0, False
        self._over = over
        infos = {"frames": 1 - reset.astype(np.int32), "reset": reset}
        return self._observe(), rewards, over, np.zeros(self.num_envs, np.bool_), infos

    def _restart(self, games: np.ndarray) -> None:
        """Begin a new episode in these games (indices), with the next random numbers of each."""
        turns = self._episode[games] % EPISODES_DRAWN
        for game in games[turns == 0]:
            self._draws[game] = self._generators[game].random((EPISODES_DRAWN, DRAWS))
        self._state[games] = self._level.start(self._draws[games, turns])
        self._episode[games] += 1

    def _observe(self) -> Observations:
        self._frame.fill(0)
        self._level.paint(self._state, self._cells)
        if not self._words.shape[1]:
            return {"frame": self._frame}
        texts = self._state[:, 1] if self._level.texts else np.zeros(self.num_envs, np.int64)
        return {"frame": self._frame, "instruction": self._words[texts]}
