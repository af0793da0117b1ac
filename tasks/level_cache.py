"""DeepMind Lab's level cache on a local folder: maps that were built once are fetched by every later episode.

The engine calls `fetch` and `write` inside `reset` and would turn an exception into the end of the run. So nothing here
raises: whatever goes wrong with the folder counts as a miss, and the engine builds the map itself.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import tempfile
import time
import zipfile
from pathlib import Path

SUFFIX = ".pk3"
TEMPORARY = ".part-"
# A temporary file so old was left by a process that died.
STALE_SECONDS = 3600.0
LOCK_SECONDS = 5.0
KEY = re.compile(r"[\w-][\w.-]*", re.ASCII)


class LevelCache:
    """`fetch` and `write` as the engine calls them.

    Attributes:
        folder: where the maps lie.
        hits, misses: answers of `fetch`. bytes: of the maps fetched and stored. build_seconds: from a miss to the `write`
            that followed it.
    """

    def __init__(self, folder: Path, max_bytes: int) -> None:
        """Maps lie in `folder`, made if need be, and never take more than `max_bytes` together; the longest unread go first."""
        self.folder, self._max_bytes = folder, max_bytes
        self.hits, self.misses, self.bytes, self.build_seconds = 0, 0, 0, 0.0
        self._missed = ("", 0.0)  # key and time of the last miss

    def fetch(self, key: str, pk3_path: str) -> bool:
        """True: the whole map of this key now lies at `pk3_path`. False: it has to be built."""
        try:
            found = self._fetch(key, Path(pk3_path))
        except Exception:  # whatever a damaged file or folder provokes
            found = False
        if found:
            self.hits += 1
        else:
            self.misses += 1
            self._missed = (key, time.monotonic())
        return found

    def write(self, key: str, pk3_path: str) -> None:
        """Keep the map that was just built at `pk3_path`, if it is whole and there is room."""
        missed, began = self._missed
        if missed == key:
            self.build_seconds += time.monotonic() - began
        try:
            self._write(key, Path(pk3_path))
        except Exception:  # as above; the next episode with this map builds it again
            return

    def _fetch(self, key: str, target: Path) -> bool:
        kept = self._path(key)
        if not kept.exists():
            return False
        shutil.copyfile(kept, target)
        # The copy is looked at, not the kept file, which another process may replace in between.
        if not is_whole_zip(target):
            target.unlink()
            kept.unlink(missing_ok=True)
            return False
        self.bytes += target.stat().st_size
        try:
            os.utime(kept)
        except OSError:
            pass  # a read-only folder serves maps all the same
        return True

    def _write(self, key: str, source: Path) -> None:
        size = source.stat().st_size
        kept = self._path(key)
        if size > self._max_bytes or not is_whole_zip(source):
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        # A folder that several users share: no link of theirs is followed.
        with os.fdopen(os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666), "rb") as lock:
            if not _lock(lock.fileno()):
                return
            self._make_room(size, kept)
            descriptor, name = tempfile.mkstemp(prefix=TEMPORARY, dir=self.folder)
            try:
                with os.fdopen(descriptor, "wb") as stream, source.open("rb") as built:
                    shutil.copyfileobj(built, stream)
                Path(name).replace(kept)
            except OSError:
                Path(name).unlink(missing_ok=True)
                raise
        self.bytes += size

    def _make_room(self, size: int, kept: Path) -> None:
        """Remove what is stale, then the longest unread, until `size` more bytes fit."""
        entries = []
        for path in self.folder.iterdir():
            stat = path.lstat()
            if path.name.startswith(TEMPORARY) and time.time() - stat.st_mtime > STALE_SECONDS:
                path.unlink()
            elif path != kept:
                entries.append((stat.st_mtime, stat.st_size, path))
        total = sum(entry_size for _, entry_size, _ in entries)
        for _, entry_size, path in sorted(entries):
            if total + size <= self._max_bytes:
                break
            if path.suffix == SUFFIX:
                path.unlink()
                total -= entry_size

    def _path(self, key: str) -> Path:
        if not KEY.fullmatch(key):
            raise ValueError(f"level cache: the key {key!r} is no file name")
        return self.folder / f"{key}{SUFFIX}"


def is_whole_zip(path: Path) -> bool:
    """Whether a file is a zip whose members all have their checksum."""
    try:
        with zipfile.ZipFile(path) as archive:
            return archive.testzip() is None
    except Exception:  # zipfile passes on what zlib, struct and others raise over damaged bytes
        return False


def _lock(descriptor: int) -> bool:
    """Lock a file, waiting a few seconds at most: a stopped process must not stop the others."""
    end = time.monotonic() + LOCK_SECONDS
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > end:
                return False
            time.sleep(0.01)
