"""The sentences of a report: first of all which tasks were lost, then how sure that is, and what was compared."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eval import compare, intervals, metrics
from eval.budget import compare_budgets
from eval.report import Report
from eval.sides import EPISODES, MIXED, NO_SCORE, NOTHING, RUNS, Side, absent
from tasks.dmlab import NEED_IMAGES

LABELS = {
    "mean_capped": "mean capped",
    "mean": "mean",
    "median": "median",
    "iqm": "interquartile mean",
    "optimality_gap": "optimality gap",
    "p5": "5th percentile (capped)",
    "p10": "10th percentile (capped)",
    "p25": "25th percentile (capped)",
    "worst_tenth": "worst tenth (capped)",
    "below_5": "tasks below 5 %",
    "below_25": "tasks below 25 %",
    "at_100": "tasks at or above 100 %",
}


def headline(report: Report) -> list[str]:
    """What must not be missed, most important first."""
    if report.change is None:
        return [*_forced(report), *_missing(report), *_scores(report)]
    return [*_forced(report), *_losses(report), *_missing(report), *_gains(report)]


def _forced(report: Report) -> list[str]:
    within = [*report.side.forced, *(report.baseline.forced if report.baseline is not None else ())]
    between = [text for text in report.forced if text not in within]
    found = []
    if between:
        found.append(f"COMPARED BY FORCE, although the two sides do not mean the same: {'; '.join(between)}.")
    if within:
        found.append(f"POOLED BY FORCE, although these runs are not seeds of one experiment: {'; '.join(within)}.")
    return found


def _losses(report: Report) -> list[str]:
    change = report.change
    assert change is not None
    count, margin = len(change.tasks), f"{change.margin:g} points"
    lost = change.named(compare.LOST)
    untested = [task for task in change.fallen() if change.tasks[task].verdict == compare.NOT_TESTED]
    unclear = [task for task in change.fallen() if change.tasks[task].verdict == compare.NO_EVIDENCE]
    found = []
    mean = _mean_change(report)
    if lost:
        text = f"{_count(len(lost), count)} lost, beyond {margin} and beyond chance: {_named(report, lost)}"
        found.append(f"{text}{mean}.")
    if untested:
        text = f"{_count(len(untested), count)} worse by more than {margin} (not tested against chance): "
        found.append(f"{text}{_named(report, untested)}{'' if lost else mean}.")
    if not lost and not untested:
        found.append(f"No task of {count} is lost beyond {margin} and beyond chance{mean}.")
    if unclear:
        verb = "falls" if len(unclear) == 1 else "fall"
        found.append(f"{len(unclear)} {verb} by more than {margin}, but chance can do that: {_named(report, unclear)}.")
    if change.hidden_by_cap:
        fallen = ", ".join(f"{task} {change.tasks[task].uncapped:+.1f}" for task in change.hidden_by_cap)
        found.append(f"Above the cap, where capped scores show nothing: {fallen} points.")
    return found


def _mean_change(report: Report) -> str:
    """The end of a sentence on losses: what the mean alone would have said."""
    if not report.has_change_aggregates or report.change is None:
        return ""
    points = report.change.values["mean"]
    before, now = report.baseline_aggregates["mean_capped"], report.aggregates["mean_capped"]
    if abs(points) < 0.005:
        return f" - and the mean capped score stays ({before:.2f} to {now:.2f} %)"
    verb = "rises" if points > 0 else "falls"
    linked = "although" if points > 0 and report.change.fallen() else "and"
    return f" - {linked} the mean capped score {verb} by {abs(points):.2f} points ({before:.2f} to {now:.2f} %)"


def _gains(report: Report) -> list[str]:
    change = report.change
    assert change is not None
    gained = change.named(compare.GAINED)
    untested = [t for t, c in change.tasks.items() if c.verdict == compare.NOT_TESTED and c.capped > change.margin]
    found = []
    if gained or not untested:
        found.append(f"{_count(len(gained), len(change.tasks))} gained beyond {change.margin:g} points and beyond chance.")
    if untested:
        found.append(f"{_count(len(untested), len(change.tasks))} better by more than {change.margin:g} points (not tested).")
    return found


def _scores(report: Report) -> list[str]:
    if not report.aggregates:
        return []
    worst = report.scores.scored[int(report.scores.means.argmin())]
    percent = min(report.scores.means.min(), metrics.CAP_PERCENT)
    below = int(report.aggregates["below_5"])
    text = f"Mean capped score {report.aggregates['mean_capped']:.2f} %; worst task {worst} at {percent:.2f} %"
    return [f"{text}; {_count(below, len(report.scores.scored))} below 5 %."]


def _missing(report: Report) -> list[str]:
    total, left = len(report.scores.tasks), [t for t in report.scores.tasks if t not in report.aggregated.scored]
    found = []
    if report.missing and not report.aggregates:
        found.append(f"no aggregate: {absent(report.side, report.scores)}")
    elif left and report.aggregates:
        found.append(f"aggregates leave out {len(left)} of {total} tasks: {', '.join(left)}")
        if report.missing:
            found.append(absent(report.side, report.scores))
    if report.unscored:
        dummies = [task for task in report.unscored if task in NEED_IMAGES]
        why = f" (played with plain colours in place of their images: {', '.join(dummies)})" if dummies else ""
        have = "1 task has" if len(report.unscored) == 1 else f"{len(report.unscored)} tasks have"
        found.append(f"no aggregate: {have} no scores: {', '.join(report.unscored)}{why}")
    if report.baseline is not None and report.baseline_scores is not None and report.baseline_scores.missing:
        found.append(f"of the baseline, {absent(report.baseline, report.baseline_scores)}")
    return found


def left_out(report: Report) -> str:
    """Beside each aggregate: how many tasks it leaves out; empty for none."""
    total = len(report.scores.tasks)
    missing = total - len(report.aggregated.scored)
    return f" ({missing} of {total} tasks missing)" if missing and report.aggregates else ""


def notes(report: Report) -> list[str]:
    """How far the intervals and the test can be trusted, and what differs between the sides."""
    found = [_covers("intervals of the scores", report.scores.covers, report.side)]
    if report.baseline_scores is not None and report.baseline is not None:
        found.append(_covers("intervals of the baseline", report.baseline_scores.covers, report.baseline))
        if report.change is not None and any(change.p_value is not None for change in report.change.tasks.values()):
            found.append(f"test: {compare.TEST}")
        found.append(f"budget: {compare_budgets(report.side, report.baseline)}.")
    if report.scores.noise.unknown and report.side.kind != "published":
        names = ", ".join(report.scores.scored[index] for index in report.scores.noise.unknown)
        found.append(f"one game only, so no interval: {names}; the aggregates have none either.")
    found += [f"the sides differ: {remark}." for remark in report.remarks]
    return found


def _covers(what: str, covers: str, side: Side) -> str:
    if covers == NOTHING:
        return f"{what}: none; single published numbers say nothing of their noise, they are taken as exact."
    if covers == NO_SCORE:
        return f"{what}: none, as no task has a score."
    if covers == EPISODES:
        single = "each task has one run" if side.kind == "single-task runs" else "there is one run"
        return (
            f"{what} ({100 * intervals.LEVEL:g} percent) cover episode noise only: {single}, so another "
            "training with another seed may differ by more."
        )
    count = f"{len(side.runs)} runs" if side.kind == "runs" else "the runs of each task"
    unit = {RUNS: f"differences between {count}", MIXED: "differences between runs only where a task has several"}
    return f"{what} ({100 * intervals.LEVEL:g} percent) cover {unit[covers]}."


def identity_lines(report: Report, most_runs: int | None = None) -> list[tuple[str, str]]:
    """Label and text of what was measured, and of the baseline where it differs; then a line for each run, but none of a
    side that has more than `most_runs`."""
    here = report.side.identity
    rows = [
        ("source", here.source),
        (
            "suite",
            f"{report.side.suite.name} ({len(report.side.suite.tasks)} task{'s' if len(report.side.suite.tasks) > 1 else ''})",
        ),
        ("score table", report.side.suite.score_table),
        ("cap", metrics.CAP_RULE),
        ("policy", here.policy),
        ("episodes", here.episodes),
        ("split", here.split),
        ("protocol", here.protocol),
        ("time limit", here.time_limit),
        ("reward transform", here.reward_transform),
        ("observation", here.observation),
        ("action repeat", "unstated" if here.frames_per_step is None else str(here.frames_per_step)),
        ("action set", _actions(here.action_set)),
        ("training seeds", _seeds(report.side.runs)),
        ("code version", report.version),
    ]
    if report.baseline is not None:
        there = report.baseline.identity
        rows.append(
            ("baseline", f"{there.source} ({report.baseline.kind}; {there.episodes}; seeds {_seeds(report.baseline.runs)})")
        )
    for label, side in (("run", report.side), ("baseline run", report.baseline)):
        shown = [] if side is None else [entry for entry in side.identity.runs if "checkpoint" in entry]
        if most_runs is not None and len(shown) > most_runs:
            rows.append((f"{label}s", f"{len(shown)}, listed in the files of --out"))
        else:
            rows += [(label, _run(entry)) for entry in shown]
    return rows


def _actions(action_set: dict[str, int] | None) -> str:
    """Legal actions per task; one number where all tasks have the same."""
    if not action_set:
        return "unstated"
    if len(set(action_set.values())) == 1:
        return f"{next(iter(action_set.values()))} actions in every task"
    return ", ".join(f"{task} {count}" for task, count in action_set.items())


def _run(entry: dict[str, Any]) -> str:
    """One run: its folder, seed, frames, and the parameters that played, or that none did."""
    frames = "frames unknown" if entry["frames"] is None else f"{entry['frames']:,} frames"
    played = "games of the training"
    if entry["checkpoint"] is not None:
        played = f"checkpoint {Path(entry['checkpoint']).name}, parameters {entry['parameter_hash']}"
    return f"{entry['source']}: seed {entry['seed']}, {frames}, {played}, code {entry['code_version']}"


def _seeds(runs: Sequence[object]) -> str:
    seeds = sorted({seed for run in runs if (seed := getattr(run, "seed", None)) is not None})
    return ", ".join(map(str, seeds)) or "unstated"


def _count(number: int, total: int) -> str:
    return f"{number} of {total} task{'' if total == 1 else 's'} {'is' if number == 1 else 'are'}"


def _named(report: Report, tasks: Sequence[str]) -> str:
    assert report.change is not None
    return ", ".join(f"{task} {report.change.tasks[task].capped:+.1f}" for task in tasks)
