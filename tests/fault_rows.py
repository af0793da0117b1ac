"""Faults of a run on one machine: rows of the table of tests/faults.py."""

import os
import signal
import time
from pathlib import Path

import psutil

import runs
from agent import checkpoint
from fault_runs import Result, Run, nothing_left
from fault_shop import Row, Shop


def actors_killed(shop: Shop, result: Result) -> None:
    """Half of them at any moment, half as they hand over unrolls."""
    run = shop.shared()
    known, waiting = len(run.restarts()), {}
    for number in range(result.times):
        target = sum(ring.committed for ring in run.rings) + shop.random.randrange(1, 60)
        while sum(ring.committed for ring in run.rings) < target or len(waiting) == len(run.rings):
            look(run, waiting, result)
        if number % 2:
            time.sleep(shop.random.uniform(0, 0.1))
        actor = shop.random.choice([i for i in range(len(run.rings)) if i not in waiting])
        pid = run.wait(lambda actor=actor: run.pids()["actors"][actor], pause=0.001)
        os.kill(pid, signal.SIGKILL)
        waiting[actor] = time.monotonic(), pid, -1
    while waiting:
        look(run, waiting, result)
    reasons = run.restarts()[known:]
    result.found["restarts"] = len(reasons)
    result.expect(reasons == ["was killed by SIGKILL"] * result.times, f"restarts: {reasons}")


def look(run: Run, waiting: dict[int, tuple[float, int, int]], result: Result) -> None:
    """Note which replaced actors send unrolls again. waiting: actor -> moment, process id, unrolls committed by the dead."""
    for actor, (moment, pid, committed) in list(waiting.items()):
        if committed < 0:
            if not psutil.pid_exists(pid):
                waiting[actor] = moment, pid, run.rings[actor].committed
        elif run.rings[actor].committed > committed:
            result.seconds.append(time.monotonic() - moment)
            del waiting[actor]
    run.wait(lambda: True)  # it lives
    time.sleep(0.0005)


def actors_stopped(shop: Shop, result: Result) -> None:
    """Each hangs while the others work."""
    run = shop.shared()
    known = len(run.restarts())
    for _ in range(result.times):
        actor = shop.random.randrange(len(run.rings))
        pid, moment, updates = run.pids()["actors"][actor], time.monotonic(), run.board.version()
        os.kill(pid, signal.SIGSTOP)
        waiting = {actor: (moment, pid, -1)}
        while waiting:
            look(run, waiting, result)
        result.expect(run.board.version() > updates, "training stood still")
    reasons = run.restarts()[known:]
    result.found["restarts"] = len(reasons)
    silent = [reason for reason in reasons if reason.startswith("gave no sign of life")]
    result.expect(len(silent) == len(reasons) == result.times, f"restarts: {reasons}")


def learners_killed(shop: Shop, result: Result) -> None:
    """At any moment; then the run is resumed."""
    for _ in range(result.times):
        run = shop.shared()
        time.sleep(shop.random.uniform(1.0, 2.5))
        end_learner(run, result)
        moment = time.monotonic()
        shop.shared()
        result.seconds.append(time.monotonic() - moment)


def end_learner(run: Run, result: Result, rank: int | None = None) -> None:
    """kill -9: the run ends with the reason, leaves nothing, and its checkpoint is whole."""
    assert run.process is not None
    supervisor, name = run.process.pid, "the learner" if rank is None else f"learner rank {rank}"
    os.kill(run.pids()["learners"][rank or 0], signal.SIGKILL)
    code = run.process.wait(120)
    told = f"{name} was killed by SIGKILL" in run.output()
    result.expect((code, told) == (1, True), f"it ended with {code}: {run.last_words()}")
    if checkpoint.exists(run.run_dir):
        checkpoint.load(run.run_dir)  # ValueError if it is damaged or has another hash
    run.end()
    runs.assert_nothing_left(run.run_dir, supervisor)


def supervisors_killed(shop: Shop, result: Result) -> None:
    """Children and mapped files have to go by themselves; then the run is resumed."""
    gone = []
    for _ in range(result.times):
        run = shop.shared()
        time.sleep(shop.random.uniform(0.0, 1.0))
        run.wait(lambda: True)  # it lives
        assert run.process is not None
        moment = time.monotonic()
        run.process.kill()
        result.expect(run.process.wait(60) == -signal.SIGKILL, "the supervisor had ended before")
        gone.append(nothing_left(run, 10))
        run.end()
        shop.shared()
        result.seconds.append(time.monotonic() - moment)
    result.found["slowest_end_seconds"] = round(max(gone), 1)


def saves_killed(shop: Shop, result: Result) -> None:
    """At random points from the first byte of a checkpoint to the removal of the oldest."""
    points: dict[str, int] = {}
    for _ in range(result.times):
        run = shop.shared()
        folder = run.run_dir / checkpoint.FOLDER
        length = save_seconds(run, folder)
        before = checkpoint.load(run.run_dir)["counters"]["frames"]
        run.wait(lambda folder=folder: temporary(folder), pause=0.0)
        time.sleep(shop.random.uniform(0, 1.1 * length))
        end_learner(run, result)
        point = where(folder)
        points[point] = points.get(point, 0) + 1
        after = checkpoint.load(run.run_dir)["counters"]["frames"]  # ValueError if it is damaged or has another hash
        result.expect(after >= before, f"the newest checkpoint went back from {before} to {after} frames")
        moment = time.monotonic()
        shop.shared()
        result.seconds.append(time.monotonic() - moment)
    result.found["killed"] = points


def temporary(folder: Path) -> list[str]:
    """Names of files being written."""
    return [name for name in os.listdir(folder) if name.endswith(".tmp")]  # noqa: PTH208 (the quickest)


def save_seconds(run: Run, folder: Path) -> float:
    """How long a save takes, from its first file to the new pointer."""
    run.wait(lambda: checkpoint.exists(run.run_dir))
    pointer = (folder / checkpoint.LATEST).read_bytes()
    run.wait(lambda: temporary(folder), pause=0.0)
    began = time.monotonic()
    run.wait(lambda: (folder / checkpoint.LATEST).read_bytes() != pointer, pause=0.0)
    return time.monotonic() - began


def where(folder: Path) -> str:
    """At which point of a save its process died."""
    for name in temporary(folder):
        return "in the pointer" if checkpoint.LATEST in name else "in the file"
    newest = max(folder.glob("checkpoint-*.pt"))
    return "after the pointer" if checkpoint.find(folder) == newest else "before the pointer"


LOCAL_ROWS = (
    Row(
        "actors killed", actors_killed, "kill -9 of an actor, half of them as it hands over unrolls",
        "replaced; what it committed reaches the learner", 2, 100,
    ),
    Row("actors stopped", actors_stopped, "SIGSTOP of an actor", "replaced after silent_seconds; the others train on", 1, 10),
    Row(
        "learner killed", learners_killed, "kill -9 of the learner, then --resume",
        "counters, games and parameters are those of the checkpoint", 1, 20,
    ),
    Row(
        "supervisor killed", supervisors_killed, "kill -9 of the supervisor, then --resume",
        "nothing is left after 10 s; the resume works", 1, 20,
    ),
    Row(
        "save killed", saves_killed, "kill -9 of the learner during a save, then --resume",
        "the checkpoint pointed to is whole and never older", 1, 30,
    ),
)  # fmt: skip
