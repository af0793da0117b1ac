"""DeepMind Lab as a dm_env.Environment: one engine, in the process that builds it.

The engine's rules (github.com/google-deepmind/lab, docs/users/python_api.md) that shape this file: it never resets by
itself, has no observation after an episode's end, holds Python's lock while it builds a map, and ends the process on a
missing map. So each engine has a process of its own (tasks/engine.py), and the last frame is shown once more at an end.
"""

from __future__ import annotations

import csv
import os
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import dm_env  # type: ignore[import-untyped]
import numpy as np
from dm_env import specs

from tasks.level_cache import LevelCache
from tasks.suite import Suite

FRAMES_PER_SECOND = 60
# Held-out levels and settings of the published test protocol (github.com/google-deepmind/scalable_agent).
TEST_CONFIG = {"allowHoldOutLevels": "true", "mixerSeed": "1611489005"}
NEED_IMAGES = ("psychlab_arbitrary_visuomotor_mapping", "psychlab_continuous_recognition")
NUM_IMAGES = 2400
HALF_OF_SEEDS = 2**30  # training has the seeds below, evaluation those from here on: tasks/seeds.py


def _action(yaw: int = 0, pitch: int = 0, strafe: int = 0, move: int = 0, fire: int = 0) -> tuple[int, ...]:
    """The engine's seven numbers: yaw and pitch in pixels a frame, strafe, move, fire, jump, crouch."""
    return (yaw, pitch, strafe, move, fire, 0, 0)


_WALK = (_action(move=1), _action(move=-1), _action(strafe=-1), _action(strafe=1))
ACTION_SETS = {
    # IMPALA (arXiv:1802.01561)
    "impala9": (
        *_WALK,
        _action(yaw=-20),
        _action(yaw=20),
        _action(yaw=-20, move=1),
        _action(yaw=20, move=1),
        _action(fire=1),
    ),
    # PopArt-IMPALA (arXiv:1809.04474)
    "popart15": (
        *_WALK,
        *(_action(yaw=yaw) for yaw in (-10, 10, -60, 60)),
        *(_action(pitch=pitch) for pitch in (10, -10)),
        *(_action(yaw=yaw, move=1) for yaw in (-10, 10, -60, 60)),
        _action(fire=1),
    ),
}


@dataclass(frozen=True)
class DmLabSettings:
    """Section `environment.dmlab` of the configuration.

    width, height: of a frame in pixels, multiples of 4 (IMPALA: 96 x 72).
    action_set: `impala9` or `popart15`, the published tables.
    renderer: `software` (OSMesa) runs anywhere; `hardware` (EGL) needs a GPU.
    gpu_index: which GPU draws, with `hardware`; -1 = the engine's choice.
    dataset_path: folder of the images that two psychlab levels need, 0001.png to 2400.png.
    dummy_dataset: let these two levels play with plain colours instead; their scores are then not reported.
    level_cache: folder for maps once built, `auto` = in the user's cache folder, `none` = build each map each time.
    level_cache_bytes: that they may take; the longest unread go first.
    episode_end: `terminate` = every end is one (IMPALA); `truncate_at_clock` = an end at the level's time limit is a
        truncation, and the value of the last frame counts on.
    engine: further settings of the engine, by its own names; values are texts.
    wait_seconds: an engine without an answer for so long is killed and replaced. Longer than the slowest map takes to build.
    """

    width: int = field(default=96, metadata={"min": 8, "max": 4096})
    height: int = field(default=72, metadata={"min": 8, "max": 4096})
    action_set: Literal["impala9", "popart15"] = "impala9"
    renderer: Literal["software", "hardware"] = "software"
    gpu_index: int = field(default=-1, metadata={"min": -1})
    dataset_path: str = ""
    dummy_dataset: bool = False
    level_cache: str = "auto"
    level_cache_bytes: int = field(default=20 * 2**30, metadata={"min": 0})
    episode_end: Literal["terminate", "truncate_at_clock"] = "terminate"
    engine: dict[str, str] = field(default_factory=dict)
    wait_seconds: float = field(default=120.0, metadata={"min": 1})


def check_package(suite_name: str) -> None:
    """ValueError where there is no engine."""
    if find_spec("deepmind_lab") is None:
        raise ValueError(
            f"suite: {suite_name} needs the package deepmind_lab, which is not installed here: the Docker image has it, "
            "and --suite atari5 runs anywhere"
        )


def check_dmlab(suite: Suite, settings: DmLabSettings) -> None:
    """Find what is missing before any process starts. ValueError says in one sentence what, and how to get it."""
    check_package(suite.name)
    for key in ("width", "height"):
        if getattr(settings, key) % 4:
            raise ValueError(f"environment.dmlab.{key}={getattr(settings, key)} does not fit: the engine needs a multiple of 4")
    taken = {"width", "height", "datasetPath", "gpuDeviceIndex", *TEST_CONFIG} & set(settings.engine)
    if taken:
        raise ValueError(f"environment.dmlab.engine.{min(taken)} is set by this program: use the setting that stands for it")
    length = settings.engine.get("episodeLengthSeconds", "1")
    if not length.replace(".", "", 1).isdecimal() or float(length) <= 0:
        raise ValueError(f"environment.dmlab.engine.episodeLengthSeconds={length} is no number of seconds above 0")
    need = [task.name for task in suite.tasks if task.name in NEED_IMAGES]
    if not need or settings.dummy_dataset:
        return
    rest = ",".join(task.name for task in suite.tasks if task.name not in NEED_IMAGES)
    ways = (
        "get them as data/brady_konkle_oliva2008/README.md of google-deepmind/lab says and set environment.dmlab.dataset_path, "
        "play these levels with plain colours and without a score (environment.dmlab.dummy_dataset=true), "
        f"or leave them out (--tasks {rest if len(suite.tasks) < 6 else '...'})"
    )
    if not settings.dataset_path:
        raise ValueError(f"environment.dmlab.dataset_path is empty, and {' and '.join(need)} need the Brady images: {ways}")
    for number in range(1, NUM_IMAGES + 1):
        if not (Path(settings.dataset_path) / f"{number:04d}.png").is_file():
            raise ValueError(
                f"environment.dmlab.dataset_path={settings.dataset_path} has no {number:04d}.png, and "
                f"{' and '.join(need)} need {NUM_IMAGES} images: {ways}"
            )


def without_dummies(suite: Suite, settings: DmLabSettings) -> Suite:
    """Levels that are played with plain colours instead of their images have no score."""
    if suite.adapter != "dmlab" or not settings.dummy_dataset:
        return suite
    tasks = [replace(task, random_score=None, human_score=None) if task.name in NEED_IMAGES else task for task in suite.tasks]
    return replace(suite, tasks=tuple(tasks))


def engine_config(settings: DmLabSettings, level: str, test: bool) -> dict[str, str]:
    """What the engine is given for a level: texts only, booleans in lower case."""
    config = {"width": str(settings.width), "height": str(settings.height), **settings.engine}
    if level.rsplit("/", 1)[-1] in NEED_IMAGES:
        config["datasetPath"] = "dummy" if settings.dummy_dataset else settings.dataset_path
    if settings.renderer == "hardware" and settings.gpu_index >= 0:
        config["gpuDeviceIndex"] = str(settings.gpu_index)
    return config | (TEST_CONFIG if test else {})


def clock_frames(level: str, settings: DmLabSettings) -> int | None:
    """Frames after which the engine ends a level's episode: its time limit; None for a level of no known limit."""
    if "episodeLengthSeconds" in settings.engine:
        return round(float(settings.engine["episodeLengthSeconds"]) * FRAMES_PER_SECOND)
    text = (files("tasks.data") / "dmlab30.csv").read_text(encoding="utf-8")
    for row in csv.DictReader(text.splitlines()):
        if level in (row["train_level"], row["test_level"]):
            return round(float(row["episode_seconds"]) * FRAMES_PER_SECOND)
    return None


def make_level_cache(settings: DmLabSettings) -> LevelCache | None:
    """The cache of maps, or None. Each version of the engine has a folder: a map's key does not name the version."""
    if settings.level_cache in ("none", ""):
        return None
    folder = Path(settings.level_cache)
    if settings.level_cache == "auto":
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dmlab-levels"
    try:
        return LevelCache(folder / version("deepmind_lab"), settings.level_cache_bytes)
    except PackageNotFoundError:
        return LevelCache(folder / "unknown", settings.level_cache_bytes)


class DmLab(dm_env.Environment):
    """One level. Observations are `frame` uint8 [H, W, 3] and `instruction`, a text that is empty outside language levels.

    Attributes:
        last_frames: environment frames that the last step really played.
        cache: the level cache, or None.
    """

    def __init__(self, level: str, settings: DmLabSettings, action_repeat: int, seed: int, test: bool) -> None:
        """Start the engine for `level`, a path as in tasks/data/dmlab30.csv; `test` opens held-out levels.

        `seed`, 0 to 2^31 - 1, is that of the first episode; later ones follow from it.
        """
        import deepmind_lab

        self._repeat = action_repeat
        self._actions = np.array(ACTION_SETS[settings.action_set], np.intc)
        self._clock = clock_frames(level, settings)
        self._truncates = settings.episode_end == "truncate_at_clock"
        self._shape = (settings.height, settings.width, 3)
        self.cache = make_level_cache(settings)
        self._engine: Any = deepmind_lab.Lab(
            level,
            ["RGB_INTERLEAVED", "INSTR"],
            config=engine_config(settings, level, test),
            renderer=settings.renderer,
            level_cache=self.cache,
        )
        self.last_frames = 0
        self._played = 0
        self._over = True
        self._observation: dict[str, Any] = {}
        self.seed(seed)

    def seed(self, seed: int) -> None:
        """Make `seed` that of the next episode."""
        self._next_seed = seed
        self._seeds = np.random.default_rng(seed)
        self._lowest_seed = HALF_OF_SEEDS * (seed // HALF_OF_SEEDS)

    def reset(self) -> dm_env.TimeStep:
        """Begin an episode: the engine may build a map first, which takes seconds."""
        self._engine.reset(seed=self._next_seed)
        self._next_seed = self._lowest_seed + int(self._seeds.integers(HALF_OF_SEEDS))
        self.last_frames = self._played = 0
        self._over = False
        self._observation = self._observe()
        return dm_env.restart(self._observation)

    def step(self, action: int) -> dm_env.TimeStep:
        """Repeat an action; after an end it begins the next episode instead, as dm_env asks for."""
        if self._over:
            return self.reset()
        reward = self._engine.step(self._actions[action], num_steps=self._repeat)
        self._over = not self._engine.is_running()
        at_clock = self._over and self._clock is not None and self._played < self._clock <= self._played + self._repeat
        # The engine counts the frames asked for; those after the clock were not played.
        self.last_frames = self._clock - self._played if at_clock and self._clock is not None else self._repeat
        self._played += self.last_frames
        if not self._over:
            self._observation = self._observe()
            return dm_env.transition(reward, self._observation)
        if at_clock and self._truncates:
            return dm_env.truncation(reward, self._observation)
        return dm_env.termination(reward, self._observation)

    def observation_spec(self) -> dict[str, specs.Array]:
        """Of the dict above."""
        return {"frame": specs.BoundedArray(self._shape, np.uint8, 0, 255, "frame"), "instruction": specs.StringArray(())}

    def action_spec(self) -> specs.DiscreteArray:
        """An index into the action set."""
        return specs.DiscreteArray(len(self._actions))

    def close(self) -> None:
        """End the engine. No other method may be called afterwards."""
        self._engine.close()

    def _observe(self) -> dict[str, Any]:
        seen = self._engine.observations()
        return {"frame": seen["RGB_INTERLEAVED"], "instruction": seen["INSTR"]}
