"""Maps: built slowly with the GIL held, kept as real zip files, offered to the user's level cache."""

from __future__ import annotations

import hashlib
import os
import random
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

from . import faults


def map_text(level: str, index: int) -> str:
    """What the engine would compile: one of a level's few maps."""
    return f"level {level}\nmap {index}\n" + "".join(f"{i:03d} {(i * 37 + index * 101) % 97:02d}\n" for i in range(40))


def prepare(level: str, index: int, folder: Path, cache: Any) -> BaseException | None:
    """Have map `index` of `level` lie in `folder`; what the cache raised, to be raised at the end of the call.

    Order as in the engine: ask the cache, else build and offer it. After an exception the map is still built, the
    cache is not asked again. A map that the cache claims to have put there and that is missing, torn, or another one
    ends the process with exit(1).
    """
    text = map_text(level, index)
    key = hashlib.md5(text.encode()).hexdigest()
    path = folder / f"{level}.pk3"
    path.unlink(missing_ok=True)
    try:
        if cache is not None and cache.fetch(key, str(path)):
            problem = damage(path, level, key)
            if problem:
                faults.end(f"the level cache gave a damaged map for key {key}: {problem}")
            return None
    except BaseException as error:
        _build(path, level, text, key)
        return error
    _build(path, level, text, key)
    try:
        if cache is not None:
            cache.write(key, str(path))
    except BaseException as error:
        return error
    return None


def damage(path: Path, level: str, key: str) -> str | None:
    """What is wrong with a map file, None if nothing is."""
    try:
        with zipfile.ZipFile(path) as archive:
            torn = archive.testzip()
            if torn:
                return f"{torn} is torn"
            if hashlib.md5(archive.read(f"maps/{level}.map")).hexdigest() != key:
                return "it is another map"
            if archive.read(f"maps/{level}.bsp") != _compiled(key):
                return "its compiled part is of another map"
    except Exception as error:  # a torn zip fails in many ways
        return f"{type(error).__name__}: {error}"
    return None


def _compiled(key: str) -> bytes:
    """The compiled part: bytes that depend on the key only, and do not compress."""
    return random.Random(key).randbytes(int(os.environ.get("DMLAB_STANDIN_MAP_BYTES", "20000")))


def _build(path: Path, level: str, text: str, key: str) -> None:
    """Compile: a busy loop for as long as asked, then the file. A write that fails ends the process."""
    _work(float(os.environ.get("DMLAB_STANDIN_BUILD_MS", "5")) / 1000)
    stamp = (1980, 1, 1, 0, 0, 0)  # equal keys give equal files
    try:
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr(zipfile.ZipInfo(f"maps/{level}.map", stamp), text)
            archive.writestr(zipfile.ZipInfo(f"maps/{level}.bsp", stamp), _compiled(key))
    except OSError as error:
        faults.end(f"the map could not be written: {error}")


def _work(seconds: float) -> None:
    """Burn `seconds` of wall clock without giving the GIL away: no thread may ask for it in the meantime."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(seconds + 10)
    try:
        stop = time.monotonic() + seconds
        while time.monotonic() < stop:
            pass
    finally:
        sys.setswitchinterval(interval)
