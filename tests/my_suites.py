"""Environments that misbehave, for suites of the tests of whole runs."""

import gymnasium
import numpy as np


class Moving(gymnasium.Env):
    """A frame that changes, an episode of `length` steps; `fault` at step `at` of every episode."""

    def __init__(self, length: int, fault: str, at: int) -> None:
        self.observation_space = gymnasium.spaces.Box(0, 255, (12, 12, 1), np.uint8)
        self.action_space = gymnasium.spaces.Discrete(3)
        self._length, self._fault, self._at = length, fault, at
        self._t = 0

    def _frame(self):
        frame = np.zeros((12, 12, 1), np.uint8)
        if self._fault != "constant":
            frame[self._t % 12] = 255
        return frame

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._t = 0
        return self._frame(), {}

    def step(self, action):
        self._t += 1
        reward = 1.0
        if self._t == self._at:
            if self._fault == "raise":
                raise RuntimeError("the engine of this level broke")
            if self._fault == "nan":
                reward = float("nan")
        return self._frame(), reward, self._t >= self._length, False, {}


def make_moving(seed, length=5, fault="", at=0):
    return Moving(length, fault, at)
