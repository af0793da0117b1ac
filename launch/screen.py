"""The screen is a luxury: a pipe that is closed, full or read by nobody neither ends a run nor makes it wait."""

import contextlib
import io
import os
import queue
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

LOG = "screen.log"
# Pieces of text that wait for a slow reader; more are not shown.
MAX_WAITING = 1000
CLOSE_SECONDS = 2.0


def keep_descriptors() -> None:
    """Let nothing that is opened later become standard input, output or error, where those are closed (`>&-`)."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)


class _Notes:
    """Why something was not shown, for a file that may be known later only."""

    def __init__(self) -> None:
        self._path: Path | None = None
        self._lines: deque[str] = deque()

    def log_to(self, path: Path) -> None:
        """Append notes there from now on."""
        self._path = path
        self._write()

    def add(self, text: str) -> None:
        """One line."""
        self._lines.append(f"{time.strftime('%Y-%m-%dT%H:%M:%S%z')} {text}\n")
        self._write()

    def _write(self) -> None:
        if self._path is None or not self._lines:
            return
        try:
            with self._path.open("a", encoding="utf-8") as stream:
                while self._lines:  # another thread may add some meanwhile
                    stream.write(self._lines.popleft())
        except OSError:
            return  # a full disk ends the run by a clearer sentence than this one's


_notes = _Notes()
log_to = _notes.log_to


class _Writer:
    """Writes to a descriptor in a thread of its own, and gives up at the first error."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        # Its `put` may be interrupted by a signal handler that prints, too.
        self._texts: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._is_open, self._is_slow = True, False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def write(self, text: bytes) -> None:
        """Soon, or never."""
        if not self._is_open:
            return
        if self._texts.qsize() < MAX_WAITING:
            self._texts.put(text)
        elif not self._is_slow:
            self._is_slow = True
            _notes.add("nobody reads what is printed: what finds no room is not shown, the run goes on")

    def close(self) -> None:
        """Wait a little for what has not been written."""
        self._texts.put(None)
        self._thread.join(CLOSE_SECONDS)

    def _run(self) -> None:
        while (text := self._texts.get()) is not None:
            try:
                _write_all(self._descriptor, text)
            except OSError as error:
                self._is_open = False
                _notes.add(f"nothing is shown any more ({error.strerror}), the run goes on")
                return


def _write_all(descriptor: int, text: bytes) -> None:
    """Not through sys.stdout: a lock of it that is held for ever would abort the interpreter as it ends."""
    while text:
        text = text[os.write(descriptor, text) :]


class _Log:
    """Writes to a descriptor at once: a full disk must not end a process because it had something to say."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def write(self, text: bytes) -> None:
        """All of it, or what finds room."""
        with contextlib.suppress(OSError):
            _write_all(self._descriptor, text)


class _Output(io.TextIOBase):
    """In place of sys.stdout or sys.stderr."""

    def __init__(self, stream: TextIO, writer: _Writer | _Log) -> None:
        self._stream, self._writer = stream, writer

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """Of the stream that this stands for."""
        return self._stream.encoding

    def fileno(self) -> int:
        """Of the stream that this stands for."""
        return self._stream.fileno()

    def isatty(self) -> bool:
        """Whether that is a terminal."""
        return self._stream.isatty()

    def writable(self) -> bool:
        """It is."""
        return True

    def write(self, text: str) -> int:
        """What the encoding lacks is shown as an escape."""
        self._writer.write(text.encode(self.encoding, "backslashreplace"))
        return len(text)


def show_any_letter() -> None:
    """What the terminal's encoding lacks is printed as an escape."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def guard_logs() -> None:
    """The same for a process whose output goes to a log file."""
    sys.stdout, sys.stderr = (_Output(stream, _Log(stream.fileno())) for stream in (sys.stdout, sys.stderr))


@contextmanager
def guarded() -> Iterator[None]:
    """Everything that is printed within, by this process."""
    before = sys.stdout, sys.stderr
    writers: dict[tuple[int, int], _Writer] = {}
    for name, stream in zip(("stdout", "stderr"), before, strict=True):
        try:
            stream.flush()
            about = os.fstat(stream.fileno())
        except (AttributeError, io.UnsupportedOperation):  # closed, so print writes nowhere; or in memory
            continue
        # Both are one terminal, or one file, most of the time: then what they show keeps its order.
        key = about.st_dev, about.st_ino
        if key not in writers:
            writers[key] = _Writer(stream.fileno())
        setattr(sys, name, _Output(stream, writers[key]))
    try:
        yield
    finally:
        for writer in writers.values():
            writer.close()
        sys.stdout, sys.stderr = before
