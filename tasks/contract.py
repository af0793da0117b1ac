"""What the agent may rely on: the settings of environments, the spaces of a suite and the vector environment itself.

Every vector environment of this package keeps these rules (`agent/actor.py` is written against them):

- Observations are a dict: `frame` [E, H, W, C], always channel-last, and, only if the suite has instructions,
  `instruction` int32 [E, L] of word ids (0 = no word). The arrays may be overwritten by the next `step_wait`.
- Actions are integers [E] in `range(single_action_space.n)`; anything else is a ValueError before an engine sees it.
- `step_async(actions)` starts a step, `step_wait()` returns it as (observations, rewards float64 [E], terminated
  bool [E], truncated bool [E], infos); `step()` does both.
- Next-step autoreset: the step after a game's end ignores the action and returns reward 0 and the first observation.
- `infos["frames"]` int32 [E]: environment frames played by this step, 0 where the row is a reset.
- `infos["reset"]` bool [E]: the row is the first of a new game. In Atari training under the protocol `impala` a lost
  life raises `terminated` while the game goes on: the next row then has `reset` False, and its action counts.
- `infos["lost"]` bool [E], only where engines can die (tasks/engine.py): the game before was lost in its middle. The row is
  also a reset; the step that led to it is no transition, and the lost game is not counted.
- `reset()` uses the seeds given at construction; `reset(seed=[...])` takes one int per environment instead.
- `close()` ends threads and environments. An environment lives in the process that built it; nothing forks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from tasks.dmlab import DmLabSettings

MAX_SEED = 2**31  # engines take seeds in [0, 2^31)
# Engines that died and were replaced; answers of the level cache, bytes that it moved, seconds spent building maps.
ENGINE_COUNTS = ("engine_restarts", "cache_hits", "cache_misses", "cache_bytes", "map_building_seconds")

Observations = dict[str, np.ndarray]
Step = tuple[Observations, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]


@dataclass(frozen=True)
class EnvironmentSettings:
    """Section `environment` of the configuration. `min` and `max` in the metadata are both allowed values.

    action_repeat: frames per agent step (IMPALA: 4) of Atari and DMLab; toy levels and own suites play 1.
    atari_protocol: `impala` = no sticky actions, 0 to 30 no-ops at a start, a lost life is an end for the learner;
        `machado` = sticky actions 0.25, no no-ops, no life loss (Machado et al. 2018, as in dopamine).
    atari_actions: `full` = all 18 in every game, as IMPALA's multi-task agent; `minimal` = those that a game's own buttons tell
        apart, 3 to 18, as most single-game results.
    frame_height, frame_width: pixels of an Atari frame (Mnih et al. 2015: 84 x 84).
    frame_stack: Atari frames stacked into the channels of an observation (Mnih et al. 2015: 4).
    max_episode_frames: frames after which an Atari game is truncated (30 minutes at 60 frames/s: 108,000).
    threads: C++ threads of one Atari vector environment.
    instruction_length: words of an instruction, longer ones are cut; only suites that have instructions use it.
    probe: play 50 random steps per task at the start and refuse a dead observation.
    dmlab: of DeepMind Lab.
    """

    action_repeat: int = field(default=4, metadata={"min": 1, "max": 100})
    atari_protocol: Literal["impala", "machado"] = "impala"
    atari_actions: Literal["full", "minimal"] = "full"
    frame_height: int = field(default=84, metadata={"min": 1, "max": 210})
    frame_width: int = field(default=84, metadata={"min": 1, "max": 160})
    frame_stack: int = field(default=4, metadata={"min": 1, "max": 16})
    max_episode_frames: int = field(default=108_000, metadata={"min": 1, "max": 10_000_000})
    threads: int = field(default=1, metadata={"min": 1, "max": 256})
    instruction_length: int = field(default=16, metadata={"min": 1, "max": 256})
    probe: bool = True
    dmlab: DmLabSettings = field(default_factory=DmLabSettings)


@dataclass(frozen=True)
class Spaces:
    """What all tasks of a suite share, and the legal actions of each.

    frame_shape: (H, W, C). frame_dtype: "uint8" or "float32".
    instruction_length: L words, 0 if no task of the suite has instructions.
    num_actions: legal actions per task, in suite order.
    frames_per_step: environment frames of one whole agent step.
    """

    frame_shape: tuple[int, int, int]
    frame_dtype: str
    instruction_length: int
    num_actions: tuple[int, ...]
    frames_per_step: int


class TaskVectorEnv(VectorEnv[Observations, np.ndarray, np.ndarray], ABC):
    """The part all adapters share: spaces, seeds, and the check of actions. See the top of this file.

    An adapter gives `_start(seeds)`, which resets all environments and returns observations, and `_finish()`, which
    returns the step of the actions that `_begin(actions int32 [E])` was given.
    """

    single_observation_space: spaces.Dict
    single_action_space: spaces.Discrete

    def __init__(self, frame: spaces.Box, instruction_length: int, num_actions: int, seeds: Sequence[int]) -> None:
        """Set the spaces for `len(seeds)` environments; `frame` is the space of one frame [H, W, C]."""
        self.num_envs = len(seeds)
        self._seeds = check_seeds(seeds, self.num_envs)
        self.metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}
        words = {"instruction": instruction_space(instruction_length)} if instruction_length else {}
        self.single_observation_space = spaces.Dict({"frame": frame, **words})
        self.single_action_space = spaces.Discrete(num_actions)
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        self._num_actions = num_actions
        self._in_flight = False

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observations, dict[str, Any]]:
        """Start all games anew; without `seed` (one int per environment) the construction's seeds are used again."""
        assert not self._in_flight, "reset() between step_async() and step_wait()"
        observations = self._start(self._seeds if seed is None else check_seeds(seed, self.num_envs))
        infos = {"frames": np.zeros(self.num_envs, np.int32), "reset": np.ones(self.num_envs, np.bool_)}
        return observations, infos

    def step_async(self, actions: np.ndarray) -> None:
        """Begin one step with integer actions [E]; ValueError for a wrong shape, dtype or range."""
        assert not self._in_flight, "step_async() twice without step_wait()"
        self._begin(check_actions(actions, self.num_envs, self._num_actions))
        self._in_flight = True

    def step_wait(self) -> Step:
        """Finish the step begun by `step_async`: see the top of this file for what it returns."""
        assert self._in_flight, "step_wait() without step_async()"
        self._in_flight = False
        return self._finish()

    def step(self, actions: np.ndarray) -> Step:
        """`step_async` and `step_wait` in one call."""
        self.step_async(actions)
        return self.step_wait()

    def new_counts(self) -> np.ndarray:
        """Counts since the last call, float64 in the order of ENGINE_COUNTS; zeros where engines are not processes."""
        return np.zeros(len(ENGINE_COUNTS))

    @abstractmethod
    def _start(self, seeds: tuple[int, ...]) -> Observations:
        """Reset all environments."""

    @abstractmethod
    def _begin(self, actions: np.ndarray) -> None:
        """Start a step."""

    @abstractmethod
    def _finish(self) -> Step:
        """Wait for it."""


def instruction_space(length: int) -> spaces.Box:
    """Space of one instruction: int32 [L] of word ids, 0 = no word."""
    return spaces.Box(0, np.iinfo(np.int32).max, (length,), np.int32)


def check_seeds(seeds: Any, num_envs: int) -> tuple[int, ...]:
    """One plain int in [0, 2^31) per environment, or ValueError."""
    if isinstance(seeds, int) or len(seeds) != num_envs:
        raise ValueError(f"seeds: {num_envs} environments need {num_envs} seeds, one int each, not {seeds!r}")
    for seed in seeds:
        if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < MAX_SEED:
            raise ValueError(f"seeds: {seed!r} is no seed, use plain ints from 0 to {MAX_SEED - 1}")
    return tuple(seeds)


def check_actions(actions: Any, num_envs: int, num_actions: int) -> np.ndarray:
    """Actions as int32 [E], or ValueError: an engine that gets an illegal action may wait for ever."""
    actions = np.asarray(actions)
    if actions.dtype.kind not in "iu" or actions.shape != (num_envs,):
        raise ValueError(f"actions: integers of shape ({num_envs},) are needed, not {actions.dtype} of shape {actions.shape}")
    if actions.min() < 0 or actions.max() >= num_actions:
        raise ValueError(f"actions: {actions.tolist()} holds one outside of 0 to {num_actions - 1}")
    return actions.astype(np.int32)
