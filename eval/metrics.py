"""From raw returns to scores: mean per task, human-normalised, capped, then aggregated over tasks. Pure functions."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tasks.suite import Suite

CAP_PERCENT = 100.0
CAP_RULE = "100 percent, after averaging over episodes, no floor"
AGGREGATES = ("mean_capped", "mean", "median", "iqm", "p5", "p10", "p25", "worst_tenth")


@dataclass(frozen=True)
class TaskScore:
    """What is known of one task; None stands for "no episode" (raw_mean) or "no episode or no score" (hns, capped).

    n: whole episodes averaged. raw_mean: mean raw return. hns, capped: percent of the human score above random.
    """

    n: int
    raw_mean: float | None
    hns: float | None
    capped: float | None


def is_scored(suite: Suite, task_name: str) -> bool:
    """Whether the task has a random and a human score."""
    task = suite.task(task_name)
    return task.random_score is not None and task.human_score is not None


def score_task(suite: Suite, task_name: str, returns: Sequence[float] | np.ndarray) -> TaskScore:
    """Score one task from the raw returns [n] of its whole episodes.

    The mean comes first, then 100 * (mean - random) / (human - random), then the cap: capping single episodes would
    punish a task whose returns vary. An empty list is n = 0 and no number. Raises ValueError on a return that is NaN
    or infinite, and whatever `Suite.normalise` raises on a task with a useless score table.
    """
    values = np.asarray(returns, dtype=np.float64)
    if values.size == 0:
        return TaskScore(0, None, None, None)
    if values.ndim != 1:
        raise ValueError(f"Task '{task_name}': returns have shape {list(values.shape)}; give one number per episode, [n].")
    if not np.isfinite(values).all():
        index = int(np.flatnonzero(~np.isfinite(values))[0])
        raise ValueError(f"Task '{task_name}': return {index} is {values[index]}; remove the episode or find out why.")
    raw_mean = float(values.mean())
    if not is_scored(suite, task_name):
        return TaskScore(values.size, raw_mean, None, None)
    hns = suite.normalise(task_name, raw_mean)
    return TaskScore(values.size, raw_mean, hns, min(hns, CAP_PERCENT))


def score_tasks(suite: Suite, returns: Mapping[str, Sequence[float] | np.ndarray]) -> dict[str, TaskScore]:
    """Score every task of the suite, in the suite's order; a task absent from `returns` has n = 0."""
    return {task: score_task(suite, task, returns.get(task, ())) for task in suite.task_names}


def aggregate(hns_percent: Sequence[float] | np.ndarray) -> dict[str, float]:
    """The aggregates over tasks of the uncapped normalised scores [N] in percent, each task weighing the same.

    `mean`, `median` and `iqm` are of uncapped scores; `mean_capped`, `p5`, `p10`, `p25` and `worst_tenth` of scores
    capped at 100. Raises ValueError where N is 0 or a score is not finite.
    """
    scores = np.asarray(hns_percent, dtype=np.float64)
    if scores.ndim != 1 or scores.size == 0 or not np.isfinite(scores).all():
        raise ValueError(f"Scores {scores.tolist()} have no aggregate; give at least one finite score per task, [N].")
    # Sorted first: a sum in a fixed order makes the aggregates equal to the last bit whatever the order of the tasks.
    scores = np.sort(scores)
    capped = np.minimum(scores, CAP_PERCENT)
    p5, p10, p25 = np.percentile(capped, [5, 10, 25], method="linear")
    return {
        "mean_capped": float(capped.mean()),
        "mean": float(scores.mean()),
        "median": float(np.median(scores)),
        "iqm": interquartile_mean(scores),
        "p5": float(p5),
        "p10": float(p10),
        "p25": float(p25),
        "worst_tenth": worst_tenth(capped),
    }


def interquartile_mean(scores: np.ndarray) -> float:
    """Mean of scores [N] without the floor(N/4) lowest and the floor(N/4) highest."""
    cut = scores.size // 4
    return float(np.sort(scores)[cut : scores.size - cut].mean())


def worst_tenth(scores: np.ndarray) -> float:
    """Mean of the ceil(N/10) lowest of scores [N]."""
    return float(np.sort(scores)[: math.ceil(scores.size / 10)].mean())
