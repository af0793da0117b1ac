"""One run: its folder and files, new or to be continued, its lock, and its way from start to end."""

import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import IO

from agent import checkpoint
from agent.network import NetworkSpec
from launch.checks import megabytes, shared_bytes
from launch.config import RunFiles, load_config, override_config, read_run, suite_of, write_run
from launch.display import Display
from launch.plan import Plan, network_spec
from launch.process import hold
from launch.remote import prepare
from launch.supervisor import Supervisor
from tasks.environment import suite_spaces

# Settings that a resumed run keeps: with others it is another run, and its records would be of two kinds.
FIXED_ON_RESUME = (
    *(
        "seed",
        "preset",
        "network",
        "environment.atari_protocol",
        "environment.atari_actions",
        "environment.action_repeat",
        "loss.time_limit",
    ),
    *(f"environment.dmlab.{key}" for key in ("width", "height", "action_set", "episode_end", "dummy_dataset", "engine")),
    *("loss.value_normalisation", "optimiser.name"),
)
LOCK = "lock"
PRESETS = {"fast": "preset fast", "published": "preset published", "suite": "the suite's own settings"}


def new_run(
    suite_name: str, config_file: Path | None, overrides: list[str], run_dir: Path | None, frames_per_task: int | None
) -> tuple[Path, RunFiles]:
    """Folder and files of a new run; nothing is written yet.

    Raises:
        ValueError, OSError: one sentence that names the key, the value and the remedy.
    """
    config = load_config(suite_name, config_file, overrides)
    suite = suite_of(config)
    if frames_per_task is not None:
        config = replace(config, total_frames=frames_per_task * len(suite.tasks))
    folder = new_folder(run_dir, suite.name)
    spaces = suite_spaces(suite, config.environment)
    return folder, RunFiles(config, suite, network_spec(config, suite, spaces), spaces.frames_per_step)


def new_folder(run_dir: Path | None, name: str) -> Path:
    """The folder asked for, or else runs/NAME-TIME; not made yet.

    Raises:
        ValueError: it is a file, or has something in it.
    """
    folder = run_dir or Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"--run-dir {folder} is a file: choose another")
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"--run-dir {folder} exists and is not empty: choose another, or continue it with --resume {folder}")
    return folder


def resumed_run(run_dir: Path, suite_name: str | None, overrides: list[str]) -> RunFiles:
    """Files of a run to be continued, from its newest checkpoint or, if it has none yet, from its start.

    Raises:
        ValueError, OSError: one sentence; the run is as it was.
    """
    run = read_run(run_dir)
    overrides = overrides + ([f"suite={suite_name}"] if suite_name is not None else [])
    config = override_config(run.config, overrides, FIXED_ON_RESUME)
    changed = any(getattr(config, key) != getattr(run.config, key) for key in ("suite", "tasks", "score_table"))
    suite = suite_of(config) if changed else run.suite
    spaces = suite_spaces(suite, config.environment)
    content = checkpoint.load(run_dir) if checkpoint.exists(run_dir) else None
    frames = content["counters"]["frames"] if content else 0
    if config.total_frames < min(frames, run.config.total_frames):
        raise ValueError(f"total_frames={config.total_frames} is less than the {frames} frames that the run has already")
    # Sizes come from the checkpoint: a cut task list may have fewer actions, the network keeps its width.
    saved = NetworkSpec.from_dict(content["network"]) if content else run.network
    added = sorted(set(suite.task_names) - set(saved.legal_actions))
    if added:
        raise ValueError(
            f"tasks: {', '.join(added)} is new to this run: a resume may cut or reorder tasks, not add any; start a new run"
        )
    actions = dict(zip(suite.task_names, spaces.num_actions, strict=True))
    # Tasks without instructions read zeros where other tasks of the network's suite have some.
    words = spaces.instruction_length or saved.instruction_length
    seen = (spaces.frame_shape, spaces.frame_dtype, words, actions)
    known = {name: saved.legal_actions[name] for name in suite.task_names}
    if seen != (saved.frame_shape, saved.frame_dtype, saved.instruction_length, known):
        raise ValueError(
            f"the environments have changed: the run's network reads frames {saved.frame_shape} {saved.frame_dtype}, "
            f"{saved.instruction_length} words and has actions {known}, the environments have {seen}; start a new run"
        )
    before = {*run.dropped_tasks, *run.suite.task_names}
    dropped = tuple(sorted(before - set(suite.task_names)))
    return RunFiles(config, suite, replace(saved, legal_actions=actions), spaces.frames_per_step, dropped)


def claim(run_dir: Path, is_default: bool, lock: str = LOCK) -> tuple[Path, IO[str]]:
    """Make the folder and hold its lock, so that no other process works on it; a default name that was taken in the same
    second gets a number.

    Raises:
        ValueError: another process works on it.
    """
    path, number = run_dir, 1
    while is_default:
        try:
            path.mkdir(parents=True)
            break
        except FileExistsError:
            number += 1
            path = run_dir.with_name(f"{run_dir.name}-{number}")
    path.mkdir(parents=True, exist_ok=True)
    return path, hold(path / lock)


def start(
    run_dir: Path,
    run: RunFiles,
    plan: Plan,
    resume: bool,
    overrides: list[str],
    interrupts: list[int],
    generation: int = 0,
    rank: int | None = None,
) -> int:
    """Make the folder and run to the end. Signals that asked for an end are added to `interrupts`.

    Args:
        generation: of this start at least (see RestartLog).
        rank: the only one to be started here, under torchrun; a rank other than 0 has its own part of the run's folder.
    """
    written = [] if rank else ["checkpoints", *(["unrolls"] if run.config.debug.dump_unrolls else [])]
    for folder in ("logs", *written):
        (run_dir / folder).mkdir(parents=True, exist_ok=True)
    write_run(run_dir, run)
    notes = [*plan.notes, *([prepare(run_dir, run.config.remote)] if run.config.remote.listen else [])]
    ranks = range(plan.num_ranks) if rank is None else [rank]
    supervisor = Supervisor(run_dir, run, plan, ranks, resume, overrides, interrupts, generation)
    if rank:
        print(f"rank {rank}: its logs are in {run_dir / 'logs'}; rank 0 shows the run", flush=True)
        return supervisor.run(lambda: None)
    config = run.config
    ranks_text = f"{plan.num_ranks} learner ranks, " if plan.num_ranks > 1 else ""
    envs = sum(actor.num_envs for actor in plan.actors)
    print(
        f"{'resuming' if resume else 'run'} {run_dir}: suite {run.suite.name}, {len(plan.task_names)} tasks, "
        f"{PRESETS[config.preset]}, "
        f"{ranks_text}{len(plan.actors)} actors with {envs} environments, {config.total_frames:,} frames, seed {config.seed}, "
        f"{megabytes(shared_bytes(plan))} shared memory"
    )
    for note in notes:
        print(f"note: {note}")
    sys.stdout.flush()
    display = Display(run_dir, config.total_frames)
    try:
        return supervisor.run(display.update)
    finally:
        display.close()
