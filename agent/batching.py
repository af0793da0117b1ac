"""B unrolls from many rings -> one batch on the learner's device, perhaps one ahead, in a thread of its own."""

import queue
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from agent.transport.ring import Ring
from agent.unroll import Arrays, Batch, UnrollSpec

CPU = torch.device("cpu")


@dataclass(frozen=True)
class HostBatch:
    """A buffer in host memory and its twin on the learner's device; both are valid until `release`.

    arrays: [T+1, B, ...] (see agent/unroll.py). host: the same memory as tensors. data: on the device; on the CPU the same
    memory again. copied, used: events of the device after the copy, and after the last work that read `data`.
    """

    arrays: Arrays
    host: Batch
    data: Batch
    copied: Any
    used: Any


class RingReader:
    """Takes unrolls from rings in turn.

    Args:
        rings: one per actor.
        tasks_of: tasks that each ring may bring, for the message of a time-out.
        balance: `actors` = whatever comes, in turn (fast tasks feed more); `frames` = the task with the fewest frames first,
            and none may lead the last by more than `slack_frames`.
        frames: task -> frames trained on so far, [N].
        actors: numbers of this machine's actors, whose rings come first; None = all rings, from 0 on.
    """

    def __init__(
        self,
        rings: Sequence[Ring],
        tasks_of: Sequence[Sequence[int]],
        balance: str,
        frames: np.ndarray,
        slack_frames: int,
        actors: Sequence[int] | None = None,
    ) -> None:
        self.rings = list(rings)
        self._actors = list(range(len(self.rings)) if actors is None else actors)
        self._tasks_of = tasks_of
        self._balance = balance
        self._frames = frames.astype(np.int64).copy()
        self._served = sorted({task for tasks in tasks_of for task in tasks})  # those of other ranks never come here
        self._slack = slack_frames
        self._next = 0

    def ready(self) -> Ring | None:
        """The ring to read from next, or None if nothing may be read now."""
        count = len(self.rings)
        order = [(self._next + i) % count for i in range(count)]
        waiting = [i for i in order if len(self.rings[i])]
        if not waiting:
            return None
        if self._balance == "frames":
            led_by = [self._frames[int(self.rings[i].peek()["task"])] for i in waiting]
            best = int(np.argmin(led_by))
            if led_by[best] > self._frames[self._served].min() + self._slack:
                return None
            chosen = waiting[best]
        else:
            chosen = waiting[0]
        self._next = (chosen + 1) % count
        return self.rings[chosen]

    def take(self, ring: Ring, spec: UnrollSpec, batch: Arrays, column: int) -> None:
        """Copy the ring's oldest unroll into a column and give its slot back."""
        unroll = ring.peek()
        spec.copy_in(batch, column, unroll)
        self._frames[int(unroll["task"])] += int(unroll["frames"][1:].sum())
        ring.release()

    def depth(self) -> int:
        """Unrolls that wait in all rings."""
        return sum(len(ring) for ring in self.rings)

    def missing(self, names: Sequence[str]) -> str:
        """Which actors have nothing to read, with their tasks: for a message."""
        idle = [i for i, ring in enumerate(self.rings) if not len(ring)]
        num_local = len(self._actors)
        who = {i: f"actor {self._actors[i]}" if i < num_local else "actors on other machines" for i in idle}
        return ", ".join(f"{who[i]} ({', '.join(names[t] for t in self._tasks_of[i])})" for i in idle) or "nobody"


class Batcher:
    """Buffers that are filled, and copied to the device on a stream of its own, while the learner uses another.

    Args:
        reader: where unrolls come from.
        spec: sizes.
        batch_size: B.
        device: the learner's.
        dump: folder and number: the first unrolls are written there as npz, as the learner receives them.
        prefetch: batches that may be filled while the learner uses one.
    """

    def __init__(
        self,
        reader: RingReader,
        spec: UnrollSpec,
        batch_size: int,
        device: torch.device = CPU,
        dump: tuple[Path, int] | None = None,
        prefetch: int = 1,
    ) -> None:
        self.reader, self.spec, self.batch_size = reader, spec, batch_size
        self._dump = dump
        self._dumped = 0
        self._device, self._module = device, torch.get_device_module(device)
        self._copies = self._module.Stream(device) if device.type == "cuda" else self._module.Stream()
        self._empty: queue.Queue[HostBatch] = queue.Queue()
        self._full: queue.Queue[HostBatch | Exception] = queue.Queue()
        for _ in range(1 + prefetch):
            self._empty.put(self._buffer())
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="batcher", daemon=True)
        self._thread.start()

    def next(self, timeout_seconds: float) -> HostBatch | None:
        """The next batch, or None after `timeout_seconds`.

        Raises:
            TornUnrollError, OSError: whatever the thread met.
        """
        try:
            batch = self._full.get(timeout=timeout_seconds)
        except queue.Empty:
            return None
        if isinstance(batch, Exception):
            raise batch
        batch.copied.wait(self._module.current_stream(self._device))
        return batch

    def release(self, batch: HostBatch) -> None:
        """The learner is done with it: all its work on the data is on the device's queue."""
        batch.copied.synchronize()  # on the device, which may lag behind, the host's memory may still be read
        batch.used.record(self._module.current_stream(self._device))
        self._empty.put(batch)

    def close(self) -> None:
        """End the thread; what it had begun to fill is dropped."""
        self._stop.set()
        self._thread.join(timeout=5)

    def _run(self) -> None:
        torch.set_flush_denormal(True)
        try:
            while not self._stop.is_set():
                try:
                    batch = self._empty.get(timeout=0.2)
                except queue.Empty:
                    continue
                if self._fill(batch.arrays):
                    self._send(batch)
                    self._full.put(batch)
        except Exception as error:
            self._full.put(error)

    def _fill(self, arrays: Arrays) -> bool:
        for column in range(self.batch_size):
            while (ring := self.reader.ready()) is None:
                if self._stop.wait(0.0005):
                    return False
            if self._dump is not None and self._dumped < self._dump[1]:
                folder = self._dump[0]
                np.savez(folder / f"unroll_{self._dumped:06d}.npz", **ring.peek())  # type: ignore[arg-type]
                self._dumped += 1
            self.reader.take(ring, self.spec, arrays, column)
        return True

    def _send(self, batch: HostBatch) -> None:
        if batch.data is batch.host:
            return
        with self._module.stream(self._copies):
            batch.used.wait(self._copies)  # the update before last may still read what is overwritten here
            for name, tensor in batch.host.items():
                batch.data[name].copy_(tensor, non_blocking=True)
            batch.copied.record(self._copies)

    def _buffer(self) -> HostBatch:
        host = {name: torch.from_numpy(array) for name, array in self.spec.empty(self.batch_size).items()}
        data = host
        if self._device.type != "cpu":
            host = {name: tensor.pin_memory() for name, tensor in host.items()}
            data = {name: torch.empty_like(tensor, device=self._device) for name, tensor in host.items()}
        arrays = {name: tensor.numpy() for name, tensor in host.items()}
        return HostBatch(arrays, host, data, self._module.Event(), self._module.Event())
