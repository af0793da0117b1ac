"""A report: two sides, their scores, the change between them and what it cost; and its form as report.json."""

import dataclasses
import json
from dataclasses import dataclass
from typing import Any

import numpy as np

from eval import compare, intervals, metrics
from eval.budget import compare_budgets, side_budget
from eval.compare import Change
from eval.curves import MECHANISM, RunCurves, forgetting, mean_cosines
from eval.sides import Side, SideScores, absent, score
from launch.config import code_version

Ends = tuple[float, float] | None


@dataclass(frozen=True)
class Report:
    """missing: tasks for which a run of the subject has no game. unscored: without a random and a human score.

    aggregated, baseline_aggregated: the scores of the tasks that aggregates are over; with a baseline those that both
    sides have, or the difference of two means would be of different tasks. aggregates: name -> percent or count, empty
    where tasks are missing (unless allowed) or unscored: a mean over some of the tasks would pass for the mean over all.
    forced: differences of meaning, within a side or between the two, that --force let pass. remarks: others.
    """

    side: Side
    scores: SideScores
    missing: tuple[str, ...]
    unscored: tuple[str, ...]
    aggregated: SideScores
    aggregates: dict[str, float]
    ends: dict[str, Ends]
    baseline: Side | None = None
    baseline_scores: SideScores | None = None
    baseline_aggregated: SideScores | None = None
    baseline_aggregates: dict[str, float] = dataclasses.field(default_factory=dict)
    baseline_ends: dict[str, Ends] = dataclasses.field(default_factory=dict)
    change: Change | None = None
    forced: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()
    version: str = ""

    @property
    def has_change_aggregates(self) -> bool:
        """Whether the change over tasks may be stated: it may where the aggregates of both sides may."""
        return bool(self.change is not None and self.aggregates and self.baseline_aggregates)


def make_report(
    side: Side,
    baseline: Side | None = None,
    allow_missing: bool = False,
    margin: float = compare.MARGIN_PERCENT,
    forced: tuple[str, ...] = (),
    remarks: tuple[str, ...] = (),
) -> Report:
    """Score both sides. Raises ValueError on returns that are not finite, and where the baseline lacks a task."""
    scores = score(side)
    unscored = tuple(task for task in side.suite.task_names if not metrics.is_scored(side.suite, task))
    aggregates, ends = _aggregates(scores, allow_missing)
    report = Report(
        side, scores, scores.missing, unscored, scores, aggregates, ends, forced=side.forced, version=code_version()
    )
    if baseline is None:
        return report
    before = score(baseline)
    if before.missing and not allow_missing:
        raise ValueError(
            f"the baseline {baseline.label} lacks tasks ({absent(baseline, before)}): add runs, or compare the other tasks "
            f"with --allow-missing."
        )
    if unscored:
        raise ValueError(f"{', '.join(unscored)} of suite {side.suite.name} have no scores: a change has no common unit.")
    shared = [task for task in scores.scored if task in before.scored]
    aggregated, baseline_aggregated = score(side, shared), score(baseline, shared)
    aggregates, ends = _aggregates(aggregated, allow_missing)
    baseline_aggregates, baseline_ends = _aggregates(baseline_aggregated, allow_missing)
    return dataclasses.replace(
        report,
        aggregated=aggregated,
        aggregates=aggregates,
        ends=ends,
        baseline=baseline,
        baseline_scores=before,
        baseline_aggregated=baseline_aggregated,
        baseline_aggregates=baseline_aggregates,
        baseline_ends=baseline_ends,
        change=compare.compare(scores, before, (side.kind == "published", baseline.kind == "published"), margin),
        forced=tuple(dict.fromkeys((*side.forced, *baseline.forced, *forced))),
        remarks=remarks,
    )


def _aggregates(scores: SideScores, allow_missing: bool) -> tuple[dict[str, float], dict[str, Ends]]:
    nothing: dict[str, Ends] = dict.fromkeys(metrics.AGGREGATES)
    if not scores.scored or ((len(scores.scored) < len(scores.tasks) or scores.missing) and not allow_missing):
        return {}, nothing
    if any(score.n and score.hns is None for score in scores.tasks.values()):
        return {}, nothing
    values = metrics.aggregate(scores.means)
    if scores.noise.unknown:
        return values, nothing
    rough = [metrics.AGGREGATES.index(name) for name in metrics.ROUGH]
    truths = intervals.shrunken(scores.means, scores.noise.rows)
    low, high = intervals.intervals(scores.means, scores.noise, metrics.aggregate_rows, rough, truths)
    ends: dict[str, Ends] = {}
    for i, name in enumerate(metrics.AGGREGATES):
        bounds = (-np.inf, np.inf) if name in ("mean", "median", "iqm") else (-np.inf, metrics.CAP_PERCENT)
        if name == "optimality_gap":
            bounds = 0.0, np.inf
        if name in metrics.COUNTS:
            bounds = 0.0, float(len(scores.scored))
        ends[name] = float(np.clip(low[i], *bounds)), float(np.clip(high[i], *bounds))
    return values, ends


def task_interval(scores: SideScores, task: str) -> Ends:
    """Interval of a task's uncapped score in percent; None where its noise is unknown."""
    if task not in scores.scored or not np.isfinite(scores.errors[task]):
        return None
    half = float(intervals.student(scores.degrees[task])) * scores.errors[task]
    hns = float(scores.means[scores.scored.index(task)])
    return hns - half, hns + half


def train_scores(report: Report) -> dict[str, float]:
    """Uncapped scores of the training episodes, where games of the test split were played: task -> percent."""
    if report.side.identity.split != "test" or not any(run.train_returns for run in report.side.runs):
        return {}
    found = {}
    for task in report.scores.scored:
        trained = [run.train_returns.get(task, ()) for run in report.side.runs_of(task)]
        hns = metrics.score_runs(report.side.suite, task, trained).hns
        if hns is not None:
            found[task] = hns
    return found


def curves(side: Side | None) -> list[RunCurves]:
    """Curves of a side's runs, where it has any."""
    return [] if side is None else [run.curves for run in side.runs if run.curves is not None]


def task_forgetting(side: Side, task: str) -> float | None:
    """Best so far minus now, mean over the runs that have a game, in points of the uncapped score."""
    found = [forgetting(run.curves.tasks[task], side.suite, task) for run in side.runs_of(task) if run.curves is not None]
    known = [points for points in found if points is not None]
    return float(np.mean(known)) if known else None


def task_rows(report: Report) -> dict[str, dict[str, Any]]:
    """Everything that is said of each task, under the names of report.json; None = not known."""
    trained = train_scores(report)
    return {task: _task_row(report, task, trained) for task in report.scores.tasks}


def _task_row(report: Report, task: str, trained: dict[str, float]) -> dict[str, Any]:
    score = report.scores.tasks[task]
    low, high = task_interval(report.scores, task) or (None, None)
    before = report.baseline_scores.tasks.get(task) if report.baseline_scores is not None else None
    base_low, base_high = (task_interval(report.baseline_scores, task) if report.baseline_scores else None) or (None, None)
    change = report.change.tasks.get(task) if report.change is not None else None
    train = trained.get(task)
    return {
        **dataclasses.asdict(score),
        "n": None if report.side.kind == "published" else score.n,
        "sd": report.scores.sd[task],
        "runs": report.scores.num_runs[task],
        "low": low,
        "high": high,
        "baseline_n": before.n if before and report.baseline and report.baseline.kind != "published" else None,
        "baseline_raw_mean": before.raw_mean if before else None,
        "baseline_sd": report.baseline_scores.sd[task] if report.baseline_scores else None,
        "baseline_hns": before.hns if before else None,
        "baseline_capped": before.capped if before else None,
        "baseline_low": base_low,
        "baseline_high": base_high,
        "change_capped": change.capped if change else None,
        "change_low": change.low if change else None,
        "change_high": change.high if change else None,
        "change_uncapped": change.uncapped if change else None,
        "change_uncapped_low": change.uncapped_low if change else None,
        "change_uncapped_high": change.uncapped_high if change else None,
        "p_value": change.p_value if change else None,
        "p_holm": change.p_holm if change else None,
        "verdict": change.verdict if change else None,
        "train_hns": train,
        "train_minus_test": None if train is None or score.hns is None else train - score.hns,
        "forgetting": task_forgetting(report.side, task),
    }


def mechanism(side: Side) -> dict[str, Any]:
    """What the learner measured, mean over runs: per task, sample age, the matrix of gradient cosines; and of the first
    run, its network's live units, lengths of steps, and the value's share of the gradient."""
    shown = curves(side)
    tasks: dict[str, dict[str, float | None]] = {}
    for task in side.suite.task_names:
        found = {name: [c.mechanism[task][name] for c in shown if name in c.mechanism.get(task, {})] for name in MECHANISM}
        tasks[task] = {name: float(np.mean(values)) if values else None for name, values in found.items()}
    whole: dict[str, float | None] = {}
    for name in ("sample_age_versions_mean", "sample_age_seconds_mean"):
        values = [c.mechanism[""][name] for c in shown if name in c.mechanism.get("", {})]
        whole[name] = float(np.mean(values)) if values else None
    networks = [c.network for c in shown if c.network]
    cosines = mean_cosines([c.cosines for c in shown if c.cosines], side.suite.task_names)
    return {"tasks": tasks, **whole, "gradient_cosines": cosines, "network": networks[0] if networks else None}


def to_dict(report: Report) -> dict[str, Any]:
    """The content of report.json under stable names, described in the README."""
    change = report.change
    return {
        "identity": _identity(report, report.side),
        "baseline_identity": _identity(report, report.baseline) if report.baseline else None,
        "budget": side_budget(report.side),
        "baseline_budget": side_budget(report.baseline) if report.baseline else None,
        "budget_comparison": compare_budgets(report.side, report.baseline) if report.baseline else None,
        "aggregates": _with_ends(metrics.AGGREGATES, report.aggregates, report.ends),
        "baseline_aggregates": _with_ends(metrics.AGGREGATES, report.baseline_aggregates, report.baseline_ends)
        if report.baseline
        else None,
        "worst_task": worst_task(report),
        "tasks": task_rows(report),
        "change": _change(report, change) if change else None,
        "mechanism": mechanism(report.side),
        "missing": list(report.missing),
        "unscored": list(report.unscored),
        "method": _method(report),
        "forced": list(report.forced),
        "remarks": list(report.remarks),
    }


def to_json(report: Report) -> str:
    """The text of report.json: strict JSON (null, never NaN)."""
    return json.dumps(to_dict(report), indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def worst_task(report: Report) -> dict[str, Any] | None:
    """Name and capped score of the lowest task."""
    if not report.scores.scored:
        return None
    index = int(np.argmin(report.scores.means))
    return {"name": report.scores.scored[index], "capped": min(float(report.scores.means[index]), metrics.CAP_PERCENT)}


def _identity(report: Report, side: Side) -> dict[str, Any]:
    suite = {"suite": side.suite.name, "score_table": side.suite.score_table, "tasks": list(side.suite.task_names)}
    own = dataclasses.asdict(side.identity)
    source_table = own.pop("score_table")
    extra = {"kind": side.kind, "source_score_table": source_table, "code_version": report.version}
    return {**own, **suite, "cap": metrics.CAP_RULE, **extra}


def _with_ends(names: tuple[str, ...], values: dict[str, float], ends: dict[str, Ends]) -> dict[str, Any]:
    rows = {}
    for name in names:
        low, high = ends.get(name) or (None, None)
        rows[name] = {"value": values.get(name), "low": low, "high": high}
    return rows


def _change(report: Report, change: Change) -> dict[str, Any]:
    known = report.has_change_aggregates
    return {
        **{name: change.values[name] if known else None for name in compare.CHANGES},
        "intervals": {
            name: dict(zip(("low", "high"), change.intervals[name] or (None, None), strict=True)) if known else None
            for name in compare.CHANGES
        },
        "margin": change.margin,
        "lost_tasks": change.named(compare.LOST),
        "gained_tasks": change.named(compare.GAINED),
        "fallen_tasks": change.fallen(),
        "hidden_by_cap": list(change.hidden_by_cap),
    }


def _method(report: Report) -> dict[str, Any]:
    return {
        "intervals": "95 percent; multiplier bootstrap with Student's t (README, How a number is computed)",
        "replicates": intervals.REPLICATES,
        "seed": intervals.SEED,
        "intervals_cover": report.scores.covers,
        "baseline_intervals_cover": report.baseline_scores.covers if report.baseline_scores else None,
        "test": compare.TEST if report.change else None,
    }
