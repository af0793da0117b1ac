"""Atari games through ale_py's own C++ vector environment, with the preprocessing of the suite.

Sources: IMPALA (Espeholt et al. 2018, appendix) and Machado et al. 2018; ale_py 0.12's behaviour, checked by
tests/test_tasks_atari.py.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
from gymnasium import spaces

from tasks.contract import EnvironmentSettings, Observations, Step, TaskVectorEnv

NUM_ACTIONS = 18  # the global set, for every game: heads of all games have the same meaning
ACTION_NAMES = (
    "NOOP FIRE UP RIGHT LEFT DOWN UPRIGHT UPLEFT DOWNRIGHT DOWNLEFT UPFIRE RIGHTFIRE LEFTFIRE DOWNFIRE UPRIGHTFIRE "
    "UPLEFTFIRE DOWNRIGHTFIRE DOWNLEFTFIRE"
).split()


def atari_options(settings: EnvironmentSettings, training: bool) -> dict[str, Any]:
    """Every option of ale_py's vector environment: its defaults are other ones than those of `ALE/*-v5`."""
    impala = settings.atari_protocol == "impala"
    return {
        "batch_size": 0,
        "num_threads": settings.threads,
        "thread_affinity_offset": -1,
        "max_num_frames_per_episode": settings.max_episode_frames,
        "repeat_action_probability": 0.0 if impala else 0.25,
        "full_action_space": settings.atari_actions == "full",
        "continuous": False,
        "continuous_action_threshold": 0.5,
        "autoreset_mode": "NextStep",
        "img_height": settings.frame_height,
        "img_width": settings.frame_width,
        "grayscale": True,
        "stack_num": settings.frame_stack,
        "frameskip": settings.action_repeat,
        "maxpool": True,
        "noop_max": 31 if impala else 1,  # exclusive: 0 to 30 no-ops, or none
        "episodic_life": False,  # would restart the whole game at each lost life
        "life_loss_info": impala and training,
        "reward_clipping": False,
        "use_fire_reset": False,
    }


def action_map(game_actions: Sequence[str]) -> np.ndarray:
    """Index in `game_actions` of each of the 18 global actions, int32 [18]; FIRE is dropped where a game has none."""
    indices = []
    for name in ACTION_NAMES:
        known = name if name in game_actions else name.removesuffix("FIRE") or "NOOP"
        indices.append(game_actions.index(known))
    return np.array(indices, np.int32)


@functools.cache
def num_actions(rom: str, action_set: str) -> int:
    """Legal actions of a game: the 18 global ones (`full`), or those that its own buttons tell apart (`minimal`)."""
    if action_set == "full":
        return NUM_ACTIONS
    from ale_py import ALEInterface, LoggerMode, roms

    ALEInterface.setLoggerMode(LoggerMode.Error)
    game = ALEInterface()
    game.loadROM(cast(Path, roms.get_rom_path(rom)))
    return len(game.getMinimalActionSet())


class AtariTaskEnv(TaskVectorEnv):
    """E copies of one game. `step_async` sends, `step_wait` receives: two of these in one process overlap."""

    def __init__(self, rom: str, settings: EnvironmentSettings, seeds: Sequence[int], training: bool) -> None:
        """Load the game `rom` once per seed. Frames are uint8 [H, W, stack], oldest first."""
        from ale_py.vector_env import AtariVectorEnv

        shape = (settings.frame_height, settings.frame_width, settings.frame_stack)
        super().__init__(spaces.Box(0, 255, shape, np.uint8), 0, num_actions(rom, settings.atari_actions), seeds)
        options = atari_options(settings, training)
        self._life_loss = options["life_loss_info"]
        self._games: Any = AtariVectorEnv(rom, self.num_envs, **options)
        names = [action.name for action in self._games.ale.get_action_set()]
        is_full = settings.atari_actions == "full"
        self._action_map = action_map(names) if is_full else np.arange(len(names), dtype=np.int32)
        assert len(self._action_map) == self.single_action_space.n
        self._frame = np.zeros((self.num_envs, *shape), np.uint8)
        self._episode_frame = np.zeros(self.num_envs, np.int32)
        self._terminated = np.zeros(self.num_envs, np.bool_)
        self._truncated = np.zeros(self.num_envs, np.bool_)

    def close_extras(self, **kwargs: Any) -> None:
        """End the threads: ale_py does so when its object is deleted, not when it is closed."""
        self._games = None

    def _start(self, seeds: tuple[int, ...]) -> Observations:
        frames, info = self._games.reset(seed=np.array(seeds, np.int64))
        self._episode_frame = info["episode_frame_number"].copy()
        self._terminated[:] = self._truncated[:] = False
        return self._observe(frames)

    def _begin(self, actions: np.ndarray) -> None:
        self._games.send(self._action_map[actions])

    def _finish(self) -> Step:
        frames, rewards, terminated, truncated, info = self._games.recv()
        episode_frame = info["episode_frame_number"]
        played = episode_frame - self._episode_frame
        # After a lost life the game's frames count on; after its end they start again, at 0 to 30 no-ops.
        over = self._terminated & (played < 0) if self._life_loss else self._terminated
        reset = over | self._truncated
        self._episode_frame = episode_frame.copy()
        self._terminated, self._truncated = terminated.copy(), truncated.copy()
        infos = {"frames": np.where(reset, 0, played).astype(np.int32), "reset": reset}
        return self._observe(frames), rewards.astype(np.float64), self._terminated, self._truncated, infos

    def _observe(self, frames: np.ndarray) -> Observations:
        # One strided copy per channel takes 8 microseconds for 84 x 84 x 4, numpy's transposing copy 24.
        for channel in range(frames.shape[1]):
            self._frame[..., channel] = frames[:, channel]
        return {"frame": self._frame}
