"""Faults of what needs a run of its own: rows of the table of tests/faults.py."""

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import psutil

import runs
import standin
from agent import checkpoint
from fault_ledger import Books, engine_check
from fault_rows import end_learner
from fault_runs import ENDLESS, QUIET, Broken, NotRun, Result, Run, numbered_run
from fault_shop import Row, Shop, enter
from tasks.contract import ENGINE_COUNTS

GAME_SECONDS = 2
DISK_BYTES = 200 * 2**20
LEFT_BYTES = 300_000


def engines_killed(shop: Shop, result: Result) -> None:
    """Environments that are processes: DeepMind Lab's stand-in."""
    if standin.IS_REAL:
        raise NotRun("needs the engine's stand-in, the real engine is installed")
    arguments = [
        "--suite", "dmlab30", "--tasks", "lasertag_one_opponent_small", ENDLESS, "environment.probe=false", *QUIET,
        "environment.dmlab.level_cache=none", f"environment.dmlab.engine.episodeLengthSeconds={GAME_SECONDS}",
        "environment.dmlab.width=32", "environment.dmlab.height=24", "actor.num_actors=1", "actor.num_envs=2",
        "actor.unroll_length=10", "learner.batch_size=2", "network.torso=small", "debug.dump_unrolls=1000000",
    ]  # fmt: skip
    run = Run(shop.folder / "engines", arguments, engine_check(GAME_SECONDS), standin.environment())
    try:
        run.start()
        actor = psutil.Process(run.pids()["actors"][0])
        for number in range(1, result.times + 1):
            time.sleep(shop.random.uniform(0, 0.5))
            engines = [child for child in actor.children() if "tasks.engine_worker" in child.cmdline()]
            moment = time.monotonic()
            shop.random.choice(engines).kill()
            run.wait(lambda number=number: restarted(run) >= number)
            committed = run.rings[0].committed
            run.wait(lambda committed=committed: run.rings[0].committed > committed)
            result.seconds.append(time.monotonic() - moment)
        result.found["restarts"] = restarted(run)
        result.expect(restarted(run) == result.times, f"{restarted(run)} engines were replaced")
        result.expect(actor.is_running() and not run.restarts(), "the actor did not live on")
        run.interrupt()
    finally:
        run.kill()
    enter(result, run.books()[0])


def restarted(run: Run) -> int:
    """Engines replaced so far."""
    return int(run.status.engine_totals()[:, ENGINE_COUNTS.index("engine_restarts")].sum())


def inference_killed(shop: Shop, result: Result) -> None:
    """The process that answers all actors: each request is answered once, by it or by its successor."""
    run = numbered_run(shop.folder / "inference", shop.seed, "actor.inference=batched")
    try:
        actors = run.start().pids()["actors"]
        for _ in range(result.times):
            time.sleep(shop.random.uniform(0, 0.5))
            pid, moment = run.wait(lambda: run.pids()["workers"]["inference"]), time.monotonic()
            os.kill(pid, signal.SIGKILL)
            run.wait(lambda pid=pid: run.pids()["workers"]["inference"] not in (pid, None))
            committed = [ring.committed for ring in run.rings]
            run.wait(
                lambda committed=committed: all(
                    r.committed > before + 8 for r, before in zip(run.rings, committed, strict=True)
                )
            )
            result.seconds.append(time.monotonic() - moment)
        result.found["restarts"] = len(run.restarts())
        result.expect(run.pids()["actors"] == actors, "actors were replaced")
        result.expect(run.restarts() == ["was killed by SIGKILL"] * result.times, f"restarts: {run.restarts()}")
        run.interrupt()
    finally:
        run.kill()
    enter(result, run.books()[0])


def ranks_killed(shop: Shop, result: Result) -> None:
    """One of two learners: the run ends and names it, and the resume has all that the checkpoint counts."""
    arguments = ["--suite", "toy", "--tasks", "catch,memory", ENDLESS, *QUIET, "checkpoint.every_seconds=1", "learner.ranks=2"]
    run = Run(shop.folder / "ranks", [*arguments, "actor.num_actors=2", "actor.num_envs=8", "learner.batch_size=8"], None)

    def kill(number: int) -> None:
        time.sleep(shop.random.uniform(0, 1.0))
        end_learner(run, result, (number + 1) % 2)

    end_and_resume(run, result, kill)


def end_and_resume(run: Run, result: Result, end: Callable[[int], None]) -> None:
    """A run that `end` ends once it has a checkpoint, again and again, each time resumed; and its games."""
    try:
        for number in range(result.times):
            run.start()
            run.wait(lambda: checkpoint.exists(run.run_dir))
            end(number)
            moment = time.monotonic()
            run.start()
            result.seconds.append(time.monotonic() - moment)
        run.interrupt()
        enter(result, games_of(run, result))
    finally:
        run.kill()


def games_of(run: Run, result: Result) -> Books:
    """episodes.jsonl against the checkpoint, where unrolls are not dumped."""
    counters = checkpoint.load(run.run_dir)["counters"]
    result.found["games"] = len(runs.lines(run.run_dir / "episodes.jsonl"))
    beyond = result.found["games"] - counters["episodes"]
    return Books(lines_twice=max(0, beyond), lines_missing=max(0, -beyond))


def disk_full(shop: Shop, result: Result) -> None:
    """A file system of its own, filled until a checkpoint does not fit."""
    disk = shop.folder / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "none", str(disk)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
        raise NotRun("needs root, and the right to mount a file system")
    arguments = ["--suite", "toy", "--tasks", "catch", ENDLESS, *QUIET, "checkpoint.every_seconds=1"]
    run = Run(disk, [*arguments, "actor.num_actors=1", "actor.num_envs=8", "network.core_size=256"], None)
    try:
        end_and_resume(run, result, lambda _: fill(disk, run, result))
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def fill(disk: Path, run: Run, result: Result) -> None:
    """Keep the disk full until the run ends with the reason and the checkpoint before whole; then free the space again."""
    assert run.process is not None
    frames = checkpoint.load(run.run_dir)["counters"]["frames"]
    size, deadline = 0, time.monotonic() + 120
    with (disk / "filler").open("wb") as filler:
        while run.process.poll() is None:
            free = os.statvfs(disk)
            more = free.f_bavail * free.f_frsize - LEFT_BYTES
            try:
                if more > 0:
                    os.posix_fallocate(filler.fileno(), size, more)
                    size += more
            except OSError:  # the learner was quicker
                pass
            if time.monotonic() > deadline:
                raise Broken("the run went on for 120 s with a full disk")
            time.sleep(0.02)
    text = run.output()
    for words in ("cannot write", "the checkpoint before it is whole", "the disk of"):
        result.expect(words in text, f"the message lacks {words!r}: {run.last_words()}")
    result.expect(run.process.returncode == 1, f"it ended with exit code {run.process.returncode}")
    result.expect(checkpoint.load(run.run_dir)["counters"]["frames"] >= frames, "the checkpoint went back")
    (disk / "filler").unlink()
    run.end()


OWN_ROWS = (
    Row(
        "engines killed", engines_killed, "kill -9 of an environment's process",
        "replaced; its game counts for nothing; the actor lives", 2, 30, shared="",
    ),
    Row(
        "inference killed", inference_killed, "kill -9 of the inference process",
        "replaced; actors live, each request is answered once", 2, 30, shared="",
    ),
    Row(
        "rank killed", ranks_killed, "kill -9 of one of two learner ranks, then --resume",
        "the run ends, names the rank; checkpoint whole, games exact", 1, 20, shared="",
    ),
    Row(
        "disk full", disk_full, "disk full during a save, freed, then --resume",
        "ends with the reason; the checkpoint before is whole", 1, 5, shared="",
    ),
)  # fmt: skip
