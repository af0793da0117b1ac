"""Being a child process: end with the parent, stop on request, find the files shared with the others."""

import ctypes
import errno
import faulthandler
import fcntl
import os
import shutil
import signal
import stat
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import IO

PREFIX = "multitask-"
SCRATCH = "engines-of-"
OWNER = "owner"
# A folder without an owner for so long was left by a process that died in between.
START_SECONDS = 60.0
# An actor that must not be restarted: its message tells what a person has to change.
EXIT_REFUSED = 3
# A learner that ended because another rank had to stop or is gone; rank 0 wrote a checkpoint.
EXIT_STOPPED = 4
PR_SET_PDEATHSIG = 1


def memory_root() -> Path:
    """Where mapped files lie: in memory where the system offers a folder for that."""
    shared = Path("/dev/shm")
    return shared if shared.is_dir() and os.access(shared, os.W_OK) else Path(tempfile.gettempdir())


class InUseError(ValueError):
    """Another process holds a lock."""


def hold(path: Path) -> IO[str]:
    """Lock a file, made if need be, for as long as the returned stream is open: the kernel lets go when this process ends,
    however it ends, and the lock holds across containers that share the file.

    Raises:
        InUseError: another process holds it; names that process.
        ValueError: it is a link, or no file: what it leads to could be somebody's, and stays as it is.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.EISDIR):
            raise
        raise ValueError(f"{path} is a link or a folder instead of a lock: remove it") from error
    about = os.fstat(descriptor)
    if not stat.S_ISREG(about.st_mode) or about.st_nlink > 1:
        os.close(descriptor)
        raise ValueError(f"{path} is another name of some file instead of a lock: remove it")
    stream = os.fdopen(descriptor, "r+", encoding="utf-8")
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise InUseError(f"process {stream.read().strip()} works on {path.parent} already: stop it first") from error
    stream.truncate(0)
    stream.write(str(os.getpid()))
    stream.flush()
    return stream


def make_memory_folder(run_dir: Path) -> tuple[Path, IO[str]]:
    """A new folder for this run's mapped files, and the lock that says that its owner lives. The name carries a number of the
    run and this process's id."""
    run_id = zlib.crc32(str(run_dir.resolve()).encode())
    remove_stale_folders()
    while True:
        folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{run_id:08x}-{os.getpid()}-", dir=memory_root()))
        try:
            scratch_folder(folder).mkdir(mode=0o700)
            return folder, hold(folder / OWNER)
        except FileExistsError:  # somebody saw the name and was faster: nothing of ours goes there
            folder.rmdir()


def scratch_folder(memory: Path) -> Path:
    """Where engines of the run with this memory folder put their temporary files, which they leave behind when they are
    killed; on disk, an engine may write much."""
    return Path(tempfile.gettempdir()) / f"{SCRATCH}{memory.name}"


def remove_folders(memory: Path) -> None:
    """The memory folder of a run, and what its engines left."""
    shutil.rmtree(scratch_folder(memory), ignore_errors=True)
    shutil.rmtree(memory, ignore_errors=True)


def remove_stale_folders() -> None:
    """Remove folders of mapped files whose owner no longer lives, and what engines left of runs that are gone."""
    for folder in memory_root().glob(f"{PREFIX}*-*"):
        try:
            if not _is_mine(folder):
                continue
            if (folder / OWNER).exists():
                hold(folder / OWNER).close()
            elif time.time() - folder.stat().st_mtime < START_SECONDS:
                continue  # another run that is just starting
            remove_folders(folder)
        except (OSError, ValueError):
            continue  # it lives, or is gone meanwhile
    for scratch in Path(tempfile.gettempdir()).glob(f"{SCRATCH}{PREFIX}*"):
        if not (memory_root() / scratch.name.removeprefix(SCRATCH)).exists() and _is_mine(scratch):
            shutil.rmtree(scratch, ignore_errors=True)


def _is_mine(folder: Path) -> bool:
    """Whether it is a folder, no link to one, of this user: these places are everybody's, and root could remove all."""
    try:
        about = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(about.st_mode) and about.st_uid == os.geteuid()


def follow_parent(parent: int, memory: Path, stop_signal: signal.Signals, grace_seconds: float) -> None:
    """Make this process end when its parent does: by `stop_signal`, and by force after `grace_seconds`; the run's mapped
    files go too. The kernel tells it at once on Linux; a thread that looks twice a second does everywhere."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, stop_signal)
    threading.Thread(target=_watch, args=(parent, memory, stop_signal, grace_seconds), daemon=True).start()


def _watch(parent: int, memory: Path, stop_signal: signal.Signals, grace_seconds: float) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os.kill(os.getpid(), stop_signal)
    time.sleep(grace_seconds)
    remove_folders(memory)
    os._exit(1)


def on_stop_request(handler: Callable[[], None]) -> None:
    """Call `handler` on SIGTERM; ignore SIGINT, which is the supervisor's to handle. A crash prints its stack."""
    signal.signal(signal.SIGTERM, lambda *_: handler())
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.enable()
