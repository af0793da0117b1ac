"""Starting the real command, waiting for what it does, and finding what it left behind."""

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from launch import multitask
from launch.process import PREFIX, SCRATCH, memory_root
from launch.records import METRICS, last_line, read_lines

ROOT = Path(__file__).parents[1]
MULTITASK = str(ROOT / "launch" / "multitask.py")
ACTORS = str(ROOT / "launch" / "actors.py")
# Quick to start and to notice things; small enough for two busy cores.
QUICK = [
    "actor.num_actors=1",
    "actor.num_envs=8",
    "learner.batch_size=8",
    "log.every_seconds=0.5",
    "supervisor.backoff_seconds=0.1",
]
# The same where one actor is not enough to show it: a start costs a core two seconds and more for each process.
PAIR = ["actor.num_actors=2", *QUICK[1:]]


def command(*arguments: str, script: str = MULTITASK) -> list[str]:
    return [sys.executable, script, *arguments]


def run(*arguments: str, timeout: float = 120, cwd: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    """The command to its end, as a process."""
    return subprocess.run(
        command(*arguments), capture_output=True, text=True, timeout=timeout, cwd=cwd, env={**os.environ, **environment}
    )


def run_here(*arguments: str, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    """The command to its end within this process, which has loaded everything; the roles are processes of their own as
    ever. After `timeout` seconds it is interrupted."""
    out, err, before = io.StringIO(), io.StringIO(), {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)}
    limit = threading.Timer(timeout, os.kill, (os.getpid(), signal.SIGINT))
    limit.start()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = multitask.main(arguments)
    finally:
        limit.cancel()
        for number, handler in before.items():
            signal.signal(number, handler)
    return subprocess.CompletedProcess(arguments, code, out.getvalue(), err.getvalue())


@contextmanager
def started(*arguments: str, output: int = subprocess.PIPE, script: str = MULTITASK) -> Iterator[subprocess.Popen[str]]:
    """The command running; killed at the end if it still does. A pipe that nobody reads is full after some minutes, and
    then the command waits: long runs need another `output`."""
    process = subprocess.Popen(command(*arguments, script=script), stdout=output, stderr=subprocess.STDOUT, text=True)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
        process.communicate()


def wait_for(what: Callable[[], Any], timeout: float = 60, process: subprocess.Popen[str] | None = None) -> Any:
    """What `what` returns as soon as it is true; fails when it never is, or when `process` ends before."""
    deadline = time.monotonic() + timeout
    pause = threading.Event()
    while not (found := what()):
        assert time.monotonic() < deadline, f"waited {timeout} s in vain"
        if process is not None and process.poll() is not None and process.stdout is not None:
            raise AssertionError(f"the command ended: {process.stdout.read()}")
        pause.wait(0.05)
    return found


def updates(run_dir: Path) -> int:
    record = last_line(run_dir / METRICS)
    return record["updates"] if record else 0


def pids(run_dir: Path) -> dict[str, Any]:
    """supervisor, learner (the first), actors (a list), and all else that the file holds."""
    found = json.loads((run_dir / "pids.json").read_text(encoding="utf-8"))
    actors = [pid for name, pid in found["workers"].items() if name.startswith("actor-")]
    return {**found, "learner": found["learners"][0], "actors": actors}


def lines(path: Path) -> list[dict[str, Any]]:
    return list(read_lines(path))


def roles_of(run_dir: Path) -> list[psutil.Process]:
    """Living processes that work on a run folder."""
    found = []
    for process in psutil.process_iter():
        try:
            if str(run_dir) in process.cmdline() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


def assert_nothing_left(run_dir: Path, supervisor: int) -> None:
    """No process, no mapped file, no list of processes."""
    assert roles_of(run_dir) == []
    assert [folder for folder in memory_root().glob(f"{PREFIX}*-{supervisor}-*")] == []
    assert list(Path(tempfile.gettempdir()).glob(f"{SCRATCH}{PREFIX}*-{supervisor}-*")) == []
    assert not (run_dir / "pids.json").exists()


def send(pid: int | None, number: signal.Signals) -> bool:
    """Whether the signal could be sent."""
    if pid is None:
        return False
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True
