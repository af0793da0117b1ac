"""A stand-in for `deepmind_lab`, for tests only: it refuses what the real engine refuses, and plays something simple.

It exists because the real module is on no package registry. What it plays is in world.py. Where the real engine is
lenient and a caller had better not rely on it, the stand-in is strict; each such place is marked `stricter`.

Environment variables, all read when they matter:
- DMLAB_STANDIN_EPISODE_SECONDS: length of episodes (default: each level's own, 12 to 300 s). The setting
  `episodeLengthSeconds` in `config` wins over it.
- DMLAB_STANDIN_BUILD_MS (5): how long a map takes to build, as a busy loop that keeps the GIL.
- DMLAB_STANDIN_MAPS (20): different maps per level. DMLAB_STANDIN_MAP_BYTES (20000): size of a map's compiled part.
- DMLAB_STANDIN_MISSING_MAP: names of levels (comma between) whose map is missing: reset ends the process by exit(1).
- DMLAB_STANDIN_GPU: number of GPUs that renderer='hardware' finds (default 0: RuntimeError).
- DMLAB_STANDIN_FAULT: KIND@WHERE:N[,level=NAME][,once=PATH], several with `;` between. KIND is exit (code 1), abort
  (SIGABRT), hang (for ever in C: the GIL is held, Python's signal handlers do not run) or error (what the engine
  raises there). WHERE is init, reset or step, N counts these calls from 1 over the life of the process. `level` (without
  folder) limits it to one level, `once` to the first process that makes the file PATH, so that a restarted one lives.
"""

from __future__ import annotations

import operator
import os
import random
import shutil
import tempfile
import time
import weakref
from pathlib import Path
from typing import Any

import numpy as np

from . import checks, faults, maps
from .levels import LEVELS, NEEDS_IMAGES_AT_RESET, Level
from .world import HITS_PER_MAP, World

VERSION = "1.0.dev0+standin"
IMAGES = 2400
IMAGE_FRAMES = 64  # a psychlab level shows a new image so often
# As the engine's own srand(time(NULL)): processes that import in the same second draw the same seeds.
_clock_seeds = random.Random(int(time.time()))
_faults = faults.Faults()
_living: weakref.WeakSet[Lab] = weakref.WeakSet()
_runfiles = str(Path(__file__).parent)


def version() -> str:
    """The module's version."""
    return VERSION


def runfiles_path() -> str:
    """The folder with the engine's data."""
    return _runfiles


def set_runfiles_path(path: str) -> bool:
    """Set the folder with the engine's data. Errors: TypeError, RuntimeError for more than 4,095 bytes."""
    global _runfiles
    if not isinstance(path, str):
        raise TypeError(f"set_runfiles_path() argument must be str, not {type(path).__name__}")
    if len(path.encode()) > 4095:
        raise RuntimeError("The runfiles path is too long")
    _runfiles = path
    return True


class Lab:
    """One engine with one level; see `reset`, `step`, `observations`."""

    def __init__(
        self,
        level: str,
        observations: list[str],
        config: dict[str, str] = {},  # noqa: B006 (the real signature)
        renderer: str = "software",
        level_cache: Any = None,
    ) -> None:
        """Errors: TypeError for wrong types, ValueError for an unknown observation, RuntimeError for all else."""
        self._closed = True  # until the end of this function
        checks.check_types(level, observations, config, renderer)
        if renderer not in ("", "software", "hardware"):
            raise RuntimeError(f"The renderer must be 'hardware' or 'software', not '{renderer}'")
        for other in _living:  # stricter: one Lab per process
            raise RuntimeError(f"This process has a living Lab already, of level {other._level.name}: close it first")
        if level not in LEVELS:
            raise RuntimeError(f"Invalid level name '{level}': there is no such level script")
        self._level: Level = LEVELS[level]
        self._settings = checks.read_settings(self._level, config)
        if renderer == "hardware" and not 0 <= self._settings["gpuDeviceIndex"] < checks.gpus():
            raise RuntimeError("Failed to connect: no EGL device, the machine has no such GPU")
        error = _faults.reach("init", self._level.name)
        if error:
            raise RuntimeError(f"Failed to init environment - {error}")
        self._spec = checks.observation_spec(self._settings["height"], self._settings["width"])
        known = {entry["name"] for entry in self._spec}
        for name in observations:
            if name not in known:
                raise ValueError(f"Unknown observation '{name}'.")
        self._names = list(observations)
        self._cache = level_cache
        self._world: World | None = None
        self._running = False
        self._started = False
        self._num_steps = 0
        self._folder = Path(tempfile.mkdtemp(prefix="dmlab_standin_"))
        self._remove = weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        self._closed = False
        _living.add(self)

    def reset(self, episode: int = -1, seed: int | None = None) -> bool:
        """Start an episode; allowed at any time. Returns True.

        Errors: ValueError for a seed that is no Python int (stricter: no bool, and only 0 to 2^31-1); RuntimeError when
        the level cannot start; whatever the level cache raised, at the very end. The process ends for a missing map.
        """
        self._open()
        operator.index(episode)
        if seed is None:
            seed = _clock_seeds.randrange(2**31)
        if type(seed) is not int:
            raise ValueError(f"'seed' must be int or None, was '{type(seed).__name__}'.")
        if not 0 <= seed < 2**31:
            raise ValueError(f"'seed' must lie in 0 to 2^31-1, was {seed}")
        error = _faults.reach("reset", self._level.name)
        if error:
            raise RuntimeError(f"Failed to start environment - {error}")
        if self._level.name in os.environ.get("DMLAB_STANDIN_MISSING_MAP", "").split(","):
            faults.end(f"the map of {self._level.name} is missing")
        settings = self._settings
        self._world = World(
            self._level, seed, settings["mixerSeed"], checks.seconds(settings), settings["height"], settings["width"]
        )
        if self._level.name == NEEDS_IMAGES_AT_RESET:
            problem = self._missing_image()
            if problem:
                raise RuntimeError(f"Failed to start environment - {problem}")
        raised = self._new_map() if self._level.builds_maps else None
        if raised is not None:
            raise raised
        self._num_steps = 0
        self._running = self._started = True
        return True

    def step(self, action: np.ndarray, num_steps: int = 1) -> float:
        """Hold an action for `num_steps` frames, or until the episode ends; the reward of the frames really played.

        Errors: TypeError for what is no array or no whole number, RuntimeError outside an episode, ValueError for
        another shape or dtype (stricter: for num_steps < 1, for an array that is not C-contiguous); ValueError for a
        level that fails, after which the episode is over; whatever the level cache raised.
        """
        self._open()
        if not isinstance(action, np.ndarray):
            raise TypeError(f"step() argument 1 must be numpy.ndarray, not {type(action).__name__}")
        frames = operator.index(num_steps)
        if not self._running or self._world is None:
            raise RuntimeError("Environment in wrong status to advance.")
        checks.check_action(action, frames)
        error = _faults.reach("step", self._level.name)
        map_before = self._world.hits // HITS_PER_MAP
        image_before = self._world.frame // IMAGE_FRAMES
        reward = self._world.advance(action, frames)
        self._num_steps += frames
        self._running = not self._world.over
        if self._level.needs_images and self._world.frame // IMAGE_FRAMES > image_before:
            error = error or self._missing_image()
        if error:
            self._running = self._started = False
            raise ValueError(f"Failed to advance environment - {error}")
        if self._level.builds_maps_midway and self._world.hits // HITS_PER_MAP > map_before:
            raised = self._new_map()
            if raised is not None:
                raise raised
        return reward

    def observations(self) -> dict[str, np.ndarray | str]:
        """What is seen now, by name: fresh arrays. Errors: RuntimeError outside an episode."""
        self._open()
        if not self._running or self._world is None:
            raise RuntimeError("Environment in wrong status for call to observations()")
        picture = None
        seen: dict[str, np.ndarray | str] = {}
        for name in self._names:
            if name == "INSTR":
                seen[name] = self._world.instruction()
            elif name in checks.VECTORS:
                seen[name] = self._vector(name)
            else:
                picture = self._world.picture(self._plain()) if picture is None else picture
                seen[name] = checks.as_asked(picture, name)
        return seen

    def events(self) -> list[tuple[str, list[Any]]]:
        """No level of the stand-in has events. Errors: RuntimeError before the first episode."""
        self._open()
        if not self._started:
            raise RuntimeError("Environment in wrong status for call to events()")
        return []

    def is_running(self) -> bool:
        """True in an episode. The only call that a closed Lab allows."""
        return not self._closed and self._running

    def num_steps(self) -> int:
        """Frames asked for since the last reset, also those that the end cut off."""
        self._open()
        return self._num_steps

    def observation_spec(self) -> list[dict[str, Any]]:
        """name, dtype (numpy.uint8, numpy.float64 or str) and shape of all that can be asked for; () for a str."""
        self._open()
        return [dict(entry) for entry in self._spec]

    def action_spec(self) -> list[dict[str, Any]]:
        """name, min and max of the seven parts of an action."""
        self._open()
        return [{"min": low, "max": high, "name": name} for name, low, high in checks.ACTIONS]

    def close(self) -> bool:
        """Release the engine. Returns True. Stricter: a second call ends the process, as any call but is_running()."""
        self._open()
        self._closed = True
        self._running = False
        self._remove()
        _living.discard(self)
        return True

    def _open(self) -> None:
        if self._closed:
            faults.abort("a closed Lab was called")

    def _new_map(self) -> BaseException | None:
        """Have the next of the level's maps; what the level cache raised."""
        assert self._world is not None
        count = int(os.environ.get("DMLAB_STANDIN_MAPS", "20"))
        index = (self._world.map_index + self._world.hits // HITS_PER_MAP) % count
        return maps.prepare(self._level.name, index, self._folder, self._cache)

    def _plain(self) -> bool:
        return self._level.needs_images and self._settings["datasetPath"] == "dummy"

    def _missing_image(self) -> str | None:
        """What is wrong with the image that is shown now; None if nothing is, or colours are shown instead."""
        if self._plain():
            return None
        assert self._world is not None
        number = (self._world.map_index + self._world.frame // IMAGE_FRAMES) % IMAGES + 1
        path = Path(self._settings["datasetPath"]) / f"{number:04d}.png"
        try:
            return None if path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n") else f"{path} is no PNG image"
        except OSError as error:
            return f"{path}: {error.strerror}"

    def _vector(self, name: str) -> np.ndarray:
        assert self._world is not None
        values = {
            "MAP_FRAME_NUMBER": [self._world.frame],
            "VEL.TRANS": self._world.velocity,
            "VEL.ROT": [0, self._world.turn, 0],
            "DEBUG.POS.TRANS": self._world.position,
            "DEBUG.POS.ROT": [0, self._world.yaw, 0],
            "DEBUG.PLAYER_ID": [1],
        }
        return np.array(values[name], np.float64)
