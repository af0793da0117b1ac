"""Ring and mapped file: nothing that was committed is lost, repeated or torn, whoever dies when."""

import gc
import time
from collections import deque
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import agent_children as children
import agent_reference as reference
from agent.transport import mapped
from agent.transport.ring import Ring, TornUnrollError, ring_bytes
from agent.unroll import Arrays

SPEC = reference.unroll_spec(reference.small_spec(instruction_length=2), 3)


def unroll(number: int, column: int = 0) -> Arrays:
    """Two columns: the given one holds this number, the other one another."""
    batch, alone = SPEC.empty(2), SPEC.empty(1)
    children.fill(batch, number + 1)
    children.fill(alone, number)
    for name, field in SPEC.fields().items():
        if field.per_row:
            batch[name][:, column] = alone[name][:, 0]
        else:
            batch[name][column] = alone[name][0]
    return batch


def check(found: Arrays, number: int) -> None:
    """Every element of every field is that of unroll `number`."""
    assert int(found["version"]) == number
    for name, array in found.items():
        if name != "version":
            expected = number % 2 if array.dtype == bool else 1 + number % 100
            assert (array == expected).all(), f"{name} of unroll {number} is torn"


class DiesAfter(dict[str, np.ndarray]):
    """A batch whose reader is killed when it asks for one field too many."""

    def __init__(self, batch: Arrays, fields: int) -> None:
        super().__init__(batch)
        self.left = fields

    def __getitem__(self, name: str) -> np.ndarray:
        if self.left == 0:
            raise KeyboardInterrupt
        self.left -= 1
        return super().__getitem__(name)


class RingMachine(RuleBasedStateMachine):
    """Writers and readers in any order, some of which die in the middle and are followed by others."""

    @initialize(num_slots=st.integers(1, 4))
    def make(self, num_slots: int) -> None:
        self.folder = TemporaryDirectory()
        self.num_slots = num_slots
        self.path = Path(self.folder.name) / "ring"
        self.writer = Ring(self.path, SPEC, num_slots, create=True)
        self.reader = Ring(self.path, SPEC, num_slots)
        self.waiting: deque[int] = deque()
        self.written = 0

    @precondition(lambda self: len(self.waiting) < self.num_slots)
    @rule()
    def write(self) -> None:
        self.writer.wait_for_space(1, 0.0, lambda: None)
        self.writer.write(unroll(self.written, 1), 1)
        self.waiting.append(self.written)
        self.written += 1

    @precondition(lambda self: len(self.waiting) < self.num_slots)
    @rule(fields=st.integers(0, len(SPEC.fields()) - 1))
    def die_while_writing(self, fields: int) -> None:
        with pytest.raises(KeyboardInterrupt):
            self.writer.write(DiesAfter(unroll(77), fields), 0)
        self.writer = Ring(self.path, SPEC, self.num_slots)

    @precondition(lambda self: self.waiting)
    @rule()
    def read(self) -> None:
        check(self.reader.peek(), self.waiting.popleft())
        self.reader.release()

    @precondition(lambda self: self.waiting)
    @rule()
    def die_while_reading(self) -> None:
        """It looked, but gave nothing back: its successor reads the same again."""
        check(self.reader.peek(), self.waiting[0])
        self.reader = Ring(self.path, SPEC, self.num_slots)

    @precondition(lambda self: len(self.waiting) == self.num_slots)
    @rule()
    def no_space(self) -> None:
        with pytest.raises(TimeoutError, match=r"waited 0 s for the learner to read from .*ring"):
            self.writer.wait_for_space(1, 0.0, lambda: None)
        with pytest.raises(AssertionError):
            self.writer.write(unroll(99), 0)

    @invariant()
    def counts(self) -> None:
        if hasattr(self, "reader"):
            assert len(self.reader) == len(self.writer) == len(self.waiting)
            assert self.reader.committed == self.written
            assert self.reader.released == self.written - len(self.waiting)

    def teardown(self) -> None:
        if hasattr(self, "folder"):
            self.folder.cleanup()


TestRing = RingMachine.TestCase
TestRing.settings = settings(deadline=None, max_examples=25, stateful_step_count=25)


def test_writers_killed_at_random_moments(tmp_path: Path) -> None:
    """A real writer, killed again and again, some times in mid-copy: the unrolls that come out are 0, 1, 2, ..., all whole."""
    ring = Ring(tmp_path / "ring", children.RING_SPEC, children.RING_SLOTS, create=True)
    rng = np.random.default_rng(0)
    number = in_mid_slot = kills = 0
    with children.nursery("ring", ring.path) as nursery:
        while kills < 15 or (in_mid_slot < 3 and kills < 200):
            kills += 1
            pid = nursery.start()
            goal, deadline = number + int(rng.integers(1, children.RING_SLOTS)), time.monotonic() + 30
            while ring.committed < goal:
                assert time.monotonic() < deadline, "the writer does not write"
            nursery.kill(pid)
            in_mid_slot += any(int(sequence[0]) == -1 for sequence in ring._sequences)
            while len(ring):
                check(ring.peek(), number)
                ring.release()
                number += 1
            assert number == ring.committed
    assert number >= 15
    assert in_mid_slot >= 3, "no kill hit a copy in progress: the test would prove nothing"


def test_a_slot_that_was_never_written_is_noticed(tmp_path: Path) -> None:
    ring = Ring(tmp_path / "ring", SPEC, 2, create=True)
    ring._committed[0] = 1
    with pytest.raises(TornUnrollError, match=r"slot 0 of .*ring holds unroll -1 instead of 0"):
        ring.peek()


def test_a_slot_half_written_or_of_the_round_before_is_noticed(tmp_path: Path) -> None:
    ring = Ring(tmp_path / "ring", SPEC, 2, create=True)
    for number in range(2):
        ring.write(unroll(number), 0)
        ring.release()
    ring._committed[0] = 3  # slot 0 still holds unroll 0
    with pytest.raises(TornUnrollError, match="holds unroll 0 instead of 2"):
        ring.peek()
    ring._committed[0] = 2
    with pytest.raises(KeyboardInterrupt):
        ring.write(DiesAfter(unroll(2), 4), 0)
    ring._committed[0] = 3
    with pytest.raises(TornUnrollError):
        ring.peek()


def test_more_than_the_ring_can_hold_is_an_error_with_both_numbers(tmp_path: Path) -> None:
    ring = Ring(tmp_path / "ring", SPEC, 3, create=True)
    with pytest.raises(ValueError, match=r"5 unrolls do not fit into .*ring: it has 3 slots"):
        ring.wait_for_space(5, 1.0, lambda: None)


def test_waiting_beats_and_ends_with_a_message(tmp_path: Path) -> None:
    ring = Ring(tmp_path / "ring", SPEC, 2, create=True)
    ring.write(unroll(0), 0)
    beats: list[float] = []
    ring.wait_for_space(1, 0.0, lambda: beats.append(0.0))
    assert not beats, "there is space: no wait"
    started = time.monotonic()
    with pytest.raises(TimeoutError, match=r"for the learner to read from .*ring"):
        ring.wait_for_space(2, 0.05, lambda: beats.append(time.monotonic()))
    assert len(beats) > 2 and time.monotonic() - started >= 0.05


def test_space_that_comes_while_waiting_is_taken(tmp_path: Path) -> None:
    ring = Ring(tmp_path / "ring", SPEC, 1, create=True)
    ring.write(unroll(0), 0)
    ring.wait_for_space(1, 5.0, ring.release)  # the beat plays the learner
    assert len(ring) == 0


@pytest.mark.parametrize("change", ["slots", "length"])
def test_the_file_of_another_configuration_is_refused(tmp_path: Path, change: str) -> None:
    Ring(tmp_path / "ring", SPEC, 2, create=True)
    longer = reference.unroll_spec(reference.small_spec(instruction_length=2), 9)
    other, slots = (longer, 2) if change == "length" else (SPEC, 3)
    sizes = f"has {ring_bytes(SPEC, 2)} bytes, this configuration needs {ring_bytes(other, slots)}"
    with pytest.raises(ValueError, match=sizes):
        Ring(tmp_path / "ring", other, slots)


def test_the_file_has_the_computed_size_and_is_reserved(tmp_path: Path) -> None:
    Ring(tmp_path / "ring", SPEC, 2, create=True)
    status = (tmp_path / "ring").stat()
    assert status.st_size == ring_bytes(SPEC, 2)
    assert status.st_blocks * 512 >= status.st_size, "a hole would become a bus error in mid-run"
    assert status.st_mode & 0o777 == 0o600


def test_mapped_files_are_made_once_and_start_at_zero(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        mapped.attach(tmp_path / "file", 100)
    made = mapped.create(tmp_path / "file", 100)
    assert made.shape == (100,) and made.dtype == np.uint8 and (made == 0).all()
    with pytest.raises(FileExistsError):
        mapped.create(tmp_path / "file", 100)
    made[7] = 9
    opened = mapped.attach(tmp_path / "file", 100)
    assert opened[7] == 9
    opened[8] = 5
    assert made[8] == 5
    with pytest.raises(ValueError, match="has 100 bytes, this configuration needs 101"):
        mapped.attach(tmp_path / "file", 101)


def test_without_space_nothing_is_left(tmp_path: Path) -> None:
    with reference.full_disk(1000), pytest.raises(OSError):
        mapped.create(tmp_path / "file", 10_000)
    assert not (tmp_path / "file").exists()


def test_descriptors_stay_constant(tmp_path: Path) -> None:
    """A mapped file costs one while it is open, and writing and reading none."""

    def descriptors() -> int:
        gc.collect()  # what other tests left
        return len(list(Path("/proc/self/fd").iterdir()))

    ring = Ring(tmp_path / "ring", SPEC, 2, create=True)
    before = descriptors()
    for number in range(50):
        ring.write(unroll(number), 0)
        ring.peek()
        ring.release()
    assert descriptors() == before
    others = [Ring(tmp_path / "ring", SPEC, 2) for _ in range(20)]
    after_opening = descriptors()
    for other in others:
        assert other.committed == 50
    del other, others
    assert after_opening <= before + 20 and descriptors() == before
