"""Processes for tests to kill with SIGKILL: torch is imported once, then each line on stdin forks one child at work.

`python tests/agent_children.py ROLE ARGUMENT...`; prints the child's process id, and "over" when the child is gone.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

import agent_reference as reference
import remote_children
from agent import checkpoint
from agent.network import NetworkSpec
from agent.transport.board import Board, num_parameters
from agent.transport.ring import Ring
from agent.unroll import Arrays, UnrollSpec

# Large enough for a kill to hit a copy in progress.
RING_SPEC = UnrollSpec(10, (64, 64, 2), "uint8", 3, 5, 64)
RING_SLOTS = 40
BOARD_SPEC: NetworkSpec = reference.small_spec({"a": 3}, (20, 20, 1), core_size=64, hidden_size=512)
CHECKPOINT_NUMBERS = 300_000


def fill(batch: Arrays, number: int) -> None:
    """Every field of the unroll with this number says so."""
    for name, array in batch.items():
        array[...] = number if name == "version" else number % 2 if array.dtype == bool else 1 + number % 100


def content(number: int) -> dict[str, object]:
    """Of the checkpoint with this number."""
    numbers = torch.full((CHECKPOINT_NUMBERS,), float(number))
    return {"counters": {"frames": number}, "parameters": {"w": numbers}, "task_counters": {}, "network": {"legal_actions": {}}}


def write_ring(path: Path) -> None:
    """Write unrolls 0, 1, 2, ... for ever; go on where a killed writer stopped."""
    ring = Ring(path, RING_SPEC, RING_SLOTS)
    batch = RING_SPEC.empty(2)
    while True:
        fill(batch, ring.committed)
        ring.wait_for_space(1, 60.0, lambda: None, poll_seconds=0.0001)
        ring.write(batch, 1)


def publish(path: Path) -> None:
    """Post version 1, 2, 3, ... as fast as possible; all parameters equal the version."""
    network = reference.make_network(BOARD_SPEC)
    board = Board(path, num_parameters(network))
    version = max(0, board.version())
    while True:
        version += 1
        with torch.no_grad():
            for parameter in network.parameters():
                parameter.fill_(version)
        board.publish(network, version, 10 * version)


def save(path: Path) -> None:
    """Save checkpoint after checkpoint; go on after the newest."""
    try:
        number = int(checkpoint.load(path)["counters"]["frames"])
    except FileNotFoundError:
        number = 0
    while True:
        number += 1
        checkpoint.save(path, content(number), keep=2)


ROLES = {
    "ring": write_ring,
    "board": publish,
    "checkpoint": save,
    "listener": remote_children.run_listener,
    "relay": remote_children.run_relay,
}


class Nursery:
    """The test's end: start a child, and kill it."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def start(self) -> int:
        """A new child at work; its process id."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline())

    def kill(self, pid: int) -> None:
        """SIGKILL, and wait until it is gone. The child must still have been at work."""
        assert self.process.stdout is not None
        os.kill(pid, signal.SIGKILL)
        assert self.process.stdout.readline() == f"over {-signal.SIGKILL}\n"


@contextmanager
def nursery(role: str, path: Path) -> Iterator[Nursery]:
    """Children of one role; none is left behind."""
    root = Path(__file__).parents[1]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), str(root / "tests")]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, role, str(path)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True
    ) as process:
        try:
            yield Nursery(process)
        finally:
            os.killpg(process.pid, signal.SIGKILL)


def main() -> None:
    """One child per line of stdin."""
    torch.set_num_threads(1)
    for _ in sys.stdin:
        pid = os.fork()
        if pid == 0:
            signal.alarm(120)  # also where the test itself was killed, nobody stays
            ROLES[sys.argv[1]](Path(sys.argv[2]))
        print(pid, flush=True)
        _, status = os.waitpid(pid, 0)
        print("over", os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    main()
