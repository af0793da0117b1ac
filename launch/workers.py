"""Workers: roles that are replaced when they die or hang (actors and services), each started as a command line."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from launch.config import SupervisorSettings
from launch.process import EXIT_REFUSED, EXIT_STOPPED, scratch_folder
from launch.records import RESTARTS, Lines, read_lines
from launch.status import FIELDS, Status

PIDS = "pids.json"
MAX_BACKOFF_SECONDS = 60.0
# A worker that has worked before may fail so many times more often: an outage of minutes must not end a run of days.
PATIENCE = 10
# Share of silent_seconds. After a longer gap between two looks at the processes this one was asleep, and so were they.
ASLEEP = 0.25


@dataclass
class Worker:
    """One role: what it is, and how it fares.

    Attributes:
        name: of its log, such as `actor-3`.
        title: for people.
        arguments: of launch.roles; `--generation` is added.
        row: of the status table. Its field `steps` is 0 until the role has begun to work.
        progress: a number that grows as the role works: failures are in a row while it does not.
        record: what stands in restarts.jsonl.
    """

    name: str
    title: str
    arguments: tuple[str, ...]
    row: int
    progress: Callable[[], int]
    record: dict[str, Any]
    process: subprocess.Popen[bytes] | None = None
    started: float = 0.0
    before: int = 0  # progress when it started
    failures: int = 0
    due: float = 0.0  # when to start it again, if it has no process
    generation: int = 0  # of its next start


class RestartLog:
    """RUN/restarts.jsonl: starts of the run, and deaths of its workers.

    `generation` grows with every line, over the life of the run: no two starts of an actor have the same seeds. A start
    says which it begins with: ranks on other machines, with logs of their own, begin with the highest of all.
    """

    def __init__(self, folder: Path, at_least: int = 0) -> None:
        self.generation = max(next_generation(folder), at_least)
        self._lines = Lines(folder / RESTARTS)

    def start(self, resume: bool, settings: Sequence[str]) -> None:
        """The line of a start."""
        self.write({"event": "start", "generation": self.generation, "resume": resume, "settings": list(settings)})

    def write(self, event: dict[str, Any]) -> None:
        """One line."""
        self.generation += 1
        self._lines.write({"time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), **event})

    def close(self) -> None:
        """Close the file."""
        self._lines.close()


class Workers:
    """Starts workers and replaces them.

    Args:
        folder: of logs; the run's, or on another machine one of its own.
        memory: folder of mapped files.
        status: of the same processes.
        settings: time-outs and patience.
        log: where deaths are written.
        workers: to be started by `start`.
    """

    def __init__(
        self,
        folder: Path,
        memory: Path,
        status: Status,
        settings: SupervisorSettings,
        log: RestartLog,
        workers: Sequence[Worker],
    ) -> None:
        self.folder, self.memory, self.workers = folder, memory, list(workers)
        self._status, self._settings, self._log = status, settings, log
        self._pids: dict[str, Any] = {}
        self._looked = self._awake_since = time.monotonic()

    def start(self) -> None:
        """Start all."""
        for worker in self.workers:
            worker.generation = self._log.generation
            self._start(worker)

    def check(self) -> tuple[Worker, str] | None:
        """Replace who is dead or silent; returns whose failure ends the run, and why, if anyone has to."""
        for worker in self.workers:
            if worker.process is None:
                if time.monotonic() >= worker.due:
                    self._start(worker)
            elif (failure := self._check(worker)) is not None:
                return worker, failure
        return None

    def silence(self, row: int, started: float, is_starting: bool) -> str | None:
        """Why the process of this row of the status table, which was started then, counts as hanging, if it does. Nobody can
        give a sign of life while the whole run is paused: the clocks start again after that."""
        now = time.monotonic()
        if now - self._looked > ASLEEP * self._settings.silent_seconds:
            self._awake_since = now
        self._looked = now
        limit = self._settings.start_seconds if is_starting else self._settings.silent_seconds
        since = now - max(self._status.heartbeat(row), started, self._awake_since)
        return silent_for(since) if since > limit else None

    def kill(self) -> None:
        """End all at once."""
        for worker in self.workers:
            kill_group(worker.process)

    def write_pids(self, learners: Sequence[int] = ()) -> None:
        """FOLDER/pids.json, whole at any time and only when it changes: ids of supervisor, learners and workers, and the memory
        folder."""
        workers = {worker.name: worker.process.pid if worker.process else None for worker in self.workers}
        pids = {"supervisor": os.getpid(), "learners": list(learners), "workers": workers, "memory": str(self.memory)}
        if pids != self._pids:
            self._pids = pids
            temporary = self.folder / f".{PIDS}.tmp"
            temporary.write_text(json.dumps(pids), encoding="utf-8")
            temporary.replace(self.folder / PIDS)

    def _check(self, worker: Worker) -> str | None:
        assert worker.process is not None
        progress = worker.progress()
        code = worker.process.poll()
        reason = describe_exit(code) if code is not None else self._silence(worker)
        if reason is None:
            return None
        kill_group(worker.process)
        worker.process = None
        lived = time.monotonic() - worker.started
        is_sound = progress > worker.before and lived >= self._settings.sound_seconds
        worker.failures = 1 if is_sound else worker.failures + 1
        detail = last_words(self.folder / "logs" / f"{worker.name}.log")
        self._log.write({"event": "restart", **worker.record, "reason": reason, "last_line": detail})
        # Its own, also if others die before it is started again: seeds hang on it.
        worker.generation = self._log.generation
        if code == EXIT_REFUSED:
            return reason
        limit = self._settings.max_start_failures * (PATIENCE if progress else 1)
        if worker.failures >= limit:
            return f"{reason}, {worker.failures} times in a row soon after its start"
        pause = min(self._settings.backoff_seconds * 2 ** (worker.failures - 1), MAX_BACKOFF_SECONDS)
        print(f"{worker.title} {reason}, starts again in {pause:.0f} s: {detail}", flush=True)
        worker.due = time.monotonic() + pause
        self._status.restarts += 1
        return None

    def _silence(self, worker: Worker) -> str | None:
        """Why a worker counts as hanging, if it does."""
        assert worker.process is not None
        is_starting = self._status.table()[worker.row, FIELDS.index("steps")] == 0
        # A start may take minutes, but not while it is stopped.
        with contextlib.suppress(psutil.Error):
            is_starting = is_starting and psutil.Process(worker.process.pid).status() != psutil.STATUS_STOPPED
        return self.silence(worker.row, worker.started, is_starting)

    def _start(self, worker: Worker) -> None:
        self._status.clear(worker.row)
        worker.started, worker.before = time.monotonic(), worker.progress()
        scratch = scratch_folder(self.memory) / worker.name
        shutil.rmtree(scratch, ignore_errors=True)  # of the process before
        scratch.mkdir()
        # One compute thread: BLAS libraries read these when they are loaded.
        threads = {f"{library}_NUM_THREADS": "1" for library in ("OMP", "OPENBLAS", "MKL")}
        arguments = [*worker.arguments, "--generation", str(worker.generation)]
        variables = {"TMPDIR": str(scratch), **threads}
        worker.process = spawn(self.folder, self.memory, worker.name, arguments, self._settings.stop_seconds, variables)


def next_generation(folder: Path) -> int:
    """Of the next start of a run with this folder of logs."""
    generation = 0
    for line in read_lines(folder / RESTARTS):
        generation = max(generation, line.get("generation", 0)) + 1
    return generation


def spawn(
    folder: Path,
    memory: Path,
    name: str,
    arguments: Sequence[str],
    stop_seconds: float,
    variables: dict[str, str] | None = None,
) -> subprocess.Popen[bytes]:
    """Start a role in a process group of its own (Ctrl-C reaches the supervisor only); its output goes to a log in `folder`."""
    # -P: a file of the user's in the current folder must not hide one of ours.
    command = [sys.executable, "-P", "-m", "launch.roles", *arguments]
    command += ["--run-dir", str(folder), "--memory", str(memory), "--parent", str(os.getpid())]
    command += ["--grace", str(stop_seconds)]
    environment = {**os.environ, **(variables or {})}
    with (folder / "logs" / f"{name}.log").open("ab") as log:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, env=environment
        )


def kill_group(process: subprocess.Popen[bytes] | None) -> None:
    """Kill a role and whatever it started, and wait for it."""
    if process is None:
        return
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def describe_exit(code: int) -> str:
    """In words."""
    if code == EXIT_STOPPED:
        return "ended because another rank had to stop or is gone"
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def silent_for(seconds: float) -> str:
    """In words."""
    return f"gave no sign of life for {seconds:.0f} s"


def tail(path: Path, num_bytes: int = 4000) -> str:
    """The end of a log."""
    with path.open("rb") as stream:
        stream.seek(max(0, stream.seek(0, 2) - num_bytes))
        return stream.read().decode("utf-8", "replace").strip()


def last_words(path: Path) -> str:
    """The last line of a log."""
    return (tail(path).splitlines() or [""])[-1]
