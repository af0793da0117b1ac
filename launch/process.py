"""Being a child process: end with the parent, stop on request, find the files shared with the others."""

import ctypes
import faulthandler
import json
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Callable
from pathlib import Path

import psutil

PREFIX = "multitask-"
OWNER = "owner.json"
# An actor that must not be restarted: its message tells what a person has to change.
EXIT_REFUSED = 3
_PR_SET_PDEATHSIG = 1


def memory_root() -> Path:
    """Where mapped files lie: in memory where the system offers a folder for that."""
    shared = Path("/dev/shm")
    return shared if shared.is_dir() and os.access(shared, os.W_OK) else Path(tempfile.gettempdir())


def make_memory_folder(run_dir: Path) -> Path:
    """A new folder for this run's mapped files; its name carries a number of the run and this process's id."""
    run_id = zlib.crc32(str(run_dir.resolve()).encode())
    folder = memory_root() / f"{PREFIX}{run_id:08x}-{os.getpid()}"
    remove_stale_folders()
    folder.mkdir(mode=0o700)
    owner = {"pid": os.getpid(), "create_time": psutil.Process().create_time(), "run_dir": str(run_dir.resolve())}
    (folder / OWNER).write_text(json.dumps(owner), encoding="utf-8")
    return folder


def remove_stale_folders() -> None:
    """Remove folders of mapped files whose supervisor no longer lives."""
    for folder in memory_root().glob(f"{PREFIX}*-*"):
        try:
            owner = json.loads((folder / OWNER).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue  # another run that is just starting, or another user's
        if not is_alive(owner["pid"], owner["create_time"]):
            shutil.rmtree(folder, ignore_errors=True)


def is_alive(pid: int, create_time: float) -> bool:
    """Whether this very process lives: process ids are used again."""
    try:
        process = psutil.Process(pid)
        return abs(process.create_time() - create_time) < 1.0 and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def follow_parent(parent: int, memory: Path, stop_signal: signal.Signals, grace_seconds: float = 8.0) -> None:
    """Make this process end when its parent does: by `stop_signal`, and by force after `grace_seconds`; the run's mapped
    files go too. The kernel tells it at once on Linux; a thread that looks twice a second does everywhere."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, stop_signal)
    threading.Thread(target=_watch, args=(parent, memory, stop_signal, grace_seconds), daemon=True).start()


def _watch(parent: int, memory: Path, stop_signal: signal.Signals, grace_seconds: float) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os.kill(os.getpid(), stop_signal)
    time.sleep(grace_seconds)
    shutil.rmtree(memory, ignore_errors=True)
    os._exit(1)


def on_stop_request(handler: Callable[[], None]) -> None:
    """Call `handler` on SIGTERM; ignore SIGINT, which is the supervisor's to handle. A crash prints its stack."""
    signal.signal(signal.SIGTERM, lambda *_: handler())
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.enable()
