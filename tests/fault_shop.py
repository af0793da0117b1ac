"""The table of faults: its rows, the runs that they share, and who answers for what. Used by tests/faults.py."""

import json
import random
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

from fault_ledger import Books
from fault_runs import Broken, NotRun, Result, Run, numbered_run

FAILURES = (Broken, AssertionError, OSError, ValueError, psutil.Error, subprocess.SubprocessError)


class Shop:
    """What rows work with: a folder, random moments, and runs that several rows may share, by name.

    A row that used a shared run gets its books when that run is over: `settle`.
    """

    def __init__(self, folder: Path, seed: int, share: bool) -> None:
        self.folder, self.seed, self.share = folder, seed, share
        self.random = random.Random(seed)
        self._shared: dict[str, Run] = {}
        self._count = 0
        self._open: list[tuple[Result, str, range]] = []

    def shared(self, name: str = "local", make: Callable[[Path], Run] | None = None) -> Run:
        """The run of that name, alive; by default the numbered one on this machine."""
        if name not in self._shared:
            self._count += 1
            folder = self.folder / f"{name}-{self._count}"
            self._shared[name] = make(folder) if make else numbered_run(folder, self.seed)
        return self._shared[name].start()

    def play(self, row: "Row", times: int) -> Result:
        """One row; whatever it meets becomes its result."""
        result = Result(row.done, times, row.promised)
        first = len(self._shared[row.shared].lives) if row.shared in self._shared else 0
        try:
            row.play(self, result)
        except NotRun as reason:
            result.not_run = str(reason)
        except FAILURES as error:
            result.broken.append(f"{type(error).__name__}: {error}")
        if (run := self._shared.get(row.shared)) is not None:
            self._open.append((result, row.shared, range(first, len(run.lives) + (run.process is not None))))
            if result.broken:
                run.kill()  # rows to come get another
                self._enter(row.shared, "")
            elif not self.share:
                self.settle(row.shared)
        return result

    def settle(self, name: str) -> None:
        """End a shared run, if it is there, and enter its books into the rows that used it."""
        if name not in self._shared:
            return
        complaint = ""
        try:
            self._shared[name].start().interrupt()
        except FAILURES as error:
            complaint = f"the run could not be resumed and stopped in the end: {error}"
            self._shared[name].kill()
        self._enter(name, complaint)

    def abandon(self) -> None:
        """Leave nothing behind, whatever happened."""
        for run in self._shared.values():
            run.kill()

    def _enter(self, name: str, complaint: str) -> None:
        run = self._shared.pop(name)
        books = run.books() if run.lives else []
        games = books[-1] if books else Books()
        for result, lives in [(result, lives) for result, user, lives in self._open if user == name]:
            total = sum((books[i] for i in lives if i < len(books)), Books())
            total.lines_twice, total.lines_missing = games.lines_twice, games.lines_missing
            enter(result, total)
            result.expect(not complaint, complaint)
        self._open = [one for one in self._open if one[1] != name]


def enter(result: Result, books: Books) -> None:
    """Books into a row."""
    result.found = {**vars(books), **result.found}
    result.broken += books.faults()


@dataclass(frozen=True)
class Row:
    """play: changes a result. short, long: how often. shared: name of the shop's run that it uses, or nothing."""

    name: str
    play: Callable[[Shop, Result], None]
    done: str
    promised: str
    short: int
    long: int
    shared: str = "local"


def as_json(results: dict[str, Result]) -> str:
    """All of the table."""
    return json.dumps({name: {**vars(result), "verdict": result.verdict()} for name, result in results.items()}, indent=1)
