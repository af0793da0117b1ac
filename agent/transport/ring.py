"""Unrolls go down: a ring of slots in a mapped file, with one writer (an actor) and one reader (a learner), without locks.

The writer alone moves `committed`, the reader alone moves `released`; slot i % num_slots holds unroll i while
released <= i < committed. A writer killed in the middle of a slot has not committed it: its successor writes it again.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np

from agent.transport import mapped
from agent.unroll import Arrays, UnrollSpec

# Each counter has a page of its own: writer and reader never share a cache line.
_PAGE = 4096
_HEADER = 2 * _PAGE
_SLOT_HEADER = 64
Tag = tuple[int, int, int]
NO_TAG: Tag = (0, 0, 0)


class TornUnrollError(RuntimeError):
    """A committed slot does not hold what its number says."""


def ring_bytes(spec: UnrollSpec, num_slots: int) -> int:
    """Bytes of the mapped file."""
    return _HEADER + num_slots * (_SLOT_HEADER + spec.unroll_bytes())


class Ring:
    """One actor's slots.

    Args:
        path: of the mapped file.
        spec: what a slot holds.
        num_slots: unrolls it can hold.
        create: make the file (the supervisor does), or open it.
    """

    def __init__(self, path: Path, spec: UnrollSpec, num_slots: int, create: bool = False) -> None:
        self.path, self.spec, self.num_slots = path, spec, num_slots
        buffer = (mapped.create if create else mapped.attach)(path, ring_bytes(spec, num_slots))
        self._committed = buffer[:8].view(np.int64)
        self._released = buffer[_PAGE : _PAGE + 8].view(np.int64)
        self._sequences: list[np.ndarray] = []
        self._tags: list[np.ndarray] = []
        self._bytes: list[np.ndarray] = []
        self._slots: list[Arrays] = []
        for slot in range(num_slots):
            start = _HEADER + slot * (_SLOT_HEADER + spec.unroll_bytes())
            self._sequences.append(buffer[start : start + 8].view(np.int64))
            self._tags.append(buffer[start + 8 : start + 32].view(np.int64))
            start += _SLOT_HEADER
            self._bytes.append(buffer[start : start + spec.unroll_bytes()])
            self._slots.append(spec.views(self._bytes[slot]))

    @property
    def committed(self) -> int:
        """Unrolls ever written."""
        return int(self._committed[0])

    @property
    def released(self) -> int:
        """Unrolls ever read."""
        return int(self._released[0])

    def __len__(self) -> int:
        """Unrolls that wait to be read."""
        return self.committed - self.released

    def wait_for_space(self, count: int, timeout_seconds: float, beat: Callable[[], None], poll_seconds: float = 0.001) -> None:
        """Block until `count` slots are free; `beat` is called while waiting.

        Raises:
            ValueError: more than the ring can ever hold.
            TimeoutError: names the ring; the learner did not read for `timeout_seconds`.
        """
        if count > self.num_slots:
            raise ValueError(f"{count} unrolls do not fit into {self.path}: it has {self.num_slots} slots")
        deadline = time.monotonic() + timeout_seconds
        while self.num_slots - len(self) < count:
            beat()
            if time.monotonic() > deadline:
                raise TimeoutError(f"waited {timeout_seconds:.0f} s for the learner to read from {self.path}")
            time.sleep(poll_seconds)

    def write(self, batch: Mapping[str, np.ndarray], column: int) -> None:
        """Copy one column of [T+1, B, ...] arrays into the next slot and commit it. There must be space."""
        slot = self._open()
        self.spec.copy_out(self._slots[slot], batch, column)
        self._commit(slot)

    def write_bytes(self, payload: np.ndarray, tag: Tag) -> None:
        """As `write`, of an unroll that lies in a slot's order, uint8. `tag` stays readable as long as the slot holds it."""
        slot = self._open()
        self._bytes[slot][...] = payload
        self._tags[slot][...] = tag
        self._commit(slot)

    def tags(self) -> Iterator[Tag]:
        """Of all unrolls that the slots still hold, read or not; what was written by `write` has none."""
        for index in range(max(0, self.committed - self.num_slots), self.committed):
            slot = index % self.num_slots
            if self._sequences[slot][0] == index + 1:
                first, second, third = self._tags[slot].tolist()
                yield first, second, third

    def peek(self) -> Arrays:
        """The oldest unroll, in place: copy it, then `release`.

        Raises:
            TornUnrollError: the slot was never written, or not to its end.
        """
        return self._slots[self._find(self.released)]

    def bytes_of(self, index: int) -> np.ndarray:
        """Unroll `index`, released <= index < committed, as it lies in its slot, uint8; errors as `peek`."""
        assert index >= self.released, "it was given back"
        return self._bytes[self._find(index)]

    def release(self) -> None:
        """Give the oldest unroll's slot back to the writer."""
        self._released[0] = self.released + 1

    def _open(self) -> int:
        assert len(self) < self.num_slots, "wait_for_space comes first"
        slot = self.committed % self.num_slots
        self._sequences[slot][0] = -1
        self._tags[slot][...] = NO_TAG
        return slot

    def _commit(self, slot: int) -> None:
        self._sequences[slot][0] = self.committed + 1
        self._committed[0] = self.committed + 1

    def _find(self, index: int) -> int:
        assert index < self.committed, "nothing to read"
        slot = index % self.num_slots
        if self._sequences[slot][0] != index + 1:
            raise TornUnrollError(f"slot {slot} of {self.path} holds unroll {self._sequences[slot][0] - 1} instead of {index}")
        return slot
