"""Start a run's processes, watch them, restart dead or silent actors, and end all of them together."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from agent.network import Network
from agent.transport.board import Board, num_parameters
from agent.transport.ring import Ring
from launch.config import RunFiles
from launch.plan import Plan
from launch.process import EXIT_REFUSED, make_memory_folder, remove_folders, scratch_folder
from launch.records import RESTARTS, Lines, read_lines
from launch.status import Status
from launch.training import LEARNER_ROW

PIDS = "pids.json"
POLL_SECONDS = 0.1
# A learner that was told to stop writes its checkpoint in this time, or is killed.
STOP_SECONDS = 13.0
MAX_BACKOFF_SECONDS = 60.0
# An actor that has played before may fail so many times more often: an outage of minutes must not end a run of days.
PATIENCE = 10
FULL_DISK_BYTES = 2**20


@dataclass
class Child:
    """One actor: its process, when it started, what had been committed then, and how often it failed in a row."""

    process: subprocess.Popen[bytes] | None
    started: float
    committed: int
    failures: int
    due: float  # when to start it again, if it has no process


class Supervisor:
    """The parent of all processes of a run.

    Args:
        run_dir: of the run; has its configuration already.
        run, plan: of the run.
        resume: the learner continues from the newest checkpoint.
        overrides: settings changed on this start, for the log.
        interrupts: signals received so far; those of this run are added. The caller's, because one that comes as the run
            ends must still end whatever the caller would start next.
    """

    def __init__(
        self, run_dir: Path, run: RunFiles, plan: Plan, resume: bool, overrides: list[str], interrupts: list[int]
    ) -> None:
        self.run_dir, self.settings, self.plan, self.resume = run_dir, run.config.supervisor, plan, resume
        self._interrupts = interrupts
        self._learner: subprocess.Popen[bytes] | None = None
        self._actors: list[Child] = []
        self._generation = sum(1 for _ in read_lines(run_dir / RESTARTS))
        self._restarts = Lines(run_dir / RESTARTS)
        self._write_restart({"event": "start", "resume": resume, "settings": overrides})

    def run(self, show: Callable[[], None]) -> int:
        """Everything from start to end; `show` is called a few times a second. Returns the exit code of the command."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._interrupt)
        self.memory, self._owner = make_memory_folder(self.run_dir)
        try:
            self._make_memory()
            now = time.monotonic()
            self._learner = self._spawn("learner", ["learner", *(["--resume"] if self.resume else [])])
            for actor in self.plan.actors:
                self._actors.append(Child(None, now, 0, 0, 0.0))
                self._start_actor(actor.index)
            self._write_pids()
            return self._watch(show)
        finally:
            self._kill_all()
            (self.run_dir / PIDS).unlink(missing_ok=True)
            remove_folders(self.memory)
            self._owner.close()
            self._restarts.close()

    def _watch(self, show: Callable[[], None]) -> int:
        assert self._learner is not None
        while True:
            show()
            if self._interrupts:
                return self._stop()
            code = self._learner.poll()
            if code == 0:
                return 0
            if code is not None:
                return self._give_up("the learner", describe_exit(code), "learner")
            if silent := self._silence(LEARNER_ROW, 0.0):
                return self._give_up("the learner", silent, "learner")
            for index in range(len(self._actors)):
                if (failure := self._check_actor(index)) is not None:
                    name = f"actor {index} ({', '.join(self.plan.task_names[t] for t in self.plan.actors[index].tasks)})"
                    return self._give_up(name, failure, f"actor-{index}")
            time.sleep(POLL_SECONDS)

    def _check_actor(self, index: int) -> str | None:
        """Restart the actor if it is dead or silent; returns the reason if the run has to end."""
        child = self._actors[index]
        if child.process is None:
            if time.monotonic() >= child.due:
                self._start_actor(index)
                self._write_pids()
            return None
        committed = self._rings[index].committed
        code = child.process.poll()
        reason = describe_exit(code) if code is not None else self._silence(LEARNER_ROW + 1 + index, child.started)
        if reason is None:
            return None
        _kill_group(child.process)
        child.process = None
        child.failures = 1 if committed > child.committed else child.failures + 1
        detail = last_words(self.run_dir / "logs" / f"actor-{index}.log")
        self._write_restart({"event": "restart", "actor": index, "reason": reason, "last_line": detail})
        if code == EXIT_REFUSED:
            return reason
        limit = self.settings.max_start_failures * (PATIENCE if committed else 1)
        if child.failures >= limit and committed == child.committed:
            return f"{reason}, {child.failures} times in a row without one unroll"
        child.due = time.monotonic() + min(self.settings.backoff_seconds * 2 ** (child.failures - 1), MAX_BACKOFF_SECONDS)
        self._status.restarts += 1
        return None

    def _silence(self, row: int, started: float) -> str | None:
        """Why a process counts as hanging, if it does."""
        heartbeat = self._status.heartbeat(row)
        first = self._status.table()[row, 2] == 0 if row != LEARNER_ROW else heartbeat == 0
        limit = self.settings.start_seconds if first else self.settings.silent_seconds
        since = time.monotonic() - max(heartbeat, started or self._began)
        return f"gave no sign of life for {since:.0f} s" if since > limit else None

    def _start_actor(self, index: int) -> None:
        child = self._actors[index]
        self._status.clear(LEARNER_ROW + 1 + index)
        child.started, child.committed = time.monotonic(), self._rings[index].committed
        arguments = ["actor", "--index", str(index), "--generation", str(self._generation)]
        scratch = scratch_folder(self.memory) / f"actor-{index}"
        shutil.rmtree(scratch, ignore_errors=True)  # of the actor before
        scratch.mkdir(parents=True)
        child.process = self._spawn(f"actor-{index}", arguments, scratch)

    def _spawn(self, name: str, arguments: list[str], scratch: Path | None = None) -> subprocess.Popen[bytes]:
        """A role as a command line, in a process group of its own: Ctrl-C reaches the supervisor only."""
        # -P: a file of the user's in the current folder must not hide one of ours.
        command = [sys.executable, "-P", "-m", "launch.roles", *arguments]
        command += ["--run-dir", str(self.run_dir), "--memory", str(self.memory), "--parent", str(os.getpid())]
        environment = dict(os.environ)
        if scratch is not None:
            environment["TMPDIR"] = str(scratch)
        if arguments[0] == "actor":  # one compute thread: BLAS libraries read these when they are loaded
            environment |= {f"{library}_NUM_THREADS": "1" for library in ("OMP", "OPENBLAS", "MKL")}
        with (self.run_dir / "logs" / f"{name}.log").open("ab") as log:
            return subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, env=environment
            )

    def _make_memory(self) -> None:
        self._began = time.monotonic()
        self._status = Status(self.memory / "status", len(self.plan.actors), len(self.plan.task_names), create=True)
        Board(self.memory / "board", num_parameters(Network(self.plan.network)), create=True)
        self._rings = [
            Ring(self.memory / f"ring-{actor.index}", self.plan.unroll, self.plan.slots, create=True)
            for actor in self.plan.actors
        ]

    def _interrupt(self, number: int, _: FrameType | None) -> None:
        self._interrupts.append(number)

    def _stop(self) -> int:
        """One Ctrl-C or SIGTERM: the learner writes a checkpoint, then everything ends."""
        assert self._learner is not None
        print("\nstopping: writing a checkpoint (once more to stop at once)", file=sys.stderr, flush=True)
        if not self._end_learner():
            print(f"stopped without a checkpoint: see {self.run_dir / 'logs' / 'learner.log'}", file=sys.stderr)
        return 128 + self._interrupts[0]

    def _end_learner(self) -> bool:
        """Let the learner write its checkpoint and end; whether it did. A second interrupt cuts that short."""
        assert self._learner is not None
        for child in self._actors:
            _kill_group(child.process)
        self._learner.terminate()
        deadline = time.monotonic() + STOP_SECONDS
        while self._learner.poll() is None and len(self._interrupts) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        return self._learner.poll() == 0

    def _give_up(self, who: str, why: str, log: str) -> int:
        path = self.run_dir / "logs" / f"{log}.log"
        self._end_learner()
        free = shutil.disk_usage(self.run_dir).free
        full = f" (the disk of {self.run_dir} is full: {free:,} bytes are free)" if free < FULL_DISK_BYTES else ""
        print(f"\n{tail(path)}\nthe run ends: {who} {why}{full}; its log is {path}", file=sys.stderr)
        return 1

    def _kill_all(self) -> None:
        for process in [self._learner, *(child.process for child in self._actors)]:
            _kill_group(process)

    def _write_pids(self) -> None:
        pids = {
            "supervisor": os.getpid(),
            "learner": self._learner.pid if self._learner else None,
            "actors": [child.process.pid if child.process else None for child in self._actors],
            "memory": str(self.memory),
        }
        temporary = self.run_dir / f".{PIDS}.tmp"
        temporary.write_text(json.dumps(pids), encoding="utf-8")
        temporary.replace(self.run_dir / PIDS)

    def _write_restart(self, event: dict[str, Any]) -> None:
        # One more with every line: no start of an actor in the life of the run has the seeds of another.
        self._generation += 1
        self._restarts.write({"time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), **event})


def describe_exit(code: int) -> str:
    """In words."""
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def tail(path: Path, num_bytes: int = 4000) -> str:
    """The end of a log."""
    with path.open("rb") as stream:
        stream.seek(max(0, stream.seek(0, 2) - num_bytes))
        return stream.read().decode("utf-8", "replace").strip()


def last_words(path: Path) -> str:
    """The last line of a log."""
    return (tail(path).splitlines() or [""])[-1]


def _kill_group(process: subprocess.Popen[bytes] | None) -> None:
    """Kill a role and whatever it started, and wait for it."""
    if process is None:
        return
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()
