"""Mailboxes and the batched policy: the actions of the local one, true versions, and deaths on both sides."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

import agent_reference as reference
from agent.inference import BatchedPolicy, LocalPolicy, answer
from agent.network import Network
from agent.transport.mailbox import Mailbox, mailbox_bytes

SPEC = reference.small_spec({"a": 2, "b": 3, "c": 4}, instruction_length=2)
UNROLL = reference.unroll_spec(SPEC, 5)
TASKS = ([0, 0, 2], [1, 1])


def pairs(folder: Path) -> tuple[list[Mailbox], list[Mailbox]]:
    """The same mailboxes as the inference process and as the actors see them."""
    made = [Mailbox(folder / f"box{i}", UNROLL, len(tasks), create=True) for i, tasks in enumerate(TASKS)]
    return made, [Mailbox(folder / f"box{i}", UNROLL, len(tasks)) for i, tasks in enumerate(TASKS)]


def policies(boxes: list[Mailbox], timeout: float = 60) -> list[BatchedPolicy]:
    return [BatchedPolicy(box, tasks, timeout, lambda: None) for box, tasks in zip(boxes, TASKS, strict=True)]


@contextmanager
def serving(network: Network, boxes: list[Mailbox], together: bool) -> Iterator[list[int]]:
    """Answer in a thread, with versions 10, 11, ...; `together` = only once all ask. Yields how many each forward answered."""
    stop, sizes = threading.Event(), []

    def serve() -> None:
        while not stop.is_set():
            waiting = [box for box in boxes if box.pending]
            if waiting and (not together or len(waiting) == len(boxes)):
                sizes.append(len(waiting))
                answer(network, 9 + len(sizes), waiting)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield sizes
    finally:
        stop.set()
        thread.join()


def scene(rng: np.random.Generator, count: int) -> tuple[np.ndarray, ...]:
    """frame, instruction, reward, first, uniforms of one row."""
    frame = rng.normal(size=(count, *SPEC.frame_shape)).astype(np.float32)
    words = rng.integers(0, 9, size=(count, 2)).astype(np.int32)
    return frame, words, rng.normal(size=count).astype(np.float32), rng.random(count) < 0.2, rng.random(count)


def test_batched_acts_as_local(tmp_path: Path) -> None:
    """Two half-groups of several tasks in one forward, 30 rows with starts of episodes: actions, log-probabilities, state."""
    network = reference.make_network(SPEC)
    served, boxes = pairs(tmp_path)
    local = [LocalPolicy(network, tasks) for tasks in TASKS]
    batched = policies(boxes)
    rng = np.random.default_rng(0)
    with serving(network, served, together=True) as sizes:
        for step in range(30):
            rows = [scene(rng, len(tasks)) for tasks in TASKS]
            threads = [threading.Thread(target=policy.act, args=row) for policy, row in zip(batched, rows, strict=True)]
            before = [policy.state() for policy in batched]
            kept = [state.copy() for state in before]
            for thread in threads:
                thread.start()
            expected = [policy.act(*row) for policy, row in zip(local, rows, strict=True)]
            for thread in threads:
                thread.join()
            for box, policy, other, (action, log_probs) in zip(boxes, batched, local, expected, strict=True):
                np.testing.assert_array_equal(policy.last_action, action)
                np.testing.assert_allclose(box.answer["log_probs"], log_probs, rtol=0, atol=1e-6)
                np.testing.assert_allclose(policy.state(), other.state(), rtol=0, atol=1e-6)
                assert policy.version == 10 + step
            assert all(np.array_equal(a, b) for a, b in zip(before, kept, strict=True)), "the state before the row is kept"
    assert sizes == [2] * 30


def test_a_request_without_answer_is_answered_by_the_successor(tmp_path: Path) -> None:
    """The first process dies with half an answer written: nothing of it is taken, and the actor only waits."""
    network = reference.make_network(SPEC)
    served, boxes = pairs(tmp_path)
    policy, local = policies(boxes)[0], LocalPolicy(network, TASKS[0])
    rows = scene(np.random.default_rng(1), 3)
    beats = threading.Semaphore(0)
    policy._beat = beats.release
    found: list[tuple[np.ndarray, np.ndarray]] = []
    thread = threading.Thread(target=lambda: found.append(policy.act(*rows)))
    thread.start()
    beats.acquire()  # the request waits
    assert served[0].pending and not served[1].pending
    served[0].answer["log_probs"][...] = 7
    served[0].answer["core_state"][:1] = 7
    assert beats.acquire(timeout=60) and thread.is_alive()
    with serving(network, [Mailbox(tmp_path / "box0", UNROLL, 3)], together=False):
        thread.join(60)
    action, log_probs = local.act(*rows)
    np.testing.assert_array_equal(found[0][0], action)
    np.testing.assert_allclose(found[0][1], log_probs, atol=1e-6)
    np.testing.assert_allclose(policy.state(), local.state(), atol=1e-6)


def test_the_successor_of_an_actor_waits_for_what_its_predecessor_asked(tmp_path: Path) -> None:
    """A request is never overwritten while it may be read; the new actor gets the answer to its own."""
    network = reference.make_network(SPEC)
    served, boxes = pairs(tmp_path)
    boxes[0].request["frame"][...] = 5
    boxes[0]._asked[0] += 1  # and killed
    rows = scene(np.random.default_rng(2), 3)
    policy = policies([Mailbox(tmp_path / "box0", UNROLL, 3), boxes[1]])[0]
    beats = threading.Semaphore(0)
    policy._beat = beats.release
    thread = threading.Thread(target=policy.act, args=rows)
    thread.start()
    beats.acquire()
    assert (served[0].request["frame"] == 5).all()
    with serving(network, served, together=False) as sizes:
        thread.join(60)
    assert sizes == [1, 1] and policy.version == 11
    local = LocalPolicy(network, TASKS[0])
    action, _ = local.act(*rows)
    np.testing.assert_array_equal(policy.last_action, action)
    np.testing.assert_allclose(policy.state(), local.state(), atol=1e-6)


def test_a_wait_ends_and_says_for_what(tmp_path: Path) -> None:
    _, boxes = pairs(tmp_path)
    beats: list[None] = []
    policy = policies(boxes, timeout=0.05)[1]
    policy._beat = lambda: beats.append(None)
    with pytest.raises(TimeoutError, match=r"waited 0 s for the inference process to answer .*box1"):
        policy.act(*scene(np.random.default_rng(0), 2))
    assert beats


def test_sizes(tmp_path: Path) -> None:
    served, boxes = pairs(tmp_path)
    assert (tmp_path / "box0").stat().st_size == mailbox_bytes(UNROLL, 3)
    assert set(boxes[0].request) == {"frame", "instruction", "reward", "first", "last_action", "core_state", "task"}
    views = [*boxes[0].request.values(), *boxes[0].answer.values()]
    for number, view in enumerate(views):  # no two overlap, and both sides see the same memory
        view[...] = number % 2 if view.dtype == bool else number
    for number, view in enumerate([*served[0].request.values(), *served[0].answer.values()]):
        assert (view == (number % 2 if view.dtype == bool else number)).all()
    with pytest.raises(ValueError, match="belongs to another run"):
        Mailbox(tmp_path / "box0", UNROLL, 4)
