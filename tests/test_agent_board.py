"""Board: the newest parameters win, and a reader who was overtaken while copying never returns a mix."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import agent_children as children
import agent_reference as reference
from agent.network import Network
from agent.transport import board as board_module
from agent.transport.board import Board, Posted, board_bytes, num_parameters

SPEC = reference.small_spec({"a": 2, "b": 3}, (20, 20, 1), "uint8", torso="small", instruction_length=3)


def constant(network: Network, value: float) -> Network:
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.fill_(value)
    return network


def values(network: Network) -> set[float]:
    return {value for parameter in network.parameters() for value in parameter.detach().unique().tolist()}


@pytest.fixture
def boards(tmp_path: Path) -> Iterator[tuple[Board, Board]]:
    """The learner's and an actor's end."""
    count = num_parameters(reference.make_network(SPEC))
    yield Board(tmp_path / "board", count, create=True), Board(tmp_path / "board", count)


def test_every_parameter_arrives_bit_for_bit(boards: tuple[Board, Board]) -> None:
    """Also convolutions, whose memory is channels-last."""
    source, target = reference.make_network(SPEC, 1), reference.make_network(SPEC, 2)
    boards[0].publish(source, 3, 4000)
    assert boards[1].read(target) == Posted(3, 4000)
    for (name, sent), (_, received) in zip(source.named_parameters(), target.named_parameters(), strict=True):
        assert torch.equal(sent, received), name


def test_buffers_travel_too_and_what_cannot_is_refused(tmp_path: Path) -> None:
    """A network with BatchNorm: actors must not play with another one than the learner's."""
    source, target = (torch.nn.BatchNorm1d(3, dtype=torch.float32) for _ in range(2))
    with pytest.raises(ValueError, match=r"num_batches_tracked is torch\.int64.*persistent=False"):
        num_parameters(source)
    for layer in (source, target):
        layer.num_batches_tracked = None
    source(torch.randn(8, 3) + 5)
    board = Board(tmp_path / "with-buffers", num_parameters(source), create=True)
    board.publish(source, 1, 8)
    board.read(target)
    assert source.running_mean is not None and source.running_mean.abs().sum() > 0
    assert torch.equal(source.running_mean, target.running_mean) and torch.equal(source.running_var, target.running_var)


def test_the_newest_wins(boards: tuple[Board, Board]) -> None:
    """A late reader gets the newest, not the backlog; every publication is seen at once."""
    network, copy = reference.make_network(SPEC), reference.make_network(SPEC)
    assert boards[1].version() == -1
    for version in range(5):
        boards[0].publish(constant(network, version), version, 10 * version)
        assert boards[1].version() == version
    assert boards[1].read(copy) == Posted(4, 40) and values(copy) == {4.0}
    for version in range(5, 9):
        boards[0].publish(constant(network, version), version, 10 * version)
        assert boards[1].read(copy) == Posted(version, 10 * version) and values(copy) == {float(version)}
    assert boards[1].read(copy) == Posted(8, 80), "what was read stays there"


def test_nothing_posted_ends_with_a_message(boards: tuple[Board, Board]) -> None:
    started = time.monotonic()
    with pytest.raises(TimeoutError, match="for the learner to post parameters"):
        boards[1].read(reference.make_network(SPEC), timeout_seconds=0.05)
    assert time.monotonic() - started >= 0.05


def test_a_writer_killed_in_mid_publication_leaves_the_version_before(
    boards: tuple[Board, Board], monkeypatch: pytest.MonkeyPatch
) -> None:
    network, copy = reference.make_network(SPEC), reference.make_network(SPEC)
    boards[0].publish(constant(network, 1), 1, 10)
    boards[0].publish(constant(network, 2), 2, 20)

    def dies(array: np.ndarray) -> torch.Tensor:
        array[: array.size // 2] = 3
        raise KeyboardInterrupt

    monkeypatch.setattr(board_module.torch, "from_numpy", dies)
    with pytest.raises(KeyboardInterrupt):
        boards[0].publish(constant(network, 3), 3, 30)
    monkeypatch.undo()
    assert boards[1].read(copy) == Posted(2, 20) and values(copy) == {2.0}
    boards[0].publish(constant(network, 4), 4, 40)
    assert boards[1].read(copy) == Posted(4, 40) and values(copy) == {4.0}


@pytest.mark.parametrize("publications", [1, 2, 3])
@pytest.mark.parametrize("whole", [True, False], ids=["finished", "still at it"])
def test_a_reader_overtaken_in_mid_copy_copies_again(
    boards: tuple[Board, Board], monkeypatch: pytest.MonkeyPatch, publications: int, whole: bool
) -> None:
    """Half of the numbers are copied, then the learner posts; its last publication may even be under way."""
    network, copy = reference.make_network(SPEC), reference.make_network(SPEC)
    boards[0].publish(constant(network, 1), 1, 10)
    copyto, interruptions = np.copyto, 0

    def interrupted(target: np.ndarray, source: np.ndarray) -> None:
        nonlocal interruptions
        interruptions += 1
        half = len(target) // 2
        copyto(target[:half], source[:half])
        if interruptions == 1:
            for version in range(2, 2 + publications):
                boards[0].publish(constant(network, version), version, 10 * version)
            if not whole and publications > 1:  # the one before the last was the newest; the last has only begun
                boards[0]._heads[int(boards[0]._newest[0]) - 1][1] = -1
                boards[0]._newest[0] = 3 - boards[0]._newest[0]
        copyto(target[half:], source[half:])

    monkeypatch.setattr(board_module.np, "copyto", interrupted)
    posted = boards[1].read(copy, timeout_seconds=5)
    assert values(copy) == {float(posted.version)} and posted.frames == 10 * posted.version
    assert interruptions == (1 if publications == 1 else 2), "one publication goes to the other buffer: no harm done"


def test_racing_a_learner_that_posts_as_fast_as_it_can(tmp_path: Path) -> None:
    """A real process posts vectors of equal numbers without a pause: what is read is of one version, and versions grow."""
    copy = reference.make_network(children.BOARD_SPEC)
    board = Board(tmp_path / "board", num_parameters(copy), create=True)
    seen: list[int] = []
    with children.nursery("board", tmp_path / "board") as nursery:
        pid = nursery.start()
        deadline = time.monotonic() + 60
        while len(set(seen)) < 40 and time.monotonic() < deadline:
            posted = board.read(copy, timeout_seconds=30)
            assert values(copy) == {float(posted.version)}
            assert posted.frames == 10 * posted.version
            seen.append(posted.version)
        nursery.kill(pid)
        pid = nursery.start()  # a learner that was killed in mid-publication has a successor
        while board.version() <= seen[-1]:
            assert time.monotonic() < deadline + 30
        posted = board.read(copy)
        assert values(copy) == {float(posted.version)}
        nursery.kill(pid)
    assert seen == sorted(seen) and len(set(seen)) == 40


def test_the_file_of_another_network_is_refused(tmp_path: Path) -> None:
    Board(tmp_path / "board", 100, create=True)
    with pytest.raises(ValueError, match=rf"has {board_bytes(100)} bytes, this configuration needs {board_bytes(99)}"):
        Board(tmp_path / "board", 99)


def test_memory_stays_flat_while_reading(boards: tuple[Board, Board]) -> None:
    """Buffers are allocated once: the address of the copy does not change, and no list grows."""
    network, copy = reference.make_network(SPEC), reference.make_network(SPEC)
    addresses: set[Any] = set()
    for version in range(20):
        boards[0].publish(network, version, 0)
        boards[1].read(copy)
        addresses.add((boards[1]._copy.ctypes.data, next(copy.parameters()).data_ptr()))
    assert len(addresses) == 1
