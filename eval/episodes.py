"""Reads a run's episodes.jsonl, millions of lines, also while the run still writes it."""

import json
import math
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from tasks.suite import Suite

CHUNK_BYTES = 1 << 22


@dataclass
class Columns:
    """Finished games of one task, oldest first, as arrays [n]: raw return, environment frames of the game, frames of
    the whole run and seconds of training when it ended (NaN where not recorded). 24 bytes a game."""

    returns: Any = field(default_factory=lambda: array("d"))
    frames: Any = field(default_factory=lambda: array("i"))
    total_frames: Any = field(default_factory=lambda: array("q"))
    seconds: Any = field(default_factory=lambda: array("f"))


def read_columns(path: Path, suite: Suite, dropped: Sequence[str] = ()) -> dict[str, Columns]:
    """All finished games per task of the suite, as NumPy arrays; games of `dropped` tasks are passed over.

    The last line of a run may still be being written and is then left out. Any other line that is not an episode of
    this suite is a ValueError naming the line: a score must not skip what it cannot read. No file, as in a run that
    has just started, is no episode.
    """
    columns = {task: Columns() for task in suite.task_names}
    for first, rows in _chunks(path):
        numbered: Iterable[tuple[int, Any]] = enumerate(rows, first)
        if dropped:
            numbered = [(n, row) for n, row in numbered if not (isinstance(row, dict) and row.get("task") in dropped)]
            rows = [row for _, row in numbered]
        try:
            _append(columns, suite, rows)
        except (ValueError, LookupError, TypeError, OverflowError):
            for number, row in numbered:
                _check(row, f"line {number} of {path}", suite)
            raise
    for column in columns.values():
        for name, kind in (("returns", "f8"), ("frames", "i4"), ("total_frames", "i8"), ("seconds", "f4")):
            setattr(column, name, np.frombuffer(getattr(column, name), kind))
    return columns


def _chunks(path: Path) -> Iterator[tuple[int, list[Any]]]:
    """Number of the first line, and the rows, of some megabytes of whole lines at a time."""
    if not path.exists():
        return
    number, rest = 1, b""
    with path.open("rb") as stream:
        while block := stream.read(CHUNK_BYTES):
            whole, newline, rest = (rest + block).rpartition(b"\n")
            if not newline:
                continue
            count = whole.count(b"\n") + 1
            try:
                # One call for all lines is several times faster than one each.
                rows = orjson.loads(b"[" + whole.replace(b"\n", b",") + b"]")
            except ValueError:
                rows = []
            if len(rows) != count:
                rows = [_parse(line, f"line {i} of {path}") for i, line in enumerate(whole.split(b"\n"), number)]
            yield number, rows
            number += count


def _parse(line: bytes, where: str) -> Any:
    try:
        return json.loads(line)
    except ValueError as error:
        raise ValueError(f"{where} is damaged ({error}): remove it") from error


def _append(columns: dict[str, Columns], suite: Suite, rows: list[Any]) -> None:
    """Add rows to the columns of their tasks, all or none; raises where one is no episode, without saying which."""
    index = {task: i for i, task in enumerate(suite.task_names)}
    tasks = np.array([index[row["task"]] for row in rows], np.int32)
    raw = [row["return"] for row in rows]
    if not set(map(type, raw)) <= {int, float}:  # NumPy would take true and "3" for numbers
        raise TypeError
    returns = np.array(raw, np.float64)
    frames = np.array([row["frames"] for row in rows], np.int32)
    total_frames = np.array([row["total_frames"] for row in rows], np.int64)
    seconds = np.array([row.get("seconds", math.nan) for row in rows], np.float32)
    if not np.isfinite(returns).all():
        raise ValueError
    for task, i in index.items():
        mine = tasks == i
        if mine.any():
            column = columns[task]
            for target, values in (
                (column.returns, returns),
                (column.frames, frames),
                (column.total_frames, total_frames),
                (column.seconds, seconds),
            ):
                target.frombytes(values[mine].tobytes())


def _check(row: Any, where: str, suite: Suite) -> None:
    """Raise the ValueError that says what is wrong with a row, if it is no episode of the suite."""
    try:
        task, value = row["task"], float(row["return"])
        known = task in suite.task_names
        np.int32(row["frames"]), np.int64(row["total_frames"]), float(row.get("seconds", 0.0))
    except (ValueError, LookupError, TypeError, OverflowError, AttributeError) as error:
        raise ValueError(f"{where} is no episode: {row!r}: remove it") from error
    if type(row["return"]) not in (int, float):
        raise ValueError(f"{where}: the return of {task} is {row['return']!r}, no number: remove it")
    if not known:
        raise ValueError(f"{where}: suite {suite.name} has no task {task!r}: remove it")
    if not math.isfinite(value):
        raise ValueError(f"{where}: the return of {task} is {value}: remove it")
