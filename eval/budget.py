"""What a side cost: frames in total and per task, updates, losses, wall time; and whether two sides cost the same."""

from typing import Any

import numpy as np

from eval.curves import LOSSES
from eval.sides import Side

# Budgets within so many percent of each other count as the same: a run ends at a whole batch.
SAME_PERCENT = 5.0


def side_budget(side: Side) -> dict[str, Any]:
    """The budget of report.json; frames, updates and seconds are means over runs, and sums over single-task runs."""
    per_task = task_frames(side)
    known = [frames for frames in per_task.values() if frames]
    total = _total(side, "frames")
    tasks = {}
    for task in side.suite.task_names:
        frames = per_task.get(task)
        shown = [run.curves.budget["tasks"].get(task, {}) for run in side.runs_of(task) if run.curves is not None]
        losses = {name: _mean([row.get(name) for row in shown]) for name in LOSSES}
        tasks[task] = {"frames": frames, "share": frames / sum(known) if frames and known else None, **losses}
    evaluation = sum(sum(run.budget.get("evaluation_frames", {}).values()) for run in side.runs)
    return {
        "frames": total,
        "updates": _total(side, "updates"),
        "seconds": _total(side, "seconds"),
        "tasks": tasks,
        "evaluation_frames": evaluation,
    }


def task_frames(side: Side) -> dict[str, int]:
    """Training frames per task, mean over the runs that know it."""
    found = {}
    for task in side.suite.task_names:
        frames = _mean([run.budget.get("task_frames", {}).get(task) for run in side.runs_of(task)])
        if frames is not None:
            found[task] = round(frames)
    return found


def compare_budgets(side: Side, baseline: Side) -> str:
    """One sentence: whether the baseline had the same frames per task, or the same total."""
    ours, theirs = task_frames(side), task_frames(baseline)
    shared = [task for task in ours if task in theirs]
    totals = _total(side, "frames"), _total(baseline, "frames")
    if len(shared) == len(side.suite.tasks):
        ratio = {task: theirs[task] / max(1, ours[task]) for task in shared}
        if all(_same(ours[task], theirs[task]) for task in shared):
            return f"the baseline had the same frames per task (within {SAME_PERCENT:g} percent)"
        worst = max(shared, key=lambda task: abs(np.log(max(ratio[task], 1e-9))))
        text = f"frames per task differ most in {worst}: {ours[worst]:,} against the baseline's {theirs[worst]:,}"
        same = totals[0] and totals[1] and _same(totals[0], totals[1])
        return f"{'the baseline had the same frames in total, but ' if same else 'the baseline had another budget: '}{text}"
    if totals[0] and totals[1]:
        kind = "the same frames in total" if _same(totals[0], totals[1]) else "another total"
        return f"the baseline had {kind}: {totals[0]:,} against {totals[1]:,} frames; frames per task are not known"
    return "the budgets cannot be compared: the frames of one side are not known"


def _same(first: float, second: float) -> bool:
    return abs(first - second) <= SAME_PERCENT / 100 * max(first, second)


def _total(side: Side, name: str) -> int | float | None:
    if side.kind != "single-task runs":
        value = _mean([run.budget.get(name) for run in side.runs])
    else:
        by_task = [_mean([run.budget.get(name) for run in side.runs_of(task)]) for task in side.suite.task_names]
        value = None if not by_task or None in by_task else float(sum(part for part in by_task if part is not None))
    if value is None or name == "seconds":
        return value
    return round(value)


def _mean(values: list[Any]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else None
