"""Plots over training: returns against frames and wall time, throughput and sample age."""

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from eval import metrics
from eval.curves import RunCurves
from eval.plots import FAINT, INK, SUBJECT, Plot, plain_axes, render, rows_axes, rows_height
from eval.report import Report, curves, task_forgetting
from tasks.suite import Suite

DASHED = (0, (3, 2))
KINDS = ("frames", "time")


def curve_plots(report: Report) -> list[Plot]:
    """Plots of the runs' files; none for files of returns and published agents."""
    ours, theirs = curves(report.side), curves(report.baseline)
    if not ours:
        return []
    found = []
    whole = theirs if report.baseline is not None and report.baseline.kind == "runs" else []
    if any(run.mean_capped.size for run in ours):
        found += [mean_plot(ours, whole, kind) for kind in KINDS]
    if any(curve.returns.size for run in ours for curve in run.tasks.values()):
        found += [task_plot(report, ours, theirs, kind) for kind in KINDS]
    if any(run.seconds.size for run in ours):
        found.append(throughput_plot(ours))
        found.append(age_plot(ours))
    return found


def mean_plot(ours: Sequence[RunCurves], theirs: Sequence[RunCurves], kind: str) -> Plot:
    """Mean capped score of training episodes against frames of the run or wall time."""
    factor, unit = _unit(kind, [_mean_x(run, kind) for run in (*ours, *theirs)])

    def draw(figure: Figure) -> None:
        axes = plain_axes(figure)
        for side, colour, style, label in ((theirs, INK, DASHED, "baseline"), (ours, SUBJECT, "-", "score")):
            for i, run in enumerate(side):
                x = _mean_x(run, kind) / factor
                axes.plot(x, run.mean_capped, color=colour, linestyle=style, linewidth=1.2, label=label if i == 0 else None)
        axes.set(xlabel=_x_label(kind, unit, "the whole run"), ylabel="mean capped score, percent")
        axes.grid(True)
        if theirs:
            axes.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=2)

    alt = f"Mean capped score of training episodes against {kind}, one line per run."
    return Plot(f"mean-{kind}", f"Mean capped score against {kind}", alt, render(f"mean-{kind}", 2.8, draw))


def task_plot(report: Report, ours: Sequence[RunCurves], theirs: Sequence[RunCurves], kind: str) -> Plot:
    """A row per task: the smoothed return from random play (its line) to 100 percent (dotted) or its best."""
    suite = report.side.suite
    names = list(reversed(suite.task_names))
    factor, unit = _unit(kind, [_task_x(run, task, kind) for run in (*ours, *theirs) for task in names])

    def draw(figure: Figure) -> None:
        axes = rows_axes(figure, names, top=0.38 if theirs else 0.15, right=0.62)
        rows = np.arange(len(names)) - 0.4
        scales = [_scale(suite, task, [*ours, *theirs]) for task in names]
        axes.hlines(rows, 0, 1, transform=axes.get_yaxis_transform(), color=FAINT, linewidth=0.5)
        humans = [y + 0.8 * 100 / high for y, task, (_, high) in zip(rows, names, scales, strict=True)
                  if metrics.is_scored(suite, task)]  # fmt: skip
        dots = (0, (1, 2))
        axes.hlines(humans, 0, 1, transform=axes.get_yaxis_transform(), color=FAINT, linewidth=0.5, linestyle=dots)
        for y, (task, (low, high)) in enumerate(zip(names, scales, strict=True)):
            for side, colour, style in ((theirs, INK, DASHED), (ours, SUBJECT, "-")):
                for run in side:
                    x, percent = _task_x(run, task, kind) / factor, _task_y(suite, task, run)
                    axes.plot(x, y - 0.4 + 0.8 * (percent - low) / (high - low), color=colour, linestyle=style, linewidth=1.0)
            axes.text(1.01, y, _now(report, task, ours), transform=axes.get_yaxis_transform(), fontsize=7, va="center")
        axes.set_xlabel(_x_label(kind, unit, "each task"))
        if theirs:
            lines = [
                Line2D([], [], color=SUBJECT, label="score"),
                Line2D([], [], color=INK, linestyle=DASHED, label="baseline"),
            ]
            axes.legend(handles=lines, loc="lower center", bbox_to_anchor=(0.4, 1.0), ncols=2)

    title = f"Return of each task against {kind}: row from 0 (line) to 100 percent (dots); right: now, and lost since the best"
    alt = f"Smoothed training returns of {len(names)} tasks against {kind}; at the right the score now and the points lost."
    return Plot(f"tasks-{kind}", title, alt, render(f"tasks-{kind}", 0.3 + 1.6 * rows_height(len(names)) - 0.6, draw))


def throughput_plot(ours: Sequence[RunCurves]) -> Plot:
    """Frames per second over wall time."""
    alt = "Frames per second over wall time, one line per run."
    lines = [run.frames_per_second for run in ours]
    return _over_time("throughput", "Throughput", alt, "frames per second", ours, lines)


def age_plot(ours: Sequence[RunCurves]) -> Plot:
    """Sample age over wall time."""
    alt = "How many updates old a sample is when it is learned from, over wall time, one line per run."
    return _over_time("age", "Staleness", alt, "sample age, updates", ours, [run.sample_age for run in ours])


def _over_time(key: str, title: str, alt: str, label: str, ours: Sequence[RunCurves], lines: Sequence[np.ndarray]) -> Plot:
    """One line per run, its values [n] over the seconds [n] of the run."""
    factor, unit = _unit("time", [run.seconds for run in ours])

    def draw(figure: Figure) -> None:
        axes = plain_axes(figure)
        for run, values in zip(ours, lines, strict=True):
            axes.plot(run.seconds / factor, values, color=SUBJECT, linewidth=1.0)
        axes.set(xlabel=_x_label("time", unit, ""), ylabel=label)
        axes.set_ylim(bottom=0)
        axes.grid(True)

    return Plot(key, title, alt, render(key, 2.4, draw))


def _now(report: Report, task: str, ours: Sequence[RunCurves]) -> str:
    """Score now and the points lost since the best, or the raw return where there is no score."""
    values = [now for run in ours if task in run.tasks and (now := run.tasks[task].now) is not None]
    if not values:
        return "no game"
    if not metrics.is_scored(report.side.suite, task):
        return f"{np.mean(values):.4g}"
    lost = task_forgetting(report.side, task)
    text = f"{report.side.suite.normalise(task, float(np.mean(values))):.0f} %"
    return text if not lost or lost < 0.5 else f"{text} (-{lost:.0f})"


def _scale(suite: Suite, task: str, runs: Sequence[RunCurves]) -> tuple[float, float]:
    """Lowest and highest value of a row."""
    found = [values for run in runs if (values := _task_y(suite, task, run)).size]
    low, high = (min(v.min() for v in found), max(v.max() for v in found)) if found else (0.0, 1.0)
    if metrics.is_scored(suite, task):
        return 0.0, max(100.0, high)
    return float(low), float(high) if high > low else float(low) + 1.0


def _task_y(suite: Suite, task: str, run: RunCurves) -> np.ndarray:
    if task not in run.tasks:
        return np.empty(0)
    returns = run.tasks[task].returns
    if not metrics.is_scored(suite, task):
        return returns
    zero = suite.normalise(task, 0.0)
    # Below random play a row would run into the next one.
    return np.maximum(zero + (suite.normalise(task, 1.0) - zero) * returns, -10.0)


def _task_x(run: RunCurves, task: str, kind: str) -> np.ndarray:
    if task not in run.tasks:
        return np.empty(0)
    return run.tasks[task].seconds if kind == "time" else run.tasks[task].task_frames


def _mean_x(run: RunCurves, kind: str) -> np.ndarray:
    return run.mean_seconds if kind == "time" else run.mean_frames


def _unit(kind: str, values: Sequence[np.ndarray]) -> tuple[float, str]:
    """What to divide by, and the unit that it gives."""
    highest = max((float(np.nanmax(v)) for v in values if v.size and not np.isnan(v).all()), default=1.0)
    if kind == "time":
        steps: tuple[tuple[float, str], ...] = ((86400.0, "days"), (3600.0, "hours"), (60.0, "minutes"), (1.0, "seconds"))
    else:
        steps = ((1e9, "billions"), (1e6, "millions"), (1e3, "thousands"), (1.0, ""))
    return next(((size, name) for size, name in steps if highest >= 2 * size), steps[-1])


def _x_label(kind: str, unit: str, of_what: str) -> str:
    if kind == "time":
        return f"wall time of training, {unit}"
    return f"frames of {of_what}{', ' + unit if unit else ''}"
