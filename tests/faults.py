"""Play faults against real runs, and print what was done, how often, and what was lost.

`python tests/faults.py` is the short form (CI), `--long` the one for a night; exit code 1 if a promise did not hold.
"""

import argparse
import signal
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

from fault_host_rows import HOST_ROWS
from fault_ledger import FAULTS
from fault_own_rows import OWN_ROWS
from fault_remote_rows import REMOTE_ROWS
from fault_rows import LOCAL_ROWS
from fault_runs import Result
from fault_shop import Shop, as_json

ROWS = (*LOCAL_ROWS, *HOST_ROWS, *OWN_ROWS, *REMOTE_ROWS)
LEGEND = """\
consumed = unrolls that the learner took; kept = those that the checkpoint counts; rolled back = consumed after the last
checkpoint of a learner that was killed; unread = committed when the learner was gone. Of other machines, dropped = while they
could not reach the run, counted there; waiting = still there when they left. lost = committed to a learner that lived, or
counted by a checkpoint, and not there. Rows that share a run share its unrolls."""


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="faults.py", description=__doc__)
    parser.add_argument("--long", action="store_true", help="many repeats, a run of its own for each row")
    parser.add_argument("--only", metavar="ROW,...", help=f"rows: {', '.join(row.name for row in ROWS)}")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there as well")
    parser.add_argument("--seed", type=int, default=0, help="of the random moments")
    options = parser.parse_args()
    names = options.only.split(",") if options.only else [row.name for row in ROWS]
    if unknown := sorted(set(names) - {row.name for row in ROWS}):
        parser.error(f"--only {options.only}: there is no row {unknown[0]!r}, use {', '.join(row.name for row in ROWS)}")
    results: dict[str, Result] = {}
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        shop = Shop(Path(folder), options.seed, share=not options.long)
        try:
            for row in (rows := [row for row in ROWS if row.name in names and (row.long if options.long else row.short)]):
                print(f"{row.name} ...", file=sys.stderr, flush=True)
                results[row.name] = shop.play(row, row.long if options.long else row.short)
                if row.shared not in [other.shared for other in rows[rows.index(row) + 1 :]]:
                    shop.settle(row.shared)
        finally:
            shop.abandon()
    if options.json:
        options.json.write_text(as_json(results), encoding="utf-8")
    show(results)
    return int(any(result.verdict() == "BROKEN" for result in results.values()))


def show(results: dict[str, Result]) -> None:
    """The table."""
    table = Table(title="Faults against real runs", show_lines=True)
    for heading in ("row", "what was done", "times", "promised", "found", "recovery, s (median / max)", "verdict"):
        table.add_column(heading)
    for name, result in results.items():
        table.add_row(
            name, result.done, str(result.times), result.promised, what_was_found(result), result.recovery(), result.verdict()
        )
    console = Console(width=None if sys.stdout.isatty() else 160)
    console.print(table)
    console.print(LEGEND)


def what_was_found(result: Result) -> str:
    """In words; what is 0 is left out where it may be anything."""
    words = [f"{key.replace('_', ' ')} {value}" for key, value in result.found.items() if value and key not in FAULTS]
    clean = not any(result.found.get(key) for key in FAULTS)
    if result.found.get("committed"):
        words += ["none torn, doubled or lost; frames and games exact"] * clean
    elif not result.not_run:
        words += ["games exact"] * clean
    return "\n".join(filter(None, [", ".join(words), *result.broken, result.not_run]))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # as Ctrl-C: tidy up
    sys.exit(main())
