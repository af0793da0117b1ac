"""A report: what was measured (identity), at what cost (budget), and the scores; as a table and as report.json."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from eval import metrics
from tasks.suite import Suite

REPORT_FILE = "report.json"
UNSTATED = "unstated"


@dataclass(frozen=True)
class Identity:
    """What was measured, and how. Two reports that differ in it are not about the same thing.

    source: run folder or file. policy: how actions were chosen. episodes: which ones were averaged. split: levels of
    "train" or "test". protocol: of Atari. time_limit, reward_transform: of the training; scores are raw returns.
    seed: base seed of the games played. checkpoint, parameter_hash: file and SHA-256 of the parameters that played.
    environment: the run's settings of environments, by name. frames_per_step: environment frames of an agent step.
    """

    source: str
    policy: str = UNSTATED
    episodes: str = UNSTATED
    split: str = UNSTATED
    protocol: str = UNSTATED
    time_limit: str = UNSTATED
    reward_transform: str = UNSTATED
    seed: int | None = None
    checkpoint: str | None = None
    parameter_hash: str | None = None
    environment: dict[str, Any] | None = None
    frames_per_step: int | None = None


@dataclass(frozen=True)
class Budget:
    """Environment frames; None where nobody wrote them down.

    training_frames: of the whole run, up to the last episode or checkpoint scored. task_training_frames: per task.
    evaluation_frames: per task, of the games played for this report.
    """

    training_frames: int | None
    task_training_frames: dict[str, int]
    evaluation_frames: dict[str, int]


@dataclass(frozen=True)
class Report:
    """tasks: every task of the suite, in its order.

    missing: tasks without an episode. unscored: tasks without a random and a human score. aggregates: name -> percent,
    empty where either exists: a mean over some of the tasks would pass for the mean over all.
    """

    suite: Suite
    identity: Identity
    budget: Budget
    tasks: dict[str, metrics.TaskScore]
    missing: tuple[str, ...]
    unscored: tuple[str, ...]
    aggregates: dict[str, float]


def make_report(suite: Suite, task_returns: Mapping[str, Sequence[float]], identity: Identity, budget: Budget) -> Report:
    """Score raw returns per task of the suite. Raises ValueError on returns that are not finite."""
    tasks = metrics.score_tasks(suite, task_returns)
    missing = tuple(task for task, score in tasks.items() if score.n == 0)
    unscored = tuple(task for task in tasks if not metrics.is_scored(suite, task))
    hns = [score.hns for score in tasks.values() if score.hns is not None]
    aggregates = {} if missing or unscored else metrics.aggregate(hns)
    return Report(suite, identity, budget, tasks, missing, unscored, aggregates)


def to_json(report: Report) -> str:
    """The content of report.json: strict JSON (null, never NaN) under stable names, described in the README."""
    suite = {"suite": report.suite.name, "score_table": report.suite.score_table, "tasks": report.suite.task_names}
    budget = {
        "frames": report.budget.training_frames,
        "tasks": {task: {"frames": report.budget.task_training_frames.get(task)} for task in report.tasks},
        "evaluation_frames": sum(report.budget.evaluation_frames.values()),
    }
    plain = {
        "identity": {**suite, "cap": metrics.CAP_RULE, **dataclasses.asdict(report.identity)},
        "budget": budget,
        "aggregates": {name: {"value": report.aggregates.get(name)} for name in metrics.AGGREGATES},
        "tasks": {task: dataclasses.asdict(score) for task, score in report.tasks.items()},
        "missing": report.missing,
        "unscored": report.unscored,
    }
    return json.dumps(plain, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def write(report: Report, folder: Path) -> Path:
    """Write report.json into the folder, which is created where it is missing; returns the file's path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / REPORT_FILE
    path.write_text(to_json(report), encoding="utf-8")
    return path


def show(report: Report, console: Console) -> None:
    """Print the identity, the table of tasks, and either the aggregates or why there are none."""
    for label, text in (
        ("source", report.identity.source),
        ("suite", report.suite.name),
        ("score table", report.suite.score_table),
        ("cap", metrics.CAP_RULE),
        ("policy", report.identity.policy),
        ("episodes", report.identity.episodes),
        ("split", report.identity.split),
        ("protocol", report.identity.protocol),
        ("time limit", report.identity.time_limit),
        ("reward transform", report.identity.reward_transform),
    ):
        console.print(f"{label:<18}{text}", soft_wrap=True)
    table = Table()
    table.add_column("task", overflow="fold")
    for column in ("n", "raw mean", "normalised %", "capped %"):
        table.add_column(column, justify="right")
    for task, score in report.tasks.items():
        numbers = (score.raw_mean, score.hns, score.capped)
        table.add_row(task, str(score.n), *("-" if number is None else f"{number:.2f}" for number in numbers))
    console.print(table)
    if report.missing:
        counts, names = f"{len(report.missing)} of {len(report.tasks)}", ", ".join(report.missing)
        console.print(f"no aggregate: {counts} tasks have no episode: {names}", soft_wrap=True)
    if report.unscored:
        names = ", ".join(report.unscored)
        console.print(f"no aggregate: {len(report.unscored)} tasks have no scores: {names}", soft_wrap=True)
    for name, value in report.aggregates.items():
        console.print(f"{name:<12} {value:8.2f} %")


def make_console(is_terminal: bool) -> Console:
    """A console for standard output; into a file or a pipe it is 100 columns wide and without colours."""
    # Neither markup nor highlighting: names of tasks and folders are printed as they are.
    if is_terminal:
        return Console(markup=False, highlight=False)
    return Console(markup=False, highlight=False, width=100, color_system=None)
