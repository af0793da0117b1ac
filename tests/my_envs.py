"""Small environments of a user, for the tests: counting (gymnasium and dm_env), and some that misbehave."""

from __future__ import annotations

from typing import Any

import dm_env  # type: ignore[import-untyped]
import gymnasium
import numpy as np
from dm_env import specs
from gymnasium import spaces


class Counting(gymnasium.Env[Any, Any]):
    """Observation = step index, reward = 100 * index + action; `length` steps, then terminated or truncated."""

    def __init__(self, seed: int, length: int, truncates: bool, first_action: int, num_actions: int) -> None:
        self.seed, self.length, self.truncates, self.index = seed, length, truncates, 0
        self.observation_space = spaces.Box(0, 255, (6, 5, 2), np.uint8)
        self.action_space = spaces.Discrete(num_actions, start=first_action)
        self.closed = False

    def _observe(self) -> np.ndarray:
        return np.full((6, 5, 2), self.index, np.uint8)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        self.index = 0
        return self._observe(), {"anything": "goes"}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        reward = 100.0 * self.index + action
        self.index += 1
        over = self.index == self.length
        return self._observe(), reward, over and not self.truncates, over and self.truncates, {"frames": 3}

    def close(self) -> None:
        self.closed = True


def make_counting(seed: int, length: int = 7, truncates: bool = False, first_action: int = 0, num_actions: int = 3) -> Counting:
    """The counting environment."""
    return Counting(seed, length, truncates, first_action, num_actions)


class DmCounting(dm_env.Environment):
    """The same as a dm_env.Environment with an instruction; its last discount is `discount`."""

    def __init__(self, length: int, discount: float) -> None:
        self.length, self.discount, self.index = length, discount, 0

    def observation_spec(self) -> Any:
        frame = specs.BoundedArray((6, 5, 2), np.uint8, 0, 255)
        return {"frame": frame, "instruction": specs.Array((), np.dtype(object))}

    def action_spec(self) -> Any:
        return specs.DiscreteArray(4)

    def _observe(self) -> dict[str, Any]:
        return {"frame": np.full((6, 5, 2), self.index, np.uint8), "instruction": f"step {self.index}"}

    def reset(self) -> Any:
        self.index = 0
        return dm_env.restart(self._observe())

    def step(self, action: int) -> Any:
        reward = 100.0 * self.index + action
        self.index += 1
        if self.index == self.length:
            return dm_env.TimeStep(dm_env.StepType.LAST, reward, self.discount, self._observe())
        return dm_env.transition(reward, self._observe())


def make_dm_counting(seed: int, length: int = 7, discount: float = 0.0) -> DmCounting:
    """The counting environment of dm_env."""
    return DmCounting(length, discount)


class Fixed(gymnasium.Env[Any, Any]):
    """Returns the observations that it is given, in turn, in a space that it is given."""

    def __init__(self, space: spaces.Space[Any], observations: list[Any]) -> None:
        self.observation_space, self.action_space = space, spaces.Discrete(2)
        self.observations, self.index = observations, 0

    def _observe(self) -> Any:
        self.index += 1
        return self.observations[self.index % len(self.observations)]

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        return self._observe(), {}

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return self._observe(), 0.0, False, False, {}


def make_black(seed: int) -> Fixed:
    """A constant screen."""
    return Fixed(spaces.Box(0, 255, (6, 5, 2), np.uint8), [np.zeros((6, 5, 2), np.uint8)])


def make_too_bright(seed: int) -> Fixed:
    """Values above the declared range."""
    return Fixed(spaces.Box(0, 1, (6, 5, 2), np.float32), [np.zeros((6, 5, 2)), np.full((6, 5, 2), 2.0)])


def make_small(seed: int) -> Fixed:
    """Frames of another shape than those of the counting environment."""
    return Fixed(spaces.Box(0, 255, (4, 4), np.uint8), [np.zeros((4, 4), np.uint8)])


def make_continuous(seed: int) -> gymnasium.Env[Any, Any]:
    """Actions that are not discrete."""
    env: gymnasium.Env[Any, Any] = make_black(seed)
    env.action_space = spaces.Box(-1, 1, (2,))
    return env


def make_nothing(seed: int) -> str:
    """No environment at all."""
    return "nothing"


def make_exit(seed: int) -> Fixed:
    """Ends the program, as a script does that was meant to be run by itself."""
    raise SystemExit(7)
