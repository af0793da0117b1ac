"""From a task to a vector environment, from a suite to its spaces: one table of adapters, and the checks at a start.

The rules that every vector environment keeps are at the top of `tasks/contract.py`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from importlib.util import find_spec
from typing import NamedTuple

import numpy as np

from tasks.adapters import OwnEnv, OwnVectorEnv
from tasks.atari import AtariTaskEnv, num_actions
from tasks.contract import EnvironmentSettings, Spaces, TaskVectorEnv
from tasks.dmlab import ACTION_SETS, check_dmlab, check_package
from tasks.engine import EngineVectorEnv
from tasks.own_suite import make_environment
from tasks.suite import Suite, Task, nearest
from tasks.toy import FRAME_SHAPE, LEVELS, ToyVectorEnv

__all__ = ["EnvironmentSettings", "Spaces", "TaskVectorEnv", "check_suite", "make_vector_env", "probe", "suite_spaces"]

PROBE_STEPS = 50


def suite_spaces(suite: Suite, settings: EnvironmentSettings) -> Spaces:
    """Spaces of all tasks together, without starting an engine; an own suite's environments are built once each.

    ValueError if two tasks have different frames, or if an own environment does not fit.
    """
    repeat, words = settings.action_repeat, settings.instruction_length
    match suite.adapter:
        case "atari":
            shape = (settings.frame_height, settings.frame_width, settings.frame_stack)
            if settings.atari_actions == "minimal":
                _check_atari(suite)  # a game has to be loaded to know its actions
            return Spaces(
                shape, "uint8", 0, tuple(num_actions(task.train_level, settings.atari_actions) for task in suite.tasks), repeat
            )
        case "dmlab":
            shape = (settings.dmlab.height, settings.dmlab.width, 3)
            actions = (len(ACTION_SETS[settings.dmlab.action_set]),) * len(suite.tasks)
            return Spaces(shape, "uint8", words, actions, repeat)
        case "toy":
            actions = tuple(LEVELS[task.train_level].num_actions for task in suite.tasks)
            return Spaces(FRAME_SHAPE, "uint8", words, actions, 1)
        case "custom":
            return _own_spaces(suite, settings)
    raise ValueError(f"adapter: suite {suite.name} has {suite.adapter!r}, use atari, dmlab, toy or custom")


def _own_spaces(suite: Suite, settings: EnvironmentSettings) -> Spaces:
    frames, actions, has_instruction = [], [], False
    for task in suite.tasks:
        env = OwnEnv(make_environment(suite, task, task.train_level, 0), 0, task.name)
        frames.append((env.frame_space.shape, str(env.frame_space.dtype)))
        actions.append(env.num_actions)
        has_instruction = has_instruction or env.has_instruction
        env.close()
        if frames[-1] != frames[0]:
            raise ValueError(
                f"tasks: one network sees all tasks, but frames of {suite.tasks[0].name} are {frames[0][1]} "
                f"{frames[0][0]} and those of {task.name} are {frames[-1][1]} {frames[-1][0]}: make them equal"
            )
    (height, width, channels), dtype = frames[0]
    words = settings.instruction_length if has_instruction else 0
    return Spaces((height, width, channels), dtype, words, tuple(actions), 1)


def check_suite(suite: Suite, settings: EnvironmentSettings) -> None:
    """Find what is missing before any process starts: engines, games, levels, functions of an own suite.

    ValueError says in one sentence what is missing and how to get it.
    """
    if suite.adapter == "dmlab":
        check_dmlab(suite, settings.dmlab)
    elif suite.adapter == "atari":
        _check_atari(suite)
    elif suite.adapter == "toy":
        for task in suite.tasks:
            if task.train_level not in LEVELS:
                raise ValueError(f"tasks: there is no toy level {task.train_level!r}, {nearest(task.train_level, [*LEVELS])}")
    suite_spaces(suite, settings)


def _check_atari(suite: Suite) -> None:
    if find_spec("ale_py") is None:
        raise ValueError(f"suite: {suite.name} needs the package ale_py: run pip install -e '.[atari]'")
    from ale_py import roms

    known = roms.get_all_rom_ids()
    for task in suite.tasks:
        for rom in (task.train_level, task.test_level):
            if rom not in known:
                raise ValueError(f"tasks: ale_py has no game {rom!r}, {nearest(rom, known)}")


def make_vector_env(
    suite: Suite,
    task: Task,
    num_envs: int,
    settings: EnvironmentSettings,
    seeds: Sequence[int],
    training: bool = True,
    split: str = "train",
    spaces: Spaces | None = None,
) -> TaskVectorEnv:
    """`num_envs` environments of one task, with one seed in [0, 2^31) each, in the process that is to step them.

    `training` lets a lost Atari life count as an end; `split` ("train" or "test") picks the level. `spaces`, if the
    caller has them, saves an own suite from building every task's environment again to learn of instructions.
    """
    if num_envs < 1 or len(seeds) != num_envs:
        raise ValueError(f"num_envs: {num_envs} environments with {len(seeds)} seeds, use one seed each and at least one")
    if split not in ("train", "test"):
        raise ValueError(f"split: {split!r} is unknown, use train or test")
    level = task.train_level if split == "train" else task.test_level
    if suite.adapter == "atari":
        return AtariTaskEnv(level, settings, seeds, training)
    if suite.adapter == "dmlab":
        check_package(suite.name)
        return EngineVectorEnv(task, level, settings, seeds, training, test=split == "test")
    words = (spaces or suite_spaces(suite, settings)).instruction_length
    if suite.adapter == "toy":
        return ToyVectorEnv(level, words, seeds)
    return OwnVectorEnv(lambda seed: OwnEnv(make_environment(suite, task, level, seed), words, task.name), words, seeds)


class Probe(NamedTuple):
    """What the first steps of a task showed: seconds to start and reset, seconds a step, whether it had an instruction."""

    reset_seconds: float
    step_seconds: float
    has_instruction: bool


def probe(suite: Suite, task: Task, settings: EnvironmentSettings, seed: int, split: str = "train") -> Probe:
    """Play 50 random steps of a task; ValueError if its observation is dead or is not what its space declares.

    Dead: the frame never changes. A constant screen would otherwise train for days.
    """
    began = time.perf_counter()
    env = make_vector_env(suite, task, 1, settings, [seed], split=split)
    generator = np.random.default_rng(seed)
    hint = "environment.probe=false skips this check"
    try:
        observation, _ = env.reset()
        started = time.perf_counter()
        first, changed, has_instruction = observation["frame"].copy(), False, False
        for step in range(PROBE_STEPS + 1):
            for key, space in env.single_observation_space.spaces.items():
                value = observation[key][0]
                if value.dtype != space.dtype or not space.contains(value):
                    raise ValueError(
                        f"probe: {key} of task {task.name} at step {step} is {value.dtype} {value.shape} with values "
                        f"from {value.min()} to {value.max()}, its space is {space}; {hint}"
                    )
            changed = changed or not np.array_equal(first, observation["frame"])
            has_instruction = has_instruction or bool(observation.get("instruction", np.zeros(1)).any())
            observation, *_ = env.step(generator.integers(env.single_action_space.n, size=1))
        if not changed:
            raise ValueError(
                f"probe: the frame of task {task.name} did not change in {PROBE_STEPS} random steps, all its values "
                f"lie from {first.min()} to {first.max()}; {hint}"
            )
        return Probe(started - began, (time.perf_counter() - started) / (PROBE_STEPS + 1), has_instruction)
    finally:
        env.close()
