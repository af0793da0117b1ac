"""Run within the container, where a training run is going on: kill its actors, leave orphans, count what is not reaped.

podman exec -i NAME python - RUN_DIR KILLS < tests/docker/inside.py      RUN_DIR - = only the orphans
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

ORPHANS = 50


def zombies() -> int:
    """Processes that have ended and that nobody has waited for."""
    return sum(process.info["status"] == psutil.STATUS_ZOMBIE for process in psutil.process_iter(["status"]))


def actors(run_dir: Path) -> list[int]:
    """Process ids of the actors that are there now."""
    return [pid for pid in json.loads((run_dir / "pids.json").read_text(encoding="utf-8"))["workers"].values() if pid]


def kill(run_dir: Path, kills: int) -> None:
    """Kill so many actors with -9, each after the supervisor has started it anew."""
    killed: set[int] = set()
    deadline = time.monotonic() + 300
    while len(killed) < kills:
        assert time.monotonic() < deadline, f"only {len(killed)} of {kills} actors came back to be killed"
        for pid in set(actors(run_dir)) - killed:
            os.kill(pid, signal.SIGKILL)
            killed.add(pid)
        time.sleep(0.2)
    while set(actors(run_dir)) & killed:
        time.sleep(0.1)


def main() -> None:
    """Print what was done and found, as JSON."""
    run_dir, kills = sys.argv[1], int(sys.argv[2])
    if run_dir != "-":
        kill(Path(run_dir), kills)
    # Each is left by its parent at once: process 1 inherits it and has to wait for it.
    subprocess.run(["sh", "-c", f"for i in $(seq {ORPHANS}); do (sleep 0.2 &); done"], check=True)
    time.sleep(3)
    first = Path("/proc/1/cmdline").read_text(encoding="utf-8").split("\0")[0]
    print(json.dumps({"killed": kills, "orphans": ORPHANS, "zombies": zombies(), "first": first}))


main()
