"""The change against a baseline: per task with a test and Holm's correction, and over tasks with losses apart from gains."""

from dataclasses import dataclass

import numpy as np
from scipy import special

from eval import intervals, metrics
from eval.sides import SideScores

MARGIN_PERCENT = 5.0
LOST, GAINED, NO_EVIDENCE, NOT_TESTED = "lost", "gained", "no evidence", "not tested"
CHANGES = ("mean", "lost", "gained", "p5", "p10", "p25", "p50", "worst_tenth", "sum_losses", "sum_gains")
CHANGE_COUNTS = ("lost", "gained")
Exact = tuple[bool, bool]
TEST = (
    "Welch's two-sided t-test that the task's mean raw return did not change, from the means of the runs where a side has "
    "several and from single games where it has one; published scores are taken as exact. Where all of a "
    "side's are equal, p is at least what the exact permutation test can give. P-values are corrected over tasks "
    "by Holm's method at 5 percent. `lost`, `gained`: significant, and the capped score changed by more than the margin."
)


@dataclass(frozen=True)
class TaskChange:
    """Change of one task in points of percent; low, high: of the capped change. p_value, p_holm: None = not tested."""

    capped: float
    uncapped: float
    low: float | None
    high: float | None
    uncapped_low: float | None
    uncapped_high: float | None
    p_value: float | None
    p_holm: float | None
    verdict: str


@dataclass(frozen=True)
class Change:
    """tasks: in the suite's order. values: CHANGES -> points or counts; intervals: the same -> low and high, or None.

    hidden_by_cap: tasks that fell beyond margin (and beyond chance, where tested) in uncapped points only.
    """

    margin: float
    tasks: dict[str, TaskChange]
    values: dict[str, float]
    intervals: dict[str, tuple[float, float] | None]
    hidden_by_cap: tuple[str, ...]

    def named(self, verdict: str) -> list[str]:
        """Tasks with a verdict, the largest change first."""
        return sorted((t for t, c in self.tasks.items() if c.verdict == verdict), key=lambda t: -abs(self.tasks[t].capped))

    def fallen(self) -> list[str]:
        """Tasks whose capped score fell by more than the margin, beyond chance or not, worst first."""
        return sorted((t for t, c in self.tasks.items() if c.capped < -self.margin), key=lambda t: self.tasks[t].capped)


def compare(subject: SideScores, baseline: SideScores, exact: Exact = (False, False), margin: float = MARGIN_PERCENT) -> Change:
    """The change from baseline to subject over the tasks that both have a score for. exact: whether subject and baseline
    are published numbers, taken as exact; where both are, nothing is tested.

    Raises ValueError where they share none.
    """
    names = [task for task in subject.scored if task in baseline.scored]
    if not names:
        raise ValueError("subject and baseline share no task that has a score: nothing can be compared")
    tested = [_test(subject, baseline, task, exact) for task in names]
    holm = holm_correct([p_value for p_value, _ in tested])
    tasks = {}
    for task, (p_value, factor), p_holm in zip(names, tested, holm, strict=True):
        tasks[task] = _task_change(subject, baseline, task, factor, p_value, p_holm, margin)
    values, ends = _aggregates(subject, baseline, names, margin, exact)
    hidden = [
        task
        for task, change in tasks.items()
        if change.capped >= -margin > change.uncapped and (change.p_holm is None or change.p_holm < 1 - intervals.LEVEL)
    ]
    return Change(margin, tasks, values, ends, tuple(sorted(hidden, key=lambda task: tasks[task].uncapped)))


def change_rows(changes: np.ndarray, margin: float) -> np.ndarray:
    """CHANGES [R, len(CHANGES)] of R rows of capped changes [R, N] in points."""
    columns = (
        changes.mean(-1),
        (changes < -margin).sum(-1),
        (changes > margin).sum(-1),
        *np.percentile(changes, [5, 10, 25, 50], axis=-1, method="linear"),
        metrics.worst_tenth(changes),
        np.minimum(changes, 0.0).sum(-1),
        np.maximum(changes, 0.0).sum(-1),
    )
    return np.stack(columns, axis=-1)


def holm_correct(p_values: list[float | None]) -> list[float | None]:
    """Holm's corrected p-values; None (not tested) stays None and does not count."""
    order = sorted((p, i) for i, p in enumerate(p_values) if p is not None)
    corrected: list[float | None] = [None] * len(p_values)
    highest = 0.0
    for rank, (p_value, index) in enumerate(order):
        highest = max(highest, min(1.0, p_value * (len(order) - rank)))
        corrected[index] = highest
    return corrected


def _test(subject: SideScores, baseline: SideScores, task: str, exact: Exact) -> tuple[float | None, float | None]:
    """Welch's p-value, and by how many standard errors an interval reaches; None where a side's noise is unknown."""
    sides, squares, degrees = (subject, baseline), [], []
    if all(exact):
        return None, None
    now, before = (float(side.means[side.scored.index(task)]) for side in sides)
    for side, known in zip(sides, exact, strict=True):
        # Equal returns may have means that differ in the last bit.
        flat = known or side.errors[task] < 1e-9 * max(1.0, abs(now), abs(before))
        squares.append(0.0 if flat else side.errors[task] ** 2)
        degrees.append(np.inf if known else side.degrees[task])
    variance = sum(squares)
    if not np.isfinite(variance):
        return None, None
    alike = any(square == 0.0 and not known for square, known in zip(squares, exact, strict=True))
    lowest = _lowest_p(degrees) if alike else 0.0
    if variance == 0.0:
        differ = abs(now - before) > 1e-9 * max(1.0, abs(now), abs(before))
        return (lowest if differ else 1.0), float(intervals.student(min(degrees)))
    welch = variance**2 / sum(square**2 / count for square, count in zip(squares, degrees, strict=True))
    p_value = 2 * special.stdtr(welch, -abs(now - before) / np.sqrt(variance))
    return max(float(p_value), lowest), float(intervals.student(welch))


def _lowest_p(degrees: list[float]) -> float:
    """The least p-value that so many units can give whatever they are: of the exact permutation test (both tails alike), or of
    the sign test against an exact number (infinite degrees). Welch's is no evidence where a few equal units have variance 0."""
    counts = [count + 1 for count in degrees]
    if np.isinf(counts).any():
        return float(2 * 0.5 ** min(counts))
    return float(min(1.0, 2 / special.binom(sum(counts), counts[0])))


def _task_change(
    subject: SideScores,
    baseline: SideScores,
    task: str,
    factor: float | None,
    p_value: float | None,
    p_holm: float | None,
    margin: float,
) -> TaskChange:
    now, before = (side.means[side.scored.index(task)] for side in (subject, baseline))
    halves = [0.0 if np.isnan(side.errors[task]) else (factor or 0.0) * side.errors[task] for side in (subject, baseline)]
    uncapped, capped = float(now - before), float(_cap(now) - _cap(before))
    low = high = uncapped_low = uncapped_high = None
    if factor is not None:
        # Zou and Donner 2008: an interval of a difference from the interval of each side, which the cap may cut. Without
        # the cap it is Welch's.
        down = (_cap(now) - _cap(now - halves[0]), _cap(before + halves[1]) - _cap(before))
        up = (_cap(now + halves[0]) - _cap(now), _cap(before) - _cap(before - halves[1]))
        low, high = float(capped - np.hypot(*down)), float(capped + np.hypot(*up))
        half = float(np.hypot(halves[0], halves[1]))
        uncapped_low, uncapped_high = uncapped - half, uncapped + half
    verdict = NOT_TESTED if p_holm is None else NO_EVIDENCE
    if p_holm is not None and p_holm < 1 - intervals.LEVEL and abs(capped) > margin:
        verdict = LOST if capped < 0 else GAINED
    return TaskChange(capped, uncapped, low, high, uncapped_low, uncapped_high, p_value, p_holm, verdict)


def _cap(percent: float) -> float:
    return min(percent, metrics.CAP_PERCENT)


def _aggregates(
    subject: SideScores, baseline: SideScores, names: list[str], margin: float, exact: Exact
) -> tuple[dict[str, float], dict[str, tuple[float, float] | None]]:
    now, before = ([side.scored.index(task) for task in names] for side in (subject, baseline))
    split = len(subject.scored)
    columns = [*now, *(split + index for index in before)]

    def statistics(rows: np.ndarray) -> np.ndarray:
        capped = np.minimum(rows[:, columns], metrics.CAP_PERCENT)
        return change_rows(capped[:, : len(names)] - capped[:, len(names) :], margin)

    means = np.concatenate([subject.means, baseline.means])
    values = dict(zip(CHANGES, statistics(means[None])[0].tolist(), strict=True))
    noise = intervals.combine(subject.noise, baseline.noise)
    unknown = [index for index in noise.unknown if index in columns and not exact[index >= split]]
    if unknown or all(exact):
        return values, dict.fromkeys(CHANGES)
    # The changes are pulled together, not the scores of each side: equal changes are what chance drives apart.
    after, earlier = means[now], means[[split + index for index in before]]
    rows = noise.rows[:, columns]
    changes = intervals.shrunken(after - earlier, rows[:, : len(names)] - rows[:, len(names) :])
    truths = np.tile(means, (len(changes), 1))
    truths[:, columns] = np.concatenate([(after + earlier + changes) / 2, (after + earlier - changes) / 2], axis=1)
    rough = [CHANGES.index(name) for name in CHANGES if name not in ("mean", "p50")]
    low, high = intervals.intervals(means, noise, statistics, rough, truths)
    count = len(names)
    ends: dict[str, tuple[float, float] | None] = {}
    for i, name in enumerate(CHANGES):
        lowest = 0.0 if name in (*CHANGE_COUNTS, "sum_gains") else -np.inf
        highest = count if name in CHANGE_COUNTS else 0.0 if name == "sum_losses" else np.inf
        ends[name] = (float(np.clip(low[i], lowest, highest)), float(np.clip(high[i], lowest, highest)))
    return values, ends
