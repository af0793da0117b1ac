"""Memory shared by name: a mapped file, made by one process and opened by others; no resource tracker ever unlinks it."""

import mmap
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np


def create(path: Path, num_bytes: int) -> np.ndarray:
    """A new zeroed file of `num_bytes`, really reserved, as a flat uint8 array.

    Raises:
        OSError: the file exists, or the space is not there (instead of a bus error in mid-run).
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(descriptor, 0, num_bytes)
        else:
            os.truncate(descriptor, num_bytes)
        return _map(descriptor, num_bytes)
    except OSError:
        path.unlink()
        raise
    finally:
        os.close(descriptor)


def attach(path: Path, num_bytes: int) -> np.ndarray:
    """The file that `create` made.

    Raises:
        FileNotFoundError: it is not there.
        ValueError: its size differs.
    """
    descriptor = os.open(path, os.O_RDWR)
    try:
        size = os.fstat(descriptor).st_size
        if size != num_bytes:
            raise ValueError(f"{path} has {size} bytes, this configuration needs {num_bytes}: it belongs to another run")
        return _map(descriptor, num_bytes)
    finally:
        os.close(descriptor)


def _open(path: Path, num_bytes: int, new: bool) -> np.ndarray:
    return create(path, num_bytes) if new else attach(path, num_bytes)


def _map(descriptor: int, num_bytes: int) -> np.ndarray:
    return np.frombuffer(mmap.mmap(descriptor, num_bytes), np.uint8)


class Counters:
    """Named int64 numbers in a mapped file: one process writes, others read, and they outlive both.

    Args:
        path: of the file.
        names: of the numbers.
        create: make the file, or open it.
    """

    def __init__(self, path: Path, names: Sequence[str], create: bool = False) -> None:
        self._names = {name: index for index, name in enumerate(names)}
        self._numbers = _open(path, 8 * len(names), create).view(np.int64)

    def __getitem__(self, name: str) -> int:
        return int(self._numbers[self._names[name]])

    def __setitem__(self, name: str, value: int) -> None:
        self._numbers[self._names[name]] = value
