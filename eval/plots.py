"""The plots of a report as SVG texts: scores, changes, performance profile, gradient cosines. Readable in grey."""

import io
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from eval import compare, intervals, metrics
from eval.report import Report, mechanism, task_interval
from eval.sides import SideScores

WIDTH_INCHES = 5.0
ROW_INCHES = 0.165
# Replaced by the page's own text colour, so that one picture serves light, dark and print.
INK = "#010203"
SUBJECT, LOSS, GAIN, FAINT = "#3b82c4", "#d4604f", "#93c5e8", "#8a8a8a"
STYLE: dict[Any, Any] = {
    "font.size": 8.0, "axes.titlesize": 9.0, "axes.edgecolor": INK, "axes.labelcolor": INK, "text.color": INK,
    "xtick.color": INK, "ytick.color": INK, "legend.frameon": False, "legend.fontsize": 7.5, "svg.fonttype": "none",
    "font.family": "sans-serif", "text.parse_math": False, "axes.spines.top": False, "axes.spines.right": False,
    "hatch.linewidth": 0.6, "grid.color": FAINT, "grid.linewidth": 0.3, "axes.unicode_minus": True,
}  # fmt: skip
# Bars and profiles end here; longer bars carry their number.
SHOWN_PERCENT = (-60.0, 150.0)


@dataclass(frozen=True)
class Plot:
    """key: for the page's anchors. title: what it shows. alt: the same for who cannot see it. svg: without a header."""

    key: str
    title: str
    alt: str
    svg: str


def score_plots(report: Report) -> list[Plot]:
    """Plots that need scores only; none where no task has a score."""
    if not report.scores.scored:
        return []
    found = []
    if report.change is not None:
        found.append(changes(report))
    found += [bars(report), profile(report)]
    cosines = mechanism(report.side)["gradient_cosines"]
    if cosines:
        found.append(cosine_map(cosines))
    return found


def bars(report: Report) -> Plot:
    """Score per task with its interval, against 100 percent and the baseline."""
    names = [report.scores.scored[i] for i in np.argsort(report.scores.means, kind="stable")]
    means = dict(zip(report.scores.scored, report.scores.means, strict=True))
    low, high = SHOWN_PERCENT

    def draw(figure: Figure) -> None:
        axes = rows_axes(figure, names)
        for y, task in enumerate(names):
            axes.barh(y, np.clip(means[task], low, high), height=0.62, color=SUBJECT)
            ends = task_interval(report.scores, task)
            if ends is not None:
                axes.plot(np.clip(ends, low, high), (y, y), color=INK, linewidth=1.0, solid_capstyle="butt")
            if not low <= means[task] <= high:
                side = "right" if means[task] > high else "left"
                axes.text(np.clip(means[task], low + 5, high - 12), y, f" {means[task]:.0f} ", ha=side, va="center", fontsize=7)
            if report.baseline_scores is not None and task in report.baseline_scores.scored:
                base = report.baseline_scores.means[report.baseline_scores.scored.index(task)]
                cut = base > high or base < low  # an arrow head: the baseline lies further out
                marker = "D" if not cut else ">" if base > high else "<"
                axes.plot(np.clip(base, low, high), y, marker=marker, markersize=3.6, color="none", mec=INK, mew=0.9)
        axes.axvline(100, color=INK, linewidth=0.8, linestyle=(0, (4, 3)))
        axes.set_xlabel("normalised score, percent")
        handles: list[Any] = [Patch(color=SUBJECT, label="score"), Line2D([], [], color=INK, label="95 % interval")]
        if report.baseline is not None:
            handles.append(Line2D([], [], marker="D", markersize=3.6, color="none", mec=INK, label="baseline (> beyond)"))
        axes.legend(handles=handles, loc="lower center", bbox_to_anchor=(0.4, 1.0), ncols=3)

    worst = names[0]
    alt = f"Bars of {len(names)} tasks; lowest {worst} at {means[worst]:.1f} percent, "
    alt += f"highest {names[-1]} at {means[names[-1]]:.1f}."
    title = f"Score per task (0 random, 100 human; bars end at {high:.0f} percent, longer ones bear their number)"
    return Plot("scores", title, alt, render("scores", rows_height(len(names)), draw))


def changes(report: Report) -> Plot:
    """Sorted change per task with its interval; losses are dark and hatched."""
    assert report.change is not None
    found = report.change.tasks
    names = sorted(found, key=lambda task: -found[task].capped)
    margin = report.change.margin

    def draw(figure: Figure) -> None:
        axes = rows_axes(figure, names)
        for y, task in enumerate(names):
            change = found[task]
            loss = change.capped < 0
            axes.barh(y, change.capped, height=0.62, color=LOSS if loss else GAIN, hatch="////" if loss else None,
                      edgecolor=INK if change.verdict in (compare.LOST, compare.GAINED) else "none", linewidth=0.9)  # fmt: skip
            if change.low is not None and change.high is not None:
                axes.plot((change.low, change.high), (y, y), color=INK, linewidth=1.0, solid_capstyle="butt")
        axes.axvline(0, color=INK, linewidth=0.8)
        for x in (-margin, margin):
            axes.axvline(x, color=INK, linewidth=0.6, linestyle=(0, (1, 2)))
        axes.set_xlabel("change of the capped score, points of percent")
        handles: list[Any] = [
            Patch(facecolor=LOSS, hatch="////", label="worse"),
            Patch(facecolor=GAIN, label="better"),
            Patch(facecolor="none", edgecolor=INK, label="beyond chance"),
            Line2D([], [], color=INK, linewidth=0.6, linestyle=(0, (1, 2)), label=f"±{margin:g}"),
        ]
        axes.legend(handles=handles, loc="lower center", bbox_to_anchor=(0.35, 1.0), ncols=4, columnspacing=1.0)

    fallen = report.change.fallen()
    alt = f"Bars of the change of {len(names)} tasks; worse by more than {margin:g} points: {', '.join(fallen) or 'none'}."
    return Plot(
        "changes", "Change against the baseline, worst at the top", alt, render("changes", rows_height(len(names)), draw)
    )


def profile(report: Report) -> Plot:
    """Share of tasks with at least a given score."""
    percents = np.linspace(0, SHOWN_PERCENT[1], 76)

    def shares(rows: np.ndarray) -> np.ndarray:
        return (rows[:, :, None] >= percents).mean(1)

    def draw(figure: Figure) -> None:
        axes = plain_axes(figure)
        sides: list[tuple[str, SideScores, Any, str]] = [("score", report.aggregated, "-", SUBJECT)]
        if report.baseline_aggregated is not None:
            sides.append(("baseline", report.baseline_aggregated, (0, (4, 2)), INK))
        for label, scores, style, colour in sides:
            axes.plot(percents, 100 * shares(scores.means[None])[0], linestyle=style, color=colour, label=label, linewidth=1.4)
            if not scores.noise.unknown:
                low, high = np.clip(intervals.intervals(scores.means, scores.noise, shares), 0, 1)
                axes.fill_between(percents, 100 * low, 100 * high, color=colour, alpha=0.18, linewidth=0)
        axes.axvline(metrics.CAP_PERCENT, color=INK, linewidth=0.6, linestyle=(0, (1, 2)))
        axes.set(xlabel="normalised score, percent", ylabel="tasks with at least this score, percent", ylim=(0, 103))
        axes.grid(True)
        axes.legend(loc="upper right")

    alt = "Performance profile: share of tasks that reach at least each normalised score, with 95 percent bands where known."
    return Plot("profile", "Performance profile", alt, render("profile", 3.3, draw))


def cosine_map(cosines: dict[str, Any]) -> Plot:
    """Cosines between the gradients of tasks; dark = pulling apart, a minus sign on each below zero."""
    names = cosines["tasks"]
    matrix = np.array([[math.nan if cell is None else cell for cell in row] for row in cosines["matrix"]], dtype=float)
    few = len(names) <= 12
    size = max(4.0, min(8.0, 160 / len(names)))  # of the names, points
    left = 0.35 + 0.0085 * size * max(map(len, names))
    side, bottom = WIDTH_INCHES - left - 0.85, 0.3
    height = side + bottom + 0.15

    def draw(figure: Figure) -> None:
        axes = figure.add_axes((left / WIDTH_INCHES, bottom / height, side / WIDTH_INCHES, side / height))
        image = axes.imshow(matrix, vmin=-1, vmax=1, cmap="cividis", interpolation="nearest")
        numbers = [str(i + 1) for i in range(len(names))]
        step = 1 if few else 5  # or the numbers would run into each other
        axes.set_xticks(range(0, len(names), step), numbers[::step], fontsize=size)
        axes.set_yticks(range(len(names)), [f"{name} {i}" for name, i in zip(names, numbers, strict=True)], fontsize=size)
        for (i, j), value in np.ndenumerate(matrix):
            if few and np.isfinite(value):
                axes.text(j, i, f"{value:.2f}", ha="center", va="center", color="white" if value < 0.2 else "black", fontsize=7)
            elif value < 0:
                axes.text(j, i, "-", ha="center", va="center", color="white", fontsize=size)
        bar = figure.add_axes(((left + side + 0.1) / WIDTH_INCHES, bottom / height, 0.1 / WIDTH_INCHES, side / height))
        figure.colorbar(image, cax=bar, label="cosine")

    share = cosines.get("share_negative")
    below = "" if share is None else f"; {100 * share:.0f} percent of pairs are below zero"
    runs, measured = (f"{cosines[name]} {name if cosines[name] != 1 else name[:-1]}" for name in ("runs", "measurements"))
    title = f"Cosines between tasks' gradients ({measured} in {runs}{below})"
    alt = f"Heat map of cosines between gradients of {len(names)} tasks{below}."
    return Plot("cosines", title, alt, render("cosines", height, draw))


def name_inches(names: Sequence[str]) -> float:
    """Room for names of tasks at the left."""
    return 0.25 + 0.057 * max(map(len, names))


def rows_height(count: int) -> float:
    """Height in inches of a plot with a row per task."""
    return 0.9 + ROW_INCHES * max(count, 3)


def rows_axes(figure: Figure, names: Sequence[str], top: float = 0.38, right: float = 0.2) -> Axes:
    """Axes with a row per name, the last name at the top."""
    height, left, bottom = figure.get_figheight(), name_inches(names), 0.45
    box = (left / WIDTH_INCHES, bottom / height, (WIDTH_INCHES - left - right) / WIDTH_INCHES, (height - bottom - top) / height)
    axes = figure.add_axes(box)
    axes.set_yticks(range(len(names)), names, fontsize=7.5)
    axes.set_ylim(-0.6, len(names) - 0.4)
    axes.tick_params(axis="y", length=0)
    axes.grid(True, axis="x")
    axes.set_axisbelow(True)
    return axes


def plain_axes(figure: Figure) -> Axes:
    """Axes with room for labels."""
    height = figure.get_figheight()
    return figure.add_axes((0.12, 0.5 / height, 0.84, (height - 0.75) / height))


def render(key: str, height: float, draw: Callable[[Figure], None]) -> str:
    """The SVG text of a figure, with ids of its own and the page's text colour."""
    with matplotlib.rc_context({**STYLE, "svg.hashsalt": key}):
        figure = Figure(figsize=(WIDTH_INCHES, height))
        draw(figure)
        stream = io.StringIO()
        figure.savefig(stream, format="svg", transparent=True, metadata={"Date": None})
    text = stream.getvalue()
    text = text[text.index("<svg") :].replace(INK, "currentColor")
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r' id="(?!m|p|c|h)[^"]*"', "", text)
    text = re.sub(r'(id="|href="#|url\(#)', rf"\g<1>{key}-", text)
    return re.sub(r'<svg ([^>]*?)width="[^"]*" height="[^"]*"', r"<svg \1", text, count=1)
