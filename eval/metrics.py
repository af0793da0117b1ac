"""From raw returns to scores: mean per task, human-normalised, capped, then aggregated over tasks. Pure functions."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tasks.suite import Suite

CAP_PERCENT = 100.0
CAP_RULE = "100 percent, after averaging over episodes, no floor"
AGGREGATES = (
    "mean_capped",
    "mean",
    "median",
    "iqm",
    "optimality_gap",
    "p5",
    "p10",
    "p25",
    "worst_tenth",
    "below_5",
    "below_25",
    "at_100",
)
COUNTS = ("below_5", "below_25", "at_100")
# Which noise alone moves in one direction: see eval/intervals.py.
ROUGH = ("mean_capped", "optimality_gap", "p5", "p10", "p25", "worst_tenth", *COUNTS)


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


def check_returns(task_name: str, returns: Sequence[float] | np.ndarray) -> np.ndarray:
    """Raw returns [n] as float64; ValueError naming the task where one is NaN or infinite, or the shape is wrong."""
    values = np.asarray(returns, dtype=np.float64)
    if values.ndim != 1:
        raise ValueError(f"Task '{task_name}': returns have shape {list(values.shape)}; give one number per episode, [n].")
    if not np.isfinite(values).all():
        index = int(np.flatnonzero(~np.isfinite(values))[0])
        raise ValueError(f"Task '{task_name}': return {index} is {values[index]}; remove the episode or find out why.")
    return values


def score_task(suite: Suite, task_name: str, returns: Sequence[float] | np.ndarray) -> TaskScore:
    """Score one task from the raw returns [n] of its whole episodes.

    The mean comes first, then 100 * (mean - random) / (human - random), then the cap: capping single episodes would
    punish a task whose returns vary. An empty list is n = 0 and no number. Raises ValueError on a return that is NaN
    or infinite, and whatever `Suite.normalise` raises on a task with a useless score table.
    """
    return score_runs(suite, task_name, [returns])


def score_runs(suite: Suite, task_name: str, runs: Sequence[Sequence[float] | np.ndarray]) -> TaskScore:
    """Score one task from several runs, raw returns [n] each: the mean of the runs' means, so that each run weighs the
    same, then as `score_task`. A run without an episode is left out here; the caller decides what that means."""
    checked = [check_returns(task_name, returns) for returns in runs]
    checked = [values for values in checked if values.size]
    if not checked:
        return TaskScore(0, None, None, None)
    n, raw_mean = sum(values.size for values in checked), float(np.mean([values.mean() for values in checked]))
    if not is_scored(suite, task_name):
        return TaskScore(n, raw_mean, None, None)
    hns = suite.normalise(task_name, raw_mean)
    return TaskScore(n, raw_mean, hns, min(hns, CAP_PERCENT))


def score_tasks(suite: Suite, returns: Mapping[str, Sequence[float] | np.ndarray]) -> dict[str, TaskScore]:
    """Score every task of the suite, in the suite's order; a task absent from `returns` has n = 0."""
    return {task: score_task(suite, task, returns.get(task, ())) for task in suite.task_names}


def aggregate(hns_percent: Sequence[float] | np.ndarray) -> dict[str, float]:
    """The aggregates over tasks of the uncapped normalised scores [N] in percent, each task weighing the same.

    Raises ValueError where N is 0 or a score is not finite.
    """
    scores = np.asarray(hns_percent, dtype=np.float64)
    if scores.ndim != 1 or scores.size == 0 or not np.isfinite(scores).all():
        raise ValueError(f"Scores {scores.tolist()} have no aggregate; give at least one finite score per task, [N].")
    return dict(zip(AGGREGATES, aggregate_rows(scores[None])[0].tolist(), strict=True))


def aggregate_rows(hns_percent: np.ndarray) -> np.ndarray:
    """AGGREGATES [R, len(AGGREGATES)] of R rows of uncapped normalised scores [R, N] in percent.

    `mean`, `median` and `iqm` are of uncapped scores, the others of scores capped at 100; counts are numbers of tasks.
    """
    # Sorted first: a sum in a fixed order makes the aggregates equal to the last bit whatever the order of the tasks.
    scores = np.sort(np.asarray(hns_percent, dtype=np.float64), axis=-1)
    capped = np.minimum(scores, CAP_PERCENT)
    mean_capped = capped.mean(-1)
    columns = (
        mean_capped,
        scores.mean(-1),
        np.median(scores, axis=-1),
        interquartile_mean(scores),
        CAP_PERCENT - mean_capped,
        *np.percentile(capped, [5, 10, 25], axis=-1, method="linear"),
        worst_tenth(capped),
        (scores < 5.0).sum(-1),
        (scores < 25.0).sum(-1),
        (scores >= CAP_PERCENT).sum(-1),
    )
    return np.stack(columns, axis=-1)


def interquartile_mean(scores: np.ndarray) -> np.ndarray:
    """Mean of scores [..., N] without the floor(N/4) lowest and the floor(N/4) highest."""
    count = scores.shape[-1]
    return np.sort(scores, axis=-1)[..., count // 4 : count - count // 4].mean(-1)


def worst_tenth(scores: np.ndarray) -> np.ndarray:
    """Mean of the ceil(N/10) lowest of scores [..., N]."""
    return np.sort(scores, axis=-1)[..., : math.ceil(scores.shape[-1] / 10)].mean(-1)
