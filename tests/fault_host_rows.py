"""Faults of the machine around a run, and of its other users: rows of the table of tests/faults.py."""

import os
import signal
import time
from pathlib import Path

import runs
from fault_runs import Result, Run, numbered_run
from fault_shop import Row, Shop
from launch import screen
from launch.process import OWNER, PREFIX, memory_root

HOST = "host"
SILENT_SECONDS = 10
# Shows one line, and then there is nobody to read any more.
ONE_LINE = ("bash", "-c", 'exec "$@" > >(head -n 1) 2>&1', "bash")
NOBODY = 65534


def make(folder: Path, seed: int) -> Run:
    """The usual one, before one line of output."""
    return numbered_run(folder, seed, silent_seconds=SILENT_SECONDS, prefix=ONE_LINE)


def trap_laid(shop: Shop, result: Result) -> None:
    """Somebody else's folder among those that a start tidies up, with links to files of ours."""
    for number in range(result.times):
        (victim := shop.folder / f"victim-{number}").write_text("precious")
        (evil := memory_root() / f"{PREFIX}0-1-evil-{os.getpid()}-{number}").mkdir()
        try:
            (evil / OWNER).symlink_to(victim)
            os.utime(evil, (0, 0))
            if os.geteuid() == 0:
                os.chown(evil, NOBODY, NOBODY)
            moment = time.monotonic()
            run = shop.shared(HOST, lambda folder: make(folder, shop.seed))
            result.seconds.append(time.monotonic() - moment)
            run.wait(lambda: True)  # it lives
            result.expect(victim.read_text() == "precious", "a file of ours was written to")
            result.expect((evil / OWNER).is_symlink(), "a folder of another user was touched")
        finally:
            (evil / OWNER).unlink(missing_ok=True)
            evil.rmdir()


def screen_gone(shop: Shop, result: Result) -> None:
    """The pipe of the output is closed."""
    for _ in range(result.times):
        run = shop.shared(HOST, lambda folder: make(folder, shop.seed))
        moment = time.monotonic()
        notes = run.run_dir / "logs" / screen.LOG
        run.wait(lambda notes=notes: notes.exists() and "Broken pipe" in notes.read_text())
        updates = run.board.version()
        run.wait(lambda updates=updates, run=run: run.board.version() > updates + 5)
        result.seconds.append(time.monotonic() - moment)


def paused(shop: Shop, result: Result) -> None:
    """Every process, for longer than any may be silent; the supervisor wakes first."""
    for _ in range(result.times):
        run = shop.shared(HOST, lambda folder: make(folder, shop.seed))
        known = run.restarts()
        assert run.process is not None
        supervisor = run.process.pid
        pids = run.pids()
        roles = [*pids["learners"], *pids["actors"]]
        updates = run.board.version()
        result.expect(all(runs.send(pid, signal.SIGSTOP) for pid in (supervisor, *roles)), "somebody was gone before")
        time.sleep(SILENT_SECONDS + 2)
        moment = time.monotonic()
        runs.send(supervisor, signal.SIGCONT)
        time.sleep(0.5)
        for pid in roles:
            runs.send(pid, signal.SIGCONT)
        run.wait(lambda updates=updates, run=run: run.board.version() > updates + 5)
        result.seconds.append(time.monotonic() - moment)
        result.expect(run.restarts() == known, f"restarts: {run.restarts()}")


HOST_ROWS = (
    Row(
        "trap laid", trap_laid, "a folder of another user with a link to a file of ours, where a start tidies up",
        "neither is touched", 1, 3, HOST,
    ),
    Row("screen gone", screen_gone, "the pipe that shows the run is closed", "it trains on, a log says why", 1, 3, HOST),
    Row("run paused", paused, "all processes stopped longer than silent_seconds", "all go on, nobody is replaced", 1, 5, HOST),
)  # fmt: skip
