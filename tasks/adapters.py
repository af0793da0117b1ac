"""Foreign environments in our terms: dm_env.Environment -> gymnasium.Env, any observation -> {frame, instruction}.

A dm_env episode that ends (LAST) with discount 0 is terminated, one that ends with discount > 0 is truncated.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import dm_env  # type: ignore[import-untyped]
import gymnasium
import numpy as np
from dm_env import specs
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from tasks.contract import Observations, Step, TaskVectorEnv, instruction_space
from tasks.instruction import NUM_BUCKETS, word_ids

Encode = Callable[[Any], np.ndarray]


class DmEnvAdapter(gymnasium.Env[Any, Any]):
    """A dm_env.Environment as a gymnasium.Env with the same observations.

    dm_env has no place for the frames that a step played: an environment that counts them says so in `last_frames`.
    """

    def __init__(self, environment: dm_env.Environment) -> None:
        """Translate the specs; ValueError for one without a counterpart."""
        self._environment = environment
        self.observation_space = _space(environment.observation_spec(), "observation_spec")
        self.action_space = _space(environment.action_spec(), "action_spec")

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode; a dm_env takes its seed at construction, so `seed` has no further effect."""
        return self._environment.reset().observation, {}

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """One step; the discount of the last one tells an end from a cut."""
        step = self._environment.step(action)
        terminated, truncated = step.last() and step.discount == 0, step.last() and step.discount > 0
        frames = getattr(self._environment, "last_frames", None)
        return step.observation, step.reward, terminated, truncated, {} if frames is None else {"frames": frames}

    def close(self) -> None:
        """Close the environment."""
        self._environment.close()


def _space(spec: Any, where: str) -> spaces.Space[Any]:
    """gymnasium's counterpart of a dm_env spec (an action that is not discrete is refused later, with its name)."""
    if isinstance(spec, dict):
        return spaces.Dict({key: _space(value, f"{where}[{key!r}]") for key, value in spec.items()})
    if isinstance(spec, specs.DiscreteArray):
        return spaces.Discrete(spec.num_values)
    if isinstance(spec, specs.StringArray) or (isinstance(spec, specs.Array) and spec.dtype.kind in "OUS"):
        return spaces.Text(sys.maxsize)
    if isinstance(spec, specs.BoundedArray):
        low, high = (np.broadcast_to(bound, spec.shape) for bound in (spec.minimum, spec.maximum))
        return spaces.Box(low.astype(spec.dtype), high.astype(spec.dtype), spec.shape, spec.dtype.type)
    if isinstance(spec, specs.Array):
        integer = np.iinfo(spec.dtype) if spec.dtype.kind in "iu" else None
        lowest, highest = (integer.min, integer.max) if integer else (-np.inf, np.inf)
        if spec.dtype.kind == "b":
            lowest, highest = 0, 1
        return spaces.Box(lowest, highest, spec.shape, spec.dtype.type)
    raise ValueError(f"{where}: {spec!r} cannot be translated, use arrays, discrete arrays, strings or a dict of them")


class OwnEnv(gymnasium.Env[Any, Any]):
    """A user's environment with our observations, actions from 0, and `info["frames"]` alone."""

    def __init__(self, environment: Any, instruction_length: int, task_name: str) -> None:
        """Wrap a gymnasium.Env or dm_env.Environment; ValueError names the task and what does not fit.

        `instruction_length` = 0 leaves instructions out. The observation may be a Box, a Discrete, or a Dict of
        `frame` and, optionally, `instruction` (a text, or ints that are word ids).
        """
        if isinstance(environment, dm_env.Environment):
            environment = DmEnvAdapter(environment)
        if not isinstance(environment, gymnasium.Env):
            kind = type(environment).__name__
            raise ValueError(f"env of task {task_name}: it returned {kind}, not a gymnasium.Env or dm_env.Environment")
        actions = environment.action_space
        if not isinstance(actions, spaces.Discrete) or actions.n < 1:
            raise ValueError(f"env of task {task_name}: its actions are {actions}, only Discrete with at least 1 fits")
        self._environment = environment
        self._task_name = task_name
        self._first_action = int(actions.start)
        self.num_actions = int(actions.n)
        self.action_space = spaces.Discrete(self.num_actions)
        frame, words = _parts(environment.observation_space, task_name)
        self.has_instruction = words is not None
        self._named = isinstance(environment.observation_space, spaces.Dict)
        self.frame_space, self._encode_frame = _frame_encoder(frame, task_name)
        self._encode_words = _words_encoder(words, instruction_length, task_name)
        self._instruction_length = instruction_length
        parts: dict[str, spaces.Space[Any]] = {"frame": self.frame_space}
        if instruction_length:
            parts["instruction"] = instruction_space(instruction_length)
        self.observation_space = spaces.Dict(parts)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Observations, dict[str, Any]]:
        """Begin an episode."""
        observation, _ = self._environment.reset(seed=seed, options=options)
        return self._observe(observation), {"frames": 0}

    def step(self, action: int) -> tuple[Observations, float, bool, bool, dict[str, Any]]:
        """One step; `info["frames"]` is the environment's own number of frames, 1 if it gives none."""
        observation, reward, terminated, truncated, info = self._environment.step(self._first_action + int(action))
        frames = info.get("frames", 1)
        if isinstance(frames, bool) or not isinstance(frames, int | np.integer) or frames < 0:
            raise ValueError(f'env of task {self._task_name}: info["frames"] is {frames!r}, not an integer of at least 0')
        return self._observe(observation), float(reward), bool(terminated), bool(truncated), {"frames": int(frames)}

    def close(self) -> None:
        """Close the user's environment."""
        self._environment.close()

    def _observe(self, observation: Any) -> Observations:
        encoded = {"frame": self._encode_frame(observation["frame"] if self._named else observation)}
        if self._instruction_length:
            words = observation["instruction"] if self.has_instruction else ""
            encoded["instruction"] = self._encode_words(words)
        return encoded


def _parts(space: spaces.Space[Any], task_name: str) -> tuple[spaces.Space[Any], spaces.Space[Any] | None]:
    """The spaces of the frame and of the instruction (None: there is none)."""
    if not isinstance(space, spaces.Dict):
        return space, None
    keys = set(space.spaces)
    if "frame" not in keys or not keys <= {"frame", "instruction"}:
        raise ValueError(
            f"env of task {task_name}: its observations have the keys {sorted(keys)}, "
            "only frame and, optionally, instruction fit"
        )
    return space["frame"], space["instruction"] if "instruction" in keys else None


def _frame_encoder(space: spaces.Space[Any], task_name: str) -> tuple[spaces.Box, Encode]:
    """The space [H, W, C] of frames, and the function that makes an observation one."""
    if isinstance(space, spaces.Discrete):
        first, one_hot = int(space.start), np.eye(int(space.n), dtype=np.float32)[:, :, None, None]
        return spaces.Box(0.0, 1.0, one_hot.shape[1:], np.float32), lambda value: one_hot[int(value) - first]
    if not isinstance(space, spaces.Box) or len(space.shape) > 3 or 0 in space.shape:
        raise ValueError(
            f"env of task {task_name}: its frame is {space}, only a Box of at most 3 dimensions or a Discrete fits"
        )
    pixels = space.dtype == np.uint8 and len(space.shape) >= 2
    dtype: Any = np.uint8 if pixels else np.float32
    shape = (*space.shape, *[1] * (3 - len(space.shape)))
    low, high = (bound.astype(dtype).reshape(shape) for bound in (space.low, space.high))

    def encode(value: Any) -> np.ndarray:
        array = np.asarray(value)
        # Without this check a smaller array would be stretched, and a float one cut to whole numbers.
        if array.shape != space.shape or (pixels and array.dtype != np.uint8):
            raise ValueError(
                f"env of task {task_name}: it returned a frame {array.dtype} {array.shape}, "
                f"its observation_space says {space.dtype} {space.shape}"
            )
        return array.astype(dtype, copy=False).reshape(shape)

    return spaces.Box(low, high, shape, dtype), encode


def _words_encoder(space: spaces.Space[Any] | None, length: int, task_name: str) -> Encode:
    """The function that makes an instruction int32 [length]; without instructions (None) all are empty."""
    integers = isinstance(space, spaces.Box | spaces.MultiDiscrete) and np.issubdtype(space.dtype, np.integer)
    if integers and space is not None and space.shape is not None and len(space.shape) == 1:
        return lambda value: _word_ids_of(value, length, task_name)
    if space is None or isinstance(space, spaces.Text):
        return lambda value: word_ids(_text(value), length)
    raise ValueError(f"env of task {task_name}: its instruction is {space}, only a Text or integers [words] fit")


def _text(value: Any) -> str:
    """A str from what engines call one: str, bytes, or a numpy array of shape () that holds either."""
    value = value.item() if isinstance(value, np.ndarray) else value
    return value.decode("utf-8") if isinstance(value, bytes) else str(value)


def _word_ids_of(value: Any, length: int, task_name: str) -> np.ndarray:
    """A user's own word ids, cut or filled with 0."""
    given = np.asarray(value)
    if given.ndim != 1 or given.min(initial=0) < 0 or given.max(initial=0) > NUM_BUCKETS:
        raise ValueError(f"env of task {task_name}: its instruction is {given}, word ids are 0 to {NUM_BUCKETS}")
    ids = np.zeros(length, np.int32)
    ids[: len(given)] = given[:length]
    return ids


class OwnVectorEnv(TaskVectorEnv):
    """E copies of a user's environment, stepped one after the other."""

    def __init__(self, make: Callable[[int], OwnEnv], instruction_length: int, seeds: Sequence[int]) -> None:
        """Call `make(seed)` once per seed."""
        self._games = SyncVectorEnv(
            [lambda seed=seed: make(seed) for seed in seeds],  # type: ignore[misc]
            copy=False,
            autoreset_mode=AutoresetMode.NEXT_STEP,
        )
        first: Any = self._games.envs[0]
        super().__init__(first.frame_space, instruction_length, first.num_actions, seeds)
        self._over = np.zeros(self.num_envs, np.bool_)
        self._actions = np.zeros(self.num_envs, np.int32)

    def close_extras(self, **kwargs: Any) -> None:
        """Close all environments."""
        self._games.close()

    def _start(self, seeds: tuple[int, ...]) -> Observations:
        observations, _ = self._games.reset(seed=list(seeds))
        self._over = np.zeros(self.num_envs, np.bool_)
        return observations

    def _begin(self, actions: np.ndarray) -> None:
        self._actions = actions

    def _finish(self) -> Step:
        observations, rewards, terminated, truncated, infos = self._games.step(self._actions)
        reset, self._over = self._over, terminated | truncated
        frames = infos["frames"].astype(np.int32)
        return observations, rewards, terminated, truncated, {"frames": frames, "reset": reset}
