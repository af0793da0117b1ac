"""Curves of a run: smoothed returns per task and their mean, forgetting, throughput, sample age, and what learning shows."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from eval import metrics
from eval.episodes import Columns
from launch import records
from tasks.suite import Suite

# A point of a curve is the mean of so many games up to it, or of a tenth of them all where there are fewer.
WINDOW_EPISODES = 100
POINTS = 200
# Mechanism: means over so many last records of metrics.jsonl.
LAST_RECORDS = 10
MECHANISM = (
    "entropy",
    "off_policy_share",
    "explained_variance",
    "effective_sample_size",
    "kl_behaviour_target",
    "gradient_norm",
    "sample_age_versions_mean",
)
NUMBERS = ("seconds", "frames_per_second", "sample_age_versions_mean", "sample_age_seconds_mean", "updates")
LOSSES = ("policy_gradient_loss", "baseline_loss", "entropy_loss")


@dataclass(frozen=True)
class TaskCurve:
    """Points [P]: environment frames of this task, of the whole run, seconds of training, smoothed raw return.

    best, now: of all smoothed returns, not only of the points; None without a game.
    """

    task_frames: np.ndarray
    total_frames: np.ndarray
    seconds: np.ndarray
    returns: np.ndarray
    best: float | None
    now: float | None


@dataclass(frozen=True)
class RunCurves:
    """tasks: curve per task. mean_*: [P] mean capped score in percent over all tasks, from when each has a game; empty
    without. seconds, frames_per_second, sample_age: [Q] from metrics.jsonl, NaN where not measured. budget: of its last
    record. mechanism: task -> name -> value. sample_age_*: of the whole run. cosines: `gradient_cosines`,
    or None. network: what `health` found in the last record that has it."""

    label: str
    tasks: dict[str, TaskCurve]
    mean_frames: np.ndarray
    mean_seconds: np.ndarray
    mean_capped: np.ndarray
    seconds: np.ndarray
    frames_per_second: np.ndarray
    sample_age: np.ndarray
    budget: dict[str, Any]
    mechanism: dict[str, dict[str, float]]
    cosines: dict[str, Any] | None
    network: dict[str, Any]


def read_curves(folder: Path, suite: Suite, columns: Mapping[str, Columns]) -> RunCurves:
    """The curves of a run folder, whose files may still be growing; columns: all its episodes, of all tasks of `suite`."""
    tasks = {name: task_curve(columns[name]) for name in suite.task_names}
    mean = _mean_curve(suite, columns)
    rows = _read_metrics(folder / records.METRICS, tuple(tasks))
    seconds, speed, age = (
        np.array([row.get(name) or math.nan for row in rows["points"]], dtype=float)
        for name in ("seconds", "frames_per_second", "sample_age_versions_mean")
    )
    return RunCurves(
        str(folder), tasks, *mean, seconds, speed, age, rows["budget"], rows["mechanism"], rows["cosines"], rows["network"]
    )


def smooth(returns: np.ndarray) -> tuple[np.ndarray, int]:
    """Running means [n - w + 1] of returns [n] over w games, and w."""
    window = max(1, min(WINDOW_EPISODES, returns.size // 10))
    sums = np.cumsum(np.concatenate([[0.0], returns]))
    return (sums[window:] - sums[:-window]) / window, window


def task_curve(column: Columns) -> TaskCurve:
    """The curve of one task's finished games."""
    if not len(column.returns):
        nothing = np.empty(0)
        return TaskCurve(nothing, nothing, nothing, nothing, None, None)
    means, window = smooth(column.returns)
    points = np.unique(np.linspace(0, means.size - 1, POINTS).astype(int))
    rows = points + window - 1
    frames = np.cumsum(column.frames, dtype=np.int64)[rows]
    return TaskCurve(
        frames,
        column.total_frames[rows],
        column.seconds[rows].astype(float),
        means[points],
        float(means.max()),
        float(means[-1]),
    )


def forgetting(curve: TaskCurve, suite: Suite, task: str) -> float | None:
    """Best so far minus now of the smoothed return, in points of the uncapped score; None without game or score."""
    if curve.best is None or curve.now is None or not metrics.is_scored(suite, task):
        return None
    return suite.normalise(task, curve.best) - suite.normalise(task, curve.now)


def mean_cosines(found: Sequence[Mapping[str, Any]], names: Sequence[str]) -> dict[str, Any] | None:
    """`gradient_cosines` of several runs as one: mean over the runs that measured a pair, sum of measurements, and `runs`;
    None without a run. names: gives the order of tasks."""
    if not found:
        return None
    tasks = [name for name in names if any(name in cosines["tasks"] for cosines in found)]
    values = np.full((len(found), len(tasks), len(tasks)), np.nan)
    for run, cosines in enumerate(found):
        kept = [i for i, name in enumerate(cosines["tasks"]) if name in tasks]
        places = [tasks.index(cosines["tasks"][i]) for i in kept]
        values[np.ix_([run], places, places)] = np.array(cosines["matrix"], dtype=float)[np.ix_(kept, kept)]
    counts = np.isfinite(values).sum(0)
    means = np.nansum(values, 0) / np.maximum(counts, 1)
    upper = np.triu(counts > 0, 1)
    costs = [cosines["cost_percent"] for cosines in found if cosines.get("cost_percent") is not None]
    return {
        "tasks": tasks,
        "matrix": [[float(means[i, j]) if counts[i, j] else None for j in range(len(tasks))] for i in range(len(tasks))],
        "share_negative": float((means[upper] < 0).mean()) if upper.any() else None,
        "measurements": sum(cosines["measurements"] for cosines in found),
        "cost_percent": float(np.mean(costs)) if costs else None,
        "runs": len(found),
    }


def _mean_curve(suite: Suite, columns: Mapping[str, Columns]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Frames of the run, seconds, and the mean capped score, at POINTS moments."""
    nothing = np.empty(0), np.empty(0), np.empty(0)
    scored = all(metrics.is_scored(suite, name) for name in columns)
    if not scored or len(columns) < len(suite.tasks) or not all(len(column.returns) for column in columns.values()):
        return nothing
    smoothed = {name: smooth(column.returns) for name, column in columns.items()}
    start = max(int(columns[name].total_frames[window - 1]) for name, (_, window) in smoothed.items())
    end = max(int(column.total_frames[-1]) for column in columns.values())
    moments = np.unique(np.linspace(start, end, POINTS).astype(np.int64))
    scores, seconds = [], np.zeros(moments.size)
    for name, (means, window) in smoothed.items():
        games = np.searchsorted(columns[name].total_frames, moments, side="right") - 1
        rows = np.clip(games - window + 1, 0, means.size - 1)
        zero = suite.normalise(name, 0.0)
        scores.append(np.minimum(zero + (suite.normalise(name, 1.0) - zero) * means[rows], metrics.CAP_PERCENT))
        seconds = np.fmax(seconds, columns[name].seconds[games])
    return moments, seconds, np.mean(scores, axis=0)


def _read_metrics(path: Path, tasks: tuple[str, ...]) -> dict[str, Any]:
    """What reports need of metrics.jsonl, read as a stream; a last line still being written is left out."""
    points: list[dict[str, Any]] = []
    recent: list[dict[str, Any]] = []
    cosines, network = None, dict[str, Any]()
    wanted = ("seconds", "frames_per_second", "sample_age_versions_mean")
    if path.exists():
        with path.open("rb") as stream:
            for number, line in enumerate(stream, 1):
                if not line.endswith(b"\n"):
                    break
                try:
                    record = _checked(orjson.loads(line))
                    points.append({name: record.get(name) for name in wanted})
                except ValueError as error:
                    raise ValueError(f"line {number} of {path} is damaged ({error}): remove it") from error
                recent = [*recent[-LAST_RECORDS + 1 :], record]
                cosines = record.get("gradient_cosines") or cosines
                network = health(record) or network
    last = recent[-1] if recent else {}
    mechanism = {
        task: {name: value for name in MECHANISM if (value := _mean_of(recent, task, name)) is not None} for task in tasks
    }
    for name in ("sample_age_versions_mean", "sample_age_seconds_mean"):
        values = [record[name] for record in recent if name in record]
        if values:
            mechanism.setdefault("", {})[name] = float(np.mean(values))
    budget = {
        "updates": last.get("updates"),
        "seconds": last.get("seconds"),
        "tasks": {
            task: {name: last.get("tasks", {}).get(task, {}).get(name) for name in ("frames", "share", *LOSSES)}
            for task in tasks
        },
    }
    return {"points": points, "budget": budget, "mechanism": mechanism, "cosines": cosines, "network": network}


def health(record: Mapping[str, Any]) -> dict[str, Any]:
    """Of a record: `layers`, name -> `live_units`, `units` and `relative_step`, None where not measured; and
    `value_gradient_share`. Empty where nothing was measured."""
    live, steps = record.get("live_units") or {}, record.get("relative_steps") or {}
    if not live and not steps:
        return {}
    units = record.get("units") or {}
    layers = {name: {"live_units": live[name], "units": units.get(name), "relative_step": None} for name in live}
    layers |= {name: {"live_units": None, "units": None, "relative_step": step} for name, step in steps.items()}
    return {"layers": layers, "value_gradient_share": record.get("value_gradient_share")}


def _checked(record: Any) -> dict[str, Any]:
    """The record; ValueError where it is none, or something that is averaged is no number."""
    if not isinstance(record, dict) or not isinstance(record.get("tasks", {}), dict):
        raise ValueError("no record")
    rows = [record, *record.get("tasks", {}).values()]
    if not all(isinstance(row, dict) for row in rows):
        raise ValueError("a task without names")
    for row in rows:
        for name in (*NUMBERS, *MECHANISM, *LOSSES):
            if not isinstance(row.get(name), int | float | None):
                raise ValueError(f"{name} is {row[name]!r}")
    return record


def _mean_of(recent: list[dict[str, Any]], task: str, name: str) -> float | None:
    values = [record.get("tasks", {}).get(task, {}).get(name) for record in recent]
    values = [value for value in values if value is not None]
    return float(np.mean(values)) if values else None
