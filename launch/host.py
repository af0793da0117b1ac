"""What runs on a node of a cluster: one command line in a process group of its own, that ends with whoever started it."""

import argparse
import ctypes
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from launch.process import PR_SET_PDEATHSIG, make_memory_folder, remove_folders

KEPT_LINES = 1000
# In a command line: the folder of the private files, and a new one for logs, which stays.
FILES, LOGS = "{files}", "{logs}"


class Site(NamedTuple):
    """A node as seen from a host on it: its id and address, two TCP ports that nobody listens on just now, and whether the
    file asked for is there."""

    node: str
    address: str
    ports: tuple[int, int]
    sees: bool


class Report(NamedTuple):
    """Exit code of a child, None as long as it runs, and its lines since the last report."""

    code: int | None
    lines: list[str]


class Host:
    """Starts a child and tells how it fares. Made by the driver as a Ray actor, or as it is.

    Args:
        folder: name of the run, for the folder of private files.
    """

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)
        self._child: subprocess.Popen[str] | None = None
        self._lines: deque[str] = deque(maxlen=KEPT_LINES)
        self._private: Path | None = None

    def look_around(self, path: str) -> Site:
        """Where this is, and whether there is such a file here."""
        import ray

        ports = []
        with ExitStack() as stack:  # both open at once, so that they differ
            for _ in range(2):
                probe = stack.enter_context(socket.socket())
                probe.bind(("", 0))
                ports.append(int(probe.getsockname()[1]))
        address = ray.util.get_node_ip_address()
        return Site(ray.get_runtime_context().get_node_id(), address, (ports[0], ports[1]), Path(path).exists())

    def start(self, arguments: Sequence[str], variables: Mapping[str, str], files: Mapping[str, str]) -> Report:
        """Run `python ARGUMENTS` with more environment variables. `files` (name -> text) are written where nobody else can
        read them, in memory. Returns as `poll`."""
        if files:
            self._private, self._owner = make_memory_folder(self._folder)
            for name, text in files.items():
                path = self._private / name
                path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as stream:
                    stream.write(text)
        logs = tempfile.mkdtemp(prefix=f"logs-of-{self._folder.name}-{time.strftime('%Y%m%d-%H%M%S')}-")
        places = {FILES: str(self._private), LOGS: logs}
        # -P: a file of the user's in the current folder must not hide one of ours.
        python = [sys.executable, "-P"]
        command = [*python, "-m", "launch.host", "--parent", str(os.getpid()), "--", *python]
        self._child = subprocess.Popen(
            [*command, *(places.get(argument, argument) for argument in arguments)],
            env={**os.environ, **variables},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            encoding="utf-8",
            errors="replace",
        )
        self._reader = threading.Thread(target=self._read, args=(self._child,), daemon=True)
        self._reader.start()
        return self.poll()

    def poll(self) -> Report:
        """How the child fares."""
        assert self._child is not None
        code = self._child.poll()
        if code is not None:
            self._reader.join(1.0)  # its last lines; a child of its own may keep the pipe open
            self._remove_private()
        lines = [self._lines.popleft() for _ in range(len(self._lines))]
        return Report(code, lines)

    def stop(self) -> None:
        """Ask the child to end."""
        if self._child is not None and self._child.poll() is None:
            self._child.terminate()

    def kill(self) -> None:
        """End the child and its group at once."""
        if self._child is not None:
            try:
                os.killpg(self._child.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            self._child.wait()
        self._remove_private()

    def _read(self, child: subprocess.Popen[str]) -> None:
        assert child.stdout is not None
        for line in child.stdout:
            self._lines.append(line.rstrip("\n"))

    def _remove_private(self) -> None:
        if self._private is not None:
            remove_folders(self._private)
            self._owner.close()
            self._private = None


def main() -> None:
    """Become the command line after `--`, to be told by the kernel when the parent dies."""
    parser = argparse.ArgumentParser(prog="python -m launch.host", description=__doc__)
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("command", nargs="+")
    options = parser.parse_args()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != options.parent:
        sys.exit(1)
    os.execv(options.command[0], options.command)


if __name__ == "__main__":
    main()
