"""From rings to batches: turns, balance, identity of what was written, errors of the thread, dumped unrolls."""

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import agent_reference as reference
from agent.batching import Batcher, HostBatch, RingReader
from agent.transport.ring import Ring, TornUnrollError
from agent.unroll import Arrays

SPEC = reference.unroll_spec(reference.small_spec({"a": 2, "b": 3}, instruction_length=2), 3)


def make_rings(folder: Path, count: int, slots: int = 8) -> list[Ring]:
    return [Ring(folder / f"ring{index}", SPEC, slots, create=True) for index in range(count)]


def unroll(task: int, number: int, frames: int = 4, seed: int | None = None) -> Arrays:
    """One column, of random numbers, or all the same; row 0's frames were counted before and must not count again."""
    batch = SPEC.empty(1)
    if seed is not None:
        rng = np.random.default_rng(seed)
        for array in batch.values():
            array[...] = rng.integers(0, 2 if array.dtype == bool else 100, size=array.shape)
    batch["task"][:], batch["version"][:] = task, number
    batch["frames"][0], batch["frames"][1:] = 1000, frames
    return batch


def reader(
    rings: Sequence[Ring], balance: str = "actors", tasks: int = 2, frames: np.ndarray | None = None, slack: int = 10**9
) -> RingReader:
    start = np.zeros(tasks, np.int64) if frames is None else frames
    return RingReader(rings, [[index % tasks] for index in range(len(rings))], balance, start, slack)


def drain(source: RingReader, count: int) -> list[tuple[int, int]]:
    """(index of the ring, number of the unroll) of the next unrolls; stops when nothing may be read."""
    batch, found = SPEC.empty(1), []
    for _ in range(count):
        ring = source.ready()
        if ring is None:
            break
        source.take(ring, SPEC, batch, 0)
        found.append((source.rings.index(ring), int(batch["version"][0])))
    return found


def test_rings_take_turns(tmp_path: Path) -> None:
    """A ring that is always full starves nobody; each gives its unrolls in the order of writing."""
    rings = make_rings(tmp_path, 3)
    for index, count in enumerate((5, 2, 1)):
        for number in range(count):
            rings[index].write(unroll(0, number), 0)
    assert drain(reader(rings), 20) == [(0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (0, 2), (0, 3), (0, 4)]


def test_a_ring_that_fills_again_waits_for_its_turn(tmp_path: Path) -> None:
    rings = make_rings(tmp_path, 2)
    source = reader(rings)
    for number in range(3):
        rings[1].write(unroll(1, number), 0)
    order = []
    for number in range(6):
        if len(rings[0]) == 0:
            rings[0].write(unroll(0, number), 0)
        order += [index for index, _ in drain(source, 1)]
    assert order == [0, 1, 0, 1, 0, 1]


def test_depth_and_whom_a_batch_waits_for(tmp_path: Path) -> None:
    rings = make_rings(tmp_path, 3)
    source = reader(rings)
    assert source.missing(["catch", "café"]) == "actor 0 (catch), actor 1 (café), actor 2 (catch)"
    for ring in (rings[0], rings[2], rings[2], rings[2]):
        ring.write(unroll(0, 0), 0)
    assert source.depth() == 4 and source.missing(["catch", "café"]) == "actor 1 (café)"
    rings[1].write(unroll(1, 0), 0)
    assert source.missing(["catch", "café"]) == "nobody"
    of_a_rank = RingReader(source.rings[:1], [[0]], "actors", np.zeros(2), 0, [7])
    while len(of_a_rank.rings[0]):
        of_a_rank.rings[0].release()
    assert of_a_rank.missing(["catch", "café"]) == "actor 7 (catch)"


def test_balance_by_frames_bounds_the_lead(tmp_path: Path) -> None:
    """Task 0's actor is 10 times as fast: with `actors` it feeds more, with `frames` it never leads by more than the slack."""
    leads = {}
    for balance in ("actors", "frames"):
        folder = tmp_path / balance
        folder.mkdir()
        rings = make_rings(folder, 2)
        source = reader(rings, balance, slack=60)
        frames, worst = np.zeros(2), 0.0
        for step in range(200):
            while len(rings[0]) < 4:
                rings[0].write(unroll(0, step, frames=4), 0)
            if step % 10 == 0:
                rings[1].write(unroll(1, step, frames=4), 0)
            for index, _ in drain(source, 1):
                frames[index] += 3 * 4
            worst = max(worst, frames[0] - frames[1])
        leads[balance] = worst
    # It may read while the lead is at most 60, and then gets one unroll of 12 more.
    assert leads["frames"] <= 60 + 12 and leads["actors"] > 1000


def test_balance_by_frames_takes_the_poorest_first(tmp_path: Path) -> None:
    rings = make_rings(tmp_path, 3)
    source = reader(rings, "frames", tasks=3, frames=np.array([100, 20, 55]))
    for index, ring in enumerate(rings):
        for number in range(4):
            ring.write(unroll(index, number, frames=10), 0)
    # An unroll is 3 * 10 frames: 20 -> 50 -> 80, then 55 -> 85, then 80 -> 110.
    assert [index for index, _ in drain(source, 4)] == [1, 1, 2, 1]


def test_counts_of_a_resumed_run_go_on(tmp_path: Path) -> None:
    """Task 0 has led since before the restart: nothing of it is read, although it is all there is; the caller's array stays."""
    rings = make_rings(tmp_path, 2)
    rings[0].write(unroll(0, 0), 0)
    frames = np.array([10**10, 10**10 - 61])
    assert drain(reader(rings, "frames", frames=frames, slack=60), 1) == []
    assert drain(reader(rings, "frames", frames=frames, slack=61), 1) == [(0, 0)]
    assert frames.tolist() == [10**10, 10**10 - 61]


@contextmanager
def batcher(source: RingReader, size: int, dump: tuple[Path, int] | None = None, prefetch: int = 1) -> Iterator[Batcher]:
    made = Batcher(source, SPEC, size, dump=dump, prefetch=prefetch)
    try:
        yield made
    finally:
        made.close()
        assert not made._thread.is_alive()


def test_a_batch_is_what_was_written(tmp_path: Path) -> None:
    rings = make_rings(tmp_path, 2)
    written = {}
    for number in range(8):
        index = number % 2
        written[number] = unroll(index, number, seed=number)
        rings[index].write(written[number], 0)
    with batcher(reader(rings), 4) as source:
        for start in (0, 4):
            batch = source.next(10)
            assert batch is not None
            for column in range(4):
                for name, field in SPEC.fields().items():
                    where = (slice(None), column) if field.per_row else (column,)
                    expected = written[start + column][name][(slice(None), 0) if field.per_row else (0,)]
                    np.testing.assert_array_equal(batch.arrays[name][where], expected, err_msg=name)
                    np.testing.assert_array_equal(batch.host[name].numpy()[where], expected, err_msg=name)
            assert batch.data is batch.host
            source.release(batch)
    assert all(len(ring) == 0 for ring in rings)


def test_a_batch_in_use_is_not_overwritten(tmp_path: Path) -> None:
    """Two buffers: while two batches are held no third comes; after a release the next one does."""
    rings = make_rings(tmp_path, 1)
    for number in range(6):
        rings[0].write(unroll(0, number), 0)
    with batcher(reader(rings), 2) as source:
        held = [source.next(10), source.next(10)]
        assert source.next(0.3) is None
        assert [batch.arrays["version"].tolist() for batch in held if batch] == [[0, 1], [2, 3]]
        assert held[0] is not None
        source.release(held[0])
        third = source.next(10)
        assert third is not None and third.arrays["version"].tolist() == [4, 5]


def test_without_prefetch_a_batch_is_filled_only_when_the_one_before_is_given_back(tmp_path: Path) -> None:
    rings = make_rings(tmp_path, 1)
    for number in range(4):
        rings[0].write(unroll(0, number), 0)
    with batcher(reader(rings), 2, prefetch=0) as source:
        held = source.next(10)
        assert held is not None and source.next(0.3) is None
        assert len(rings[0]) == 2, "they stay in the ring"
        source.release(held)
        second = source.next(10)
        assert second is not None and second.arrays["version"].tolist() == [2, 3]


class NotedEvent:
    """Stands for a GPU's event: writes down what happens to it, and what was on the device by then."""

    def __init__(self, name: str, batch: HostBatch, log: list[tuple[str, list[int]]]) -> None:
        self._name, self._version, self._log = name, batch.data["version"], log

    def _note(self, what: str) -> None:
        self._log.append((f"{self._name} {what}", self._version.tolist()))

    def record(self, stream: object) -> None:
        self._note("recorded")

    def wait(self, stream: object) -> None:
        self._note("awaited")

    def synchronize(self) -> None:
        self._note("reached")


class CopyingBatcher(Batcher):
    """The CPU as if it were a GPU: `data` is memory of its own."""

    log: list[tuple[str, list[int]]]

    def _buffer(self) -> HostBatch:
        made = super()._buffer()
        made = replace(made, data={name: torch.zeros_like(tensor) for name, tensor in made.host.items()})
        return replace(made, copied=NotedEvent("copied", made, self.log), used=NotedEvent("used", made, self.log))


def test_copies_to_a_device_are_in_order(tmp_path: Path) -> None:
    """Copied after the last use, used after the copy, and given back after both; one batch ahead."""
    rings = make_rings(tmp_path, 1)
    for number in range(1, 4):
        rings[0].write(unroll(0, number, seed=number), 0)
    CopyingBatcher.log = []
    source = CopyingBatcher(reader(rings), SPEC, 1)
    try:
        for number in range(1, 4):
            batch = source.next(10)
            assert batch is not None and batch.data["version"].tolist() == [number]
            for name, tensor in batch.data.items():
                assert tensor is not batch.host[name] and torch.equal(tensor.nan_to_num(), batch.host[name].nan_to_num())
            source.release(batch)
    finally:
        source.close()
    for number in (1, 2, 3):
        before = max(0, number - 2)
        steps = [what for what, version in source.log if version == [number]]
        assert ("used awaited", [before]) in source.log
        assert steps[:4] == ["copied recorded", "copied awaited", "copied reached", "used recorded"]


def test_waiting_for_a_batch_ends_and_loses_nothing(tmp_path: Path) -> None:
    rings = make_rings(tmp_path, 1)
    rings[0].write(unroll(0, 0), 0)
    with batcher(reader(rings), 2) as source:
        started = time.monotonic()
        assert source.next(0.3) is None
        assert 0.29 <= time.monotonic() - started < 5
        rings[0].write(unroll(0, 1), 0)
        batch = source.next(10)
        assert batch is not None and batch.arrays["version"].tolist() == [0, 1], "what had been read is not lost"


def test_an_error_of_the_thread_surfaces(tmp_path: Path) -> None:
    rings = make_rings(tmp_path, 1)
    rings[0]._committed[0] = 1  # never written
    with batcher(reader(rings), 1) as source, pytest.raises(TornUnrollError, match="slot 0"):
        source.next(10)


def test_dumped_unrolls_hold_every_field_as_it_was_received(tmp_path: Path) -> None:
    (tmp_path / "unrolls").mkdir()
    rings = make_rings(tmp_path, 1)
    for number in range(4):
        rings[0].write(unroll(0, number, seed=number), 0)
    with batcher(reader(rings), 2, (tmp_path / "unrolls", 3)) as source:
        for _ in range(2):
            batch = source.next(10)
            assert batch is not None
            source.release(batch)
    files = sorted((tmp_path / "unrolls").iterdir())
    assert [file.name for file in files] == [f"unroll_00000{number}.npz" for number in range(3)]
    for number, file in enumerate(files):
        with np.load(file) as found:
            assert set(found.files) == set(SPEC.fields())
            for name, field in SPEC.fields().items():
                expected = unroll(0, number, seed=number)[name]
                np.testing.assert_array_equal(found[name], expected[:, 0] if field.per_row else expected[0])
                assert found[name].dtype == np.dtype(field.dtype)


def test_a_full_dump_folder_surfaces(tmp_path: Path) -> None:
    rings = make_rings(tmp_path, 1)
    rings[0].write(unroll(0, 0), 0)
    with batcher(reader(rings), 1, (tmp_path / "missing", 1)) as source, pytest.raises(OSError):
        source.next(10)


def test_writers_and_batcher_at_the_same_time(tmp_path: Path) -> None:
    """Small rings, threads that write as there is space: 60 batches hold each unroll exactly once, per ring in order."""
    rings = make_rings(tmp_path, 3, slots=2)
    each = 60

    def write(index: int) -> None:
        for number in range(each):
            rings[index].wait_for_space(1, 30, lambda: None, poll_seconds=0.0001)
            rings[index].write(unroll(index % 2, 1000 * index + number), 0)

    threads = [threading.Thread(target=write, args=(index,)) for index in range(3)]
    with batcher(reader(rings), 3) as source:
        for thread in threads:
            thread.start()
        found: list[int] = []
        for _ in range(60):
            batch = source.next(30)
            assert batch is not None
            found += batch.arrays["version"].tolist()
            source.release(batch)
        for thread in threads:
            thread.join(10)
    for index in range(3):
        assert [number % 1000 for number in found if number // 1000 == index] == list(range(each))


def test_tasks_of_other_ranks_do_not_hold_back_those_that_come_here(tmp_path: Path) -> None:
    """Task 2 has no ring here, so nobody has to wait until it has caught up."""
    rings = make_rings(tmp_path, 2)
    source = reader(rings, "frames", 2, np.array([500, 500, 0]), slack=10)
    for index in range(2):
        rings[index].write(unroll(index, 0), 0)
    assert len(drain(source, 2)) == 2
