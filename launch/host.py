"""What runs on a node of a cluster: one command line in a process group of its own, that ends with whoever started it."""

import argparse
import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path

from launch.process import PR_SET_PDEATHSIG, make_memory_folder, remove_folders

KEPT_LINES = 1000
# In a command line: the folder with the private files.
FILES = "{files}"


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

    def free_port(self) -> int:
        """A TCP port that nobody listens on just now."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return int(probe.getsockname()[1])

    def sees(self, path: str) -> bool:
        """Whether there is such a file here."""
        return Path(path).exists()

    def start(self, arguments: Sequence[str], variables: Mapping[str, str], files: Mapping[str, str]) -> None:
        """Run `python ARGUMENTS` with more environment variables. `files` (name -> text) are written where nobody else can
        read them, in memory; that folder replaces {files} in an argument."""
        if files:
            self._private, self._owner = make_memory_folder(self._folder)
            for name, text in files.items():
                path = self._private / name
                path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as stream:
                    stream.write(text)
        # -P: a file of the user's in the current folder must not hide one of ours.
        python = [sys.executable, "-P"]
        command = [*python, "-m", "launch.host", "--parent", str(os.getpid()), "--", *python]
        self._child = subprocess.Popen(
            [*command, *(argument.replace(FILES, str(self._private)) for argument in arguments)],
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

    def poll(self) -> tuple[int | None, list[str]]:
        """Exit code of the child, None as long as it runs, and its lines since the last call."""
        assert self._child is not None
        code = self._child.poll()
        if code is not None:
            self._reader.join(1.0)  # its last lines; a child of its own may keep the pipe open
            self._remove_private()
        lines = [self._lines.popleft() for _ in range(len(self._lines))]
        return code, lines

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
