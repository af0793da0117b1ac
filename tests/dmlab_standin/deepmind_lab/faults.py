"""Ways to die and to hang on demand, as the real engine does without a Python exception."""

from __future__ import annotations

import ctypes
import os
import re
from collections import Counter
from pathlib import Path
from typing import NoReturn

FORM = re.compile(r"(?P<kind>abort|error|exit|hang)@(?P<where>init|reset|step):(?P<number>[1-9]\d*)(?P<limits>(,\w+=[^,;]+)*)")
SENTENCE = "DMLAB_STANDIN_FAULT: {!r} is not KIND@WHERE:N[,level=NAME][,once=PATH], as in abort@reset:2 or hang@step:20"


def end(message: str) -> NoReturn:
    """The process ends with code 1, as the engine's own exit(1): no exception, no clean-up by Python."""
    os.write(2, f"deepmind_lab stand-in: {message}\n".encode())
    os._exit(1)


def abort(message: str) -> NoReturn:
    """The process ends by SIGABRT."""
    os.write(2, f"deepmind_lab stand-in: {message}\n".encode())
    os.abort()


def hang(message: str) -> NoReturn:
    """Wait for ever inside C, with the GIL held and without work: no thread runs, no Python signal handler either."""
    library = ctypes.PyDLL(None)  # PyDLL keeps the GIL through the call
    mutex = ctypes.create_string_buffer(128)  # zeros: an unlocked mutex
    library.pthread_mutex_lock(mutex)
    os.write(2, f"deepmind_lab stand-in: {message}\n".encode())
    while True:
        library.pthread_mutex_lock(mutex)


class Faults:
    """The faults that DMLAB_STANDIN_FAULT asks for, counted over the life of this process."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def reach(self, where: str, level: str) -> str | None:
        """Count one more `where`; a message where the fault is an error, None without one, else it never returns.

        Errors: ValueError for a setting that cannot be read.
        """
        self.counts[where] += 1
        for text in filter(None, os.environ.get("DMLAB_STANDIN_FAULT", "").split(";")):
            match = FORM.fullmatch(text.strip())
            if match is None:
                raise ValueError(SENTENCE.format(text))
            limits = dict(limit.split("=", 1) for limit in match["limits"].split(",") if limit)
            if set(limits) - {"level", "once"}:
                raise ValueError(SENTENCE.format(text))
            if (match["where"], int(match["number"])) != (where, self.counts[where]):
                continue
            if limits.get("level", level) != level or not _claimed(limits.get("once")):
                continue
            return _happen(match["kind"], f"{text.strip()} in {level}")
        return None


def _claimed(flag: str | None) -> bool:
    """True for the first process that makes the file `flag`, and where none is named."""
    if flag is None:
        return True
    try:
        Path(flag).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def _happen(kind: str, message: str) -> str:
    if kind == "exit":
        end(message)
    if kind == "abort":
        abort(message)
    if kind == "hang":
        hang(message)
    return message
