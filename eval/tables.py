"""A report as text: the short tables of the terminal, report.md and report.csv."""

import csv
import io
from typing import Any

from rich.console import Console
from rich.table import Table

from eval import compare, metrics, words
from eval.budget import side_budget
from eval.curves import LOSSES
from eval.report import Ends, Report, task_rows

CSV_COLUMNS = (
    "n", "runs", "raw_mean", "sd", "hns", "low", "high", "capped",
    "baseline_n", "baseline_raw_mean", "baseline_sd", "baseline_hns", "baseline_low", "baseline_high", "baseline_capped",
    "change_capped", "change_low", "change_high", "change_uncapped", "change_uncapped_low", "change_uncapped_high",
    "p_value", "p_holm", "verdict", "train_hns", "train_minus_test", "forgetting",
)  # fmt: skip

DETAILS = (
    ("runs", "runs"), ("raw_mean", "raw mean"), ("sd", "sd of games"), ("hns", "normalised %"), ("low,high", "95% interval"),
    ("baseline_n", "baseline n"), ("baseline_raw_mean", "baseline raw mean"), ("baseline_sd", "baseline sd"),
    ("baseline_hns", "baseline normalised %"), ("baseline_low,baseline_high", "baseline interval"),
    ("change_uncapped", "uncapped change"), ("change_uncapped_low,change_uncapped_high", "its interval"),
    ("p_holm", "p (Holm)"), ("train_minus_test", "train - test"), ("forgetting", "forgetting"),
)  # fmt: skip
# More runs of a side than that would push the tables off the terminal.
MOST_RUNS = 10
DETAILS_OF_A_CHANGE = tuple(title for _, title in DETAILS[5:13])


def show(report: Report, console: Console) -> None:
    """Print what must not be missed, the identity, the table of tasks, and the aggregates or why there are none."""
    alarming = report.change is not None or bool(report.forced)
    for i, sentence in enumerate(words.headline(report)):
        console.print(sentence, soft_wrap=True, style="bold red" if i == 0 and alarming else "bold")
    for label, text in words.identity_lines(report, MOST_RUNS):
        console.print(f"{label:<18}{text}", soft_wrap=True)
    columns, rows = task_table(report)
    table = Table()
    table.add_column(columns[0], overflow="fold")
    for column in columns[1:]:
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(*row)
    console.print(table)
    suffix = words.left_out(report)
    for name, value in report.aggregates.items():
        before = ""
        if report.has_change_aggregates:
            before = f"   baseline {amount(name, report.baseline_aggregates[name])}"
        console.print(f"{name:<14} {amount(name, value)}{_ends(name, report.ends[name])}{before}{suffix}", soft_wrap=True)
    if report.has_change_aggregates and report.change is not None:
        console.print("change, points of the capped score:")
        for name, label in change_labels(report.change.margin).items():
            text = change_amount(name, report.change.values[name])
            console.print(f"{label:<28} {text}{_change_ends(report, name)}{suffix}", soft_wrap=True)
    for note in words.notes(report):
        console.print(f"note: {note}", soft_wrap=True)


def task_table(report: Report) -> tuple[list[str], list[list[str]]]:
    """Column titles and rows of text: worst change first where there is a baseline, else in the suite's order."""
    found = task_rows(report)
    if report.change is None:
        columns = ["task", "n", "raw mean", "normalised %", "95% interval", "capped %"]
        rows = []
        for task, row in found.items():
            ends = _range(row["low"], row["high"])
            numbers = (_number(row["raw_mean"]), _number(row["hns"]), ends, _number(row["capped"]))
            rows.append([task, _integer(row["n"]), *numbers])
        return columns, rows
    columns = ["task", "n", "capped %", "baseline %", "change", "95% interval", "verdict"]
    known = [task for task in found if found[task]["change_capped"] is not None]
    order = [*sorted(known, key=lambda task: found[task]["change_capped"]), *(task for task in found if task not in known)]
    rows = []
    for task in order:
        row = found[task]
        change = "-" if row["change_capped"] is None else f"{row['change_capped']:+.2f}"
        ends = _range(row["change_low"], row["change_high"])
        rows.append(
            [
                task,
                _integer(row["n"]),
                _number(row["capped"]),
                _number(row["baseline_capped"]),
                change,
                ends,
                row["verdict"] or "-",
            ]
        )
    return columns, rows


def aggregate_table(report: Report) -> tuple[list[str], list[list[str]]]:
    """Titles and rows of the aggregates, with the baseline's beside them."""
    suffix = words.left_out(report)
    columns = ["aggregate", "value", "95% interval"] + (["baseline", "95% interval"] if report.baseline_aggregates else [])
    rows = []
    for name, value in report.aggregates.items():
        row = [words.LABELS[name] + suffix, amount(name, value).strip(), _ends_text(name, report.ends[name])]
        if report.baseline_aggregates:
            row.append(amount(name, report.baseline_aggregates[name]).strip())
            row.append(_ends_text(name, report.baseline_ends[name]))
        rows.append(row)
    return columns, rows


def change_table(report: Report) -> tuple[list[str], list[list[str]]]:
    """Titles and rows of the change over tasks; no rows where it may not be stated."""
    columns = ["change of the capped score", "value", "95% interval"]
    if report.change is None or not report.has_change_aggregates:
        return columns, []
    suffix, labels = words.left_out(report), change_labels(report.change.margin)
    rows = []
    for name in compare.CHANGES:
        ends = _ends_text(name, report.change.intervals[name])
        rows.append([labels[name] + suffix, change_amount(name, report.change.values[name]).strip(), ends])
    return columns, rows


def change_labels(margin: float) -> dict[str, str]:
    """What CHANGES are called; counts are of all such changes, beyond chance or not."""
    return {
        "mean": "mean", "lost": f"tasks worse by more than {margin:g}", "gained": f"tasks better by more than {margin:g}",
        "p5": "5th percentile", "p10": "10th percentile", "p25": "25th percentile", "p50": "median",
        "worst_tenth": "worst tenth", "sum_losses": "sum of losses", "sum_gains": "sum of gains",
    }  # fmt: skip


def detail_table(report: Report) -> tuple[list[str], list[list[str]]]:
    """Titles and rows of what the short table leaves out: raw returns, uncapped scores, test, train minus test."""
    columns = [title for _, title in DETAILS if report.change is not None or title not in DETAILS_OF_A_CHANGE]
    rows = []
    for task, row in task_rows(report).items():
        cells = [(name, title) for name, title in DETAILS if title in columns]
        rows.append([task, *(_cell(row, name) for name, _ in cells)])
    return ["task", *columns], rows


def budget_table(report: Report) -> tuple[list[str], list[list[str]]]:
    """Titles and rows of frames, shares and losses per task; the last row is the whole run."""
    found = side_budget(report.side)
    other = side_budget(report.baseline)["tasks"] if report.baseline is not None else {}
    columns = ["task", "frames", "share %", *(name.replace("_", " ") for name in LOSSES)]
    columns += ["baseline frames"] if report.baseline is not None else []
    rows = []
    for task, row in found["tasks"].items():
        share = "-" if row["share"] is None else f"{100 * row['share']:.1f}"
        losses = ("-" if row[name] is None else f"{row[name]:.3g}" for name in LOSSES)
        before = [_integer(other[task]["frames"])] if report.baseline is not None else []
        rows.append([task, _integer(row["frames"]), share, *losses, *before])
    return columns, rows


def to_markdown(report: Report) -> str:
    """The text of report.md."""
    parts = ["# Evaluation report\n", *(f"**{sentence}**\n" for sentence in words.headline(report))]
    parts += [f"- {label}: {text}" for label, text in words.identity_lines(report)]
    for title, (columns, rows) in (
        ("Tasks", task_table(report)),
        ("Aggregates", aggregate_table(report)),
        ("Change", change_table(report)),
        ("Tasks in full", detail_table(report)),
        ("Budget", budget_table(report)),
    ):
        if rows:
            parts += [f"\n## {title}\n", _markdown_row(columns), _markdown_row(["---"] * len(columns))]
            parts += [_markdown_row(row) for row in rows]
    parts += ["\n## Notes\n", *(f"- {note}" for note in words.notes(report))]
    return "\n".join(parts) + "\n"


def to_csv(report: Report) -> str:
    """The text of report.csv: one row per task, under the names of report.json; empty = not known."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(("task", *CSV_COLUMNS))
    for task, row in task_rows(report).items():
        writer.writerow((task, *("" if row[name] is None else row[name] for name in CSV_COLUMNS)))
    return stream.getvalue()


def make_console(is_terminal: bool) -> Console:
    """A console for standard output; into a file or a pipe it is 100 columns wide and without colours."""
    # Neither markup nor highlighting: names of tasks and folders are printed as they are.
    if is_terminal:
        return Console(markup=False, highlight=False)
    return Console(markup=False, highlight=False, width=100, color_system=None)


def amount(name: str, value: float) -> str:
    """An aggregate with its unit."""
    return f"{value:8.0f} task{'' if value == 1 else 's'}" if name in metrics.COUNTS else f"{value:8.2f} %"


def change_amount(name: str, value: float) -> str:
    """A change over tasks with its unit."""
    return f"{value:8.0f} task{'' if value == 1 else 's'}" if name in compare.CHANGE_COUNTS else f"{value:+8.2f} points"


def _ends_text(name: str, ends: Ends) -> str:
    if ends is None:
        return "-"
    digits = 0 if name in (*metrics.COUNTS, *compare.CHANGE_COUNTS) else 1
    return f"{ends[0]:.{digits}f} to {ends[1]:.{digits}f}"


def _ends(name: str, ends: Ends) -> str:
    if ends is None:
        return ""
    digits = 0 if name in (*metrics.COUNTS, *compare.CHANGE_COUNTS) else 2
    return f"  [{ends[0]:.{digits}f}, {ends[1]:.{digits}f}]"


def _change_ends(report: Report, name: str) -> str:
    return _ends(name, report.change.intervals[name]) if report.change is not None else ""


def _number(value: Any) -> str:
    return "-" if value is None else f"{value:.2f}"


def _integer(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"


def _cell(row: dict[str, Any], name: str) -> str:
    """A value, or `low..high` for a pair of names, or a p-value."""
    if "," in name:
        return _range(*(row[part] for part in name.split(",")))
    value = row[name]
    if name.startswith("p_"):
        return "-" if value is None else f"{value:.2g}"
    return _integer(value) if isinstance(value, int) else _number(value)


def _range(low: float | None, high: float | None) -> str:
    return "-" if low is None or high is None else f"{low:.1f} to {high:.1f}"


def _markdown_row(cells: list[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
