"""An environment whose every row says which environment, row, episode and step it is, and that leaves a witness of its own.

Nothing in it depends on the actions: what an unroll has to hold follows from the seed and the number of its first row.
"""

import os
import struct
import time
from pathlib import Path

import gymnasium
import numpy as np

FRAME = (12, 12, 1)
STATISTICS = ("episode_return", "episode_frames", "episode_steps")


class Numbered(gymnasium.Env):
    """Row by row: frame = seed, row, episode, step and noise that follows from seed and row; reward and frames follow too.

    witness: folder; the file named after the seed holds the number of rows ever shown (int64), written before the row is
        shown, so that it survives kill -9. A second environment with the same seed is an error. pause: seconds a step.
    """

    observation_space = gymnasium.spaces.Box(0, 255, FRAME, np.uint8)
    action_space = gymnasium.spaces.Discrete(3)

    def __init__(self, seed: int, witness: str, pause: float) -> None:
        self._seed, self._witness, self._pause = seed, witness, pause
        self._file: int | None = None
        self.row, self.episode, self.step_index = -1, -1, 0

    def _show(self) -> np.ndarray:
        self.row += 1
        if self._witness:
            if self._file is None:
                self._file = os.open(Path(self._witness) / str(self._seed), os.O_WRONLY | os.O_CREAT | os.O_EXCL)
            os.pwrite(self._file, struct.pack("<q", self.row + 1), 0)
        words = np.random.default_rng([self._seed, self.row]).integers(0, 2**32, FRAME[0] * FRAME[1] // 4, np.uint32)
        words[:4] = self._seed, self.row, self.episode, self.step_index
        return words.view(np.uint8).reshape(FRAME)

    def reset(self, *, seed=None, options=None):
        self.episode += 1
        self.step_index = 0
        return self._show(), {}

    def step(self, action):
        time.sleep(self._pause)
        self.step_index += 1
        frame = self._show()
        over = self.step_index == 3 + (self._seed + self.episode) % 9
        cut = bool(self.episode % 2)
        return frame, float((self._seed + 7 * self.row) % 100), over and not cut, over and cut, {"frames": 1 + self.row % 3}


def make_numbered(seed, witness="", pause=0.0):
    return Numbered(seed, witness, pause)


def identity(frame: np.ndarray) -> tuple[int, int]:
    """Seed and row of a frame."""
    words = np.ascontiguousarray(frame).reshape(-1).view(np.uint32)
    return int(words[0]), int(words[1])


def oracle(seed: int, rows: int) -> dict[str, np.ndarray]:
    """The first rows of an environment by the row contract (agent/unroll.py), without agent, actor or transport."""
    env, table, over, game = make_numbered(seed), [], True, [0.0, 0, 0]
    for row in range(rows):
        ended, reward, frames = game, 0.0, 0
        first, terminated, truncated = over, False, False
        if over:
            frame, game = env.reset()[0], [0.0, 0, 0]
        else:
            frame, reward, terminated, truncated, info = env.step(0)
            frames = info["frames"]
            game = [game[0] + reward, game[1] + frames, game[2] + 1]
        over = terminated or truncated
        statistics = ended if first and row else [np.nan, 0, 0]
        table.append((frame, reward, terminated, truncated, first, frames, *statistics))
    names = ("frame", "reward", "terminated", "truncated", "first", "frames", *STATISTICS)
    return {name: np.array(column) for name, column in zip(names, zip(*table, strict=True), strict=True)}
