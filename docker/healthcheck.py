"""Docker's HEALTHCHECK: each training run in the container has written to its metrics.jsonl lately. Without one: healthy."""

import sys
import time
from pathlib import Path

import psutil

COMMAND = "launch/multitask.py"
# The learner writes every log.every_seconds; a first unroll may take as long as supervisor.start_seconds allows.
MAX_AGE_SECONDS = 300.0


def runs() -> list[Path]:
    """Folders of the runs that are going on: a run holds its lock open."""
    found = []
    for process in psutil.process_iter():
        try:
            if any(part.endswith(COMMAND) for part in process.cmdline()):
                found += [Path(file.path).parent for file in process.open_files() if Path(file.path).name == "lock"]
        except psutil.Error:  # ended meanwhile, or another user's
            continue
    return found


def age_seconds(run_dir: Path) -> float:
    """Since the last line of metrics or, before the first, since the start."""
    files = [file for file in (run_dir / "metrics.jsonl", run_dir / "lock") if file.exists()]
    return time.time() - max(file.stat().st_mtime for file in files)


def main() -> int:
    """Exit code 1 names each run that stands still."""
    ages = {run_dir: age_seconds(run_dir) for run_dir in runs()}
    late = [f"{run_dir} has written nothing for {age:.0f} s" for run_dir, age in ages.items() if age > MAX_AGE_SECONDS]
    print("; ".join(late) or f"{len(ages)} runs, all moving")
    return 1 if late else 0


if __name__ == "__main__":
    sys.exit(main())
