"""Docker's HEALTHCHECK: each training run in the container has written to its metrics.jsonl lately. Without one: healthy."""

import sys
import time
from pathlib import Path

import psutil
import yaml

COMMAND = "launch/multitask.py"
# Metrics come every few seconds, but not from a learner that waits for actors whose engines build maps.
SLACK_SECONDS = 60.0


def runs() -> dict[Path, float]:
    """Folder of each run that is going on, which holds its lock open -> when it was started, seconds since the epoch."""
    found = {}
    for process in psutil.process_iter():
        try:
            if any(part.endswith(COMMAND) for part in process.cmdline()):
                folders = [Path(file.path).parent for file in process.open_files() if Path(file.path).name == "lock"]
                # A series of single tasks holds the locks of all its runs, one of which is going on.
                found |= {folder: process.create_time() for folder in folders if (folder / "pids.json").exists()}
        except psutil.Error:  # ended meanwhile, or another user's
            continue
    return found


def overdue_seconds(run_dir: Path, started: float) -> float:
    """For how long the run has written nothing beyond what its own supervisor allows; negative: it moves."""
    settings = yaml.safe_load((run_dir / "config.yaml").read_text(encoding="utf-8"))["supervisor"]
    metrics = run_dir / "metrics.jsonl"
    written = metrics.stat().st_mtime if metrics.exists() else 0.0
    # A resumed run has metrics from before.
    allowed = settings["silent_seconds"] if written > started else settings["start_seconds"]
    return time.time() - max(written, started) - allowed - SLACK_SECONDS


def main() -> int:
    """Exit code 1 names each run that stands still."""
    overdue = {run_dir: overdue_seconds(run_dir, started) for run_dir, started in runs().items()}
    late = [f"{run_dir} should have written metrics {seconds:.0f} s ago" for run_dir, seconds in overdue.items() if seconds > 0]
    print("; ".join(late) or f"{len(overdue)} runs, all moving")
    return 1 if late else 0


if __name__ == "__main__":
    sys.exit(main())
