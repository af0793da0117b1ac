"""A run folder as one side of a report, or a part of one: its games, its identity, its budget; and whether several are
seeds of one experiment."""

import argparse
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from eval import evaluations
from eval.curves import read_curves
from eval.episodes import Columns, read_columns
from eval.identity import UNSTATED, Identity, differences
from eval.sides import Kind, RunData
from launch import records
from launch.config import CONFIG_FILE, RunFiles, flatten, read_run
from tasks.dmlab import without_dummies
from tasks.registry import load_suite
from tasks.suite import Suite

LAST_EPISODES = 100
NUM_ENVS = 4
TRAINING_POLICY = "sampled, in training: its parameters changed between episodes"
# Settings that change no game and no update.
INDIFFERENT = (
    "seed",
    "score_table",
    "log.",
    "checkpoint.",
    "supervisor.",
    "debug.",
    "environment.probe",
    "environment.threads",
)
# Single-task runs differ in what they train and in how many actors share the machine.
PER_TASK = ("tasks", "total_frames", "actor.")


@dataclass(frozen=True)
class LoadedRun:
    """suite: all tasks of the run, scored by the report's table. data: what its games were."""

    suite: Suite
    identity: Identity
    data: RunData


def expand(folder: Path) -> list[Path]:
    """A run folder, or the run folders in a folder of them (single-task runs, seeds)."""
    if (folder / CONFIG_FILE).is_file():
        return [folder]
    return sorted(path.parent for path in folder.glob(f"*/{CONFIG_FILE}")) or [folder]


def load_run(args: argparse.Namespace, path: Path, wanted: Suite | None = None) -> LoadedRun:
    """A run folder, or a checkpoint file in one: its last training games, or with --episodes whole games played now.

    wanted: of these tasks only, games are played.
    """
    folder = path if path.is_dir() else evaluations.find_run_of(path)
    file = args.checkpoint if path.is_dir() and wanted is None else None
    run = read_run(folder)
    suite = run.suite
    if args.score_table:
        suite = load_suite(run.config.suite, suite.task_names, args.score_table)
    suite = without_dummies(suite, run.config.environment.dmlab)
    columns = read_columns(folder / records.EPISODES, run.suite, run.dropped_tasks)
    last = args.last or LAST_EPISODES
    training = {task: column.returns[-last:] for task, column in columns.items()}
    identity = _identity(path, run, suite)
    settings = flatten(run.config)
    shown = read_curves(folder, suite, columns)
    if args.episodes is None:
        identity = dataclasses.replace(
            identity,
            policy=TRAINING_POLICY,
            episodes=f"the last {last} training episodes of each task, or all where there are fewer",
            split="train",
            runs=(_entry(path, run, _total_frames(columns)),),
        )
        budget = {"frames": _total_frames(columns), "task_frames": _task_frames(columns), "evaluation_frames": {}}
        budget |= {name: shown.budget[name] for name in ("updates", "seconds")}
        data = RunData(str(path), training, suite.task_names, run.config.seed, budget, folder, {}, settings, shown)
        return LoadedRun(suite, identity, data)
    played_suite = suite if wanted is None else _cut(suite, wanted)
    if not args.trust:
        _refuse_own_code(folder, played_suite)
    seed, split, num_envs = args.seed or 0, args.split or "test", args.num_envs or NUM_ENVS
    checkpoint_file = path if path.is_file() else file
    device = args.device or "cpu"
    played = evaluations.play(folder, run, played_suite, args.episodes, num_envs, seed, split, checkpoint_file, device)
    frames = played.counters["frames"]
    identity = dataclasses.replace(
        identity,
        policy="sampled",
        episodes=f"{args.episodes} whole games of each task, seed {seed}",
        split=split,
        seed=seed,
        checkpoint=str(played.file),
        parameter_hash=played.parameter_hash,
        runs=({**_entry(path, run, frames), "checkpoint": str(played.file), "parameter_hash": played.parameter_hash},),
    )
    budget = {
        "frames": frames,
        "task_frames": evaluations.task_frames(played.task_counters, suite.task_names),
        "evaluation_frames": played.frames,
        "updates": played.counters.get("updates"),
        "seconds": played.counters.get("seconds"),
    }
    tasks = played_suite.task_names
    data = RunData(str(path), played.returns, tasks, run.config.seed, budget, folder, training, settings, shown)
    return LoadedRun(suite if wanted is None else played_suite, identity, data)


def _refuse_own_code(folder: Path, suite: Suite) -> None:
    """ValueError where playing would run code that a folder names, which may be a stranger's."""
    if suite.adapter == "custom":
        places = ", ".join(sorted({task.test_level for task in suite.tasks}))
        raise ValueError(
            f"{folder} names environments of its own: {places} in {suite.import_path or 'the installed packages'}. To play "
            "games this code is run: add --trust if you trust who made the folder"
        )


def _cut(suite: Suite, wanted: Suite) -> Suite:
    kept = tuple(task for task in suite.tasks if task.name in wanted.task_names)
    return dataclasses.replace(suite, tasks=kept) if kept else suite


def check_one_experiment(loaded: Sequence[LoadedRun], kind: Kind, force: bool) -> list[str]:
    """What makes several runs no seeds of one experiment. Raises ValueError naming it, unless `force`."""
    first = loaded[0]
    found: list[str] = []
    free = (*INDIFFERENT, *PER_TASK) if kind == "single-task runs" else INDIFFERENT
    for other in loaded[1:]:
        if kind == "runs" and other.suite.task_names != first.suite.task_names:
            names = [", ".join(item.suite.task_names) for item in (first, other)]
            raise ValueError(f"{first.data.label} and {other.data.label} have different tasks: {names[0]} against {names[1]}.")
        pairs = differences(first.identity, other.identity, first.suite, other.suite)
        pairs += [
            f"{key}: {value} against {other.data.settings[key]}"
            for key, value in first.data.settings.items()
            if value != other.data.settings[key] and not key.startswith(free)
        ]
        found += [f"{first.data.label} and {other.data.label}: {pair}" for pair in pairs]
    seeds = [(item.suite.task_names if kind == "single-task runs" else (), item.data.seed) for item in loaded]
    found += [
        f"{item.data.label} has seed {item.data.seed} as another run" for item, key in zip(loaded, seeds, strict=True)
        if seeds.count(key) > 1
    ]  # fmt: skip
    if found and not force:
        raise ValueError(f"these runs are not seeds of one experiment: {'; '.join(found)}. --force takes them as such.")
    return found


def _protocol(run: RunFiles, suite: Suite) -> str:
    """How games are played, beyond their levels: another one is another game."""
    if suite.adapter == "atari":
        return run.config.environment.atari_protocol
    if suite.adapter == "dmlab":
        engine = run.config.environment.dmlab.engine
        return ", ".join(["dmlab", *(f"{key}={engine[key]}" for key in sorted(engine) if key != "logLevel")])
    return "-"


def _identity(path: Path, run: RunFiles, suite: Suite) -> Identity:
    network = run.network
    return Identity(
        str(path),
        protocol=_protocol(run, suite),
        time_limit=run.config.loss.time_limit,
        reward_transform=run.config.loss.reward_transform,
        environment=dataclasses.asdict(run.config.environment),
        frames_per_step=run.frames_per_step,
        observation=f"{network.frame_dtype} {list(network.frame_shape)}",
        action_set=dict(network.legal_actions),
        score_table=suite.score_table or UNSTATED,
    )


def _entry(path: Path, run: RunFiles, frames: int | None) -> dict[str, object]:
    made = {"source": str(path), "seed": run.config.seed, "frames": frames, "code_version": run.code_version}
    return {**made, "checkpoint": None, "parameter_hash": None}


def _total_frames(columns: dict[str, Columns]) -> int | None:
    ends = [int(column.total_frames[-1]) for column in columns.values() if len(column.total_frames)]
    return max(ends, default=None)


def _task_frames(columns: dict[str, Columns]) -> dict[str, int]:
    """Of finished games."""
    return {task: int(column.frames.sum(dtype=np.int64)) for task, column in columns.items()}
