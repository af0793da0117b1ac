"""What a person sees while a run trains: a live bar and table on a terminal, plain lines elsewhere."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn
from rich.table import Table

from launch.records import METRICS, last_line

# More tasks than this do not fit into one plain line: then it names the worst.
TASKS_PER_LINE = 8
READ_SECONDS = 0.5


class Display:
    """Follows RUN/metrics.jsonl.

    Args:
        run_dir: of the run.
        total_frames: the end of the bar.
    """

    def __init__(self, run_dir: Path, total_frames: int) -> None:
        self._path = run_dir / METRICS
        self._total = total_frames
        self._console = Console()
        self._read = 0.0
        self._warned: set[str] = set()
        self._size = self._path.stat().st_size if self._path.exists() else 0
        self._progress = Progress(
            TextColumn("frames"), BarColumn(), TaskProgressColumn(), TextColumn("{task.description}"), console=self._console
        )
        self._bar = self._progress.add_task("starting", total=total_frames)
        self._live = Live(self._progress, console=self._console) if self._console.is_terminal else None
        if self._live is not None:
            self._live.start()

    def update(self) -> None:
        """Show the newest record, if there is a new one."""
        now = time.monotonic()
        if now - self._read < READ_SECONDS:
            return
        self._read = now
        size = self._path.stat().st_size if self._path.exists() else 0
        if size == self._size:
            return
        self._size = size
        record = last_line(self._path)
        if record is None:
            return
        if warning := record.get("warning"):
            self._warn(warning)
        if self._live is None:
            print(plain_line(record, self._total), flush=True)
        else:
            self._progress.update(self._bar, completed=record["frames"], description=_headline(record, self._total))
            self._live.update(Group(self._progress, _table(record)))

    def _warn(self, warning: str) -> None:
        """Once; numbers in it may change."""
        kind = warning.partition(":")[0]
        if kind not in self._warned:
            self._warned.add(kind)
            self._console.print(f"warning: {warning}", highlight=False, soft_wrap=True)

    def close(self) -> None:
        """Show the last record and leave the terminal as it was."""
        self._read = 0.0
        self.update()
        if self._live is not None:
            self._live.stop()


def plain_line(record: Mapping[str, Any], total_frames: int) -> str:
    """One record in one line: how far, how fast, what limits it, and how well each task does."""
    done = f"frames {record['frames']:,} ({100 * record['frames'] / total_frames:.1f}%)"
    return f"{done} | {_headline(record, total_frames)} | {_tasks(record['tasks'])}"


def _headline(record: Mapping[str, Any], total_frames: int) -> str:
    speed, joined = record["frames_per_second"], _joined(record.get("remote"))
    if speed == 0:
        return " | ".join(["waiting for unrolls of the actors", *joined])
    left = duration(max(0, total_frames - record["frames"]) / speed)
    parts = [f"{speed:,.0f} frames/s", f"{left} left", f"limited by {record['limited_by']}"]
    if record.get("samples_per_second", 0) > 1.5 * record["steps_per_second"]:  # of steps, each learned from several times
        parts.insert(1, f"{record['samples_per_second']:,.0f} samples/s learned")
    if "sample_age_versions_mean" in record:
        parts.append(f"age {record['sample_age_versions_mean']:.1f}")
    parts += [f"{record[key]} {key.replace('_', ' ')}" for key in ("skipped_updates", "actor_restarts") if record[key]]
    return " | ".join([*parts, *joined])


def _joined(remote: Mapping[str, Any] | None) -> list[str]:
    """Other machines of a run that listens for them, and what went wrong on the way."""
    if remote is None:
        return []
    refused = remote["unrolls_refused"] + sum(remote["refused"].values())
    counts = {"unrolls lost": remote["unrolls_lost"], "messages refused": refused}
    faults = [f"{count:,} {what}" for what, count in counts.items() if count]
    return [f"{remote['actors']} actors on {remote['machines']} other machines", *faults]


def _tasks(tasks: Mapping[str, Mapping[str, Any]]) -> str:
    if len(tasks) <= TASKS_PER_LINE:
        return ", ".join(f"{name} {_score(numbers)}" for name, numbers in tasks.items())
    scored = {name: n["normalised_percent"] for name, n in tasks.items() if "normalised_percent" in n}
    if not scored:
        return f"no finished episode with a score in {len(tasks)} tasks yet"
    worst = sorted(scored, key=lambda name: scored[name])[:3]
    mean = sum(scored.values()) / len(scored)
    return f"mean {mean:.1f}% of {len(scored)}/{len(tasks)} tasks, worst " + ", ".join(f"{n} {scored[n]:.1f}%" for n in worst)


def _score(numbers: Mapping[str, Any]) -> str:
    if "return_mean" not in numbers:
        return "-"
    percent = f" ({numbers['normalised_percent']:.0f}%)" if "normalised_percent" in numbers else ""
    return f"{numbers['return_mean']:.4g}{percent}"


def _table(record: Mapping[str, Any]) -> Table:
    table = Table(box=None, header_style="bold")
    table.add_column("task")
    for column in ("frames", "share", "episodes", "mean return", "normalised", "entropy"):
        table.add_column(column, justify="right")
    for name, numbers in record["tasks"].items():
        table.add_row(
            name,
            f"{numbers['frames']:,}",
            f"{100 * numbers['share']:.1f}%",
            f"{numbers['episodes']:,}",
            f"{numbers['return_mean']:.4g}" if "return_mean" in numbers else "-",
            f"{numbers['normalised_percent']:.1f}%" if "normalised_percent" in numbers else "-",
            f"{numbers['entropy']:.2f}" if "entropy" in numbers else "-",
        )
    return table


def duration(seconds: float) -> str:
    """`3 d 04 h`, `2 h 05 min`, `3 min 20 s`."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days:,} d {hours:02d} h"
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"
