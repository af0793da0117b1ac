"""Two machines in one folder: counting unrolls on the way from actors to a learner, and processes that carry them."""

import socket
import time
from pathlib import Path
from typing import Any

import numpy as np
import zmq

import agent_reference as reference
from agent.transport import relay as relay_module
from agent.transport import sockets, wire
from agent.transport.board import Board
from agent.transport.listener import COUNTERS, FIRST_REMOTE_ACTOR, Admission, Ledger, Listener, RemoteSettings
from agent.transport.mapped import Counters
from agent.transport.relay import Relay
from agent.transport.ring import Ring
from agent.unroll import Arrays, UnrollSpec

SPEC: UnrollSpec = reference.unroll_spec(reference.small_spec({"a": 2, "b": 3}, instruction_length=2), 3)
LEGAL, WORDS = (2, 3), 1000
ACTORS, SLOTS, LEARNER_SLOTS, COUNT = 2, 6, 4, 5000
SESSION = 77
SETTINGS = RemoteSettings(window=3, parameter_seconds=0.01, unreachable_seconds=10)


def make_world(folder: Path) -> None:
    """All mapped files, keys, and a free port."""
    for name in ("learner", "machine"):
        (folder / name).mkdir()
    sockets.make_keys(folder / "keys")
    for task in range(len(LEGAL)):
        Ring(folder / "learner" / f"ring-{task}", SPEC, LEARNER_SLOTS, create=True)
    Board(folder / "learner" / "board", COUNT, create=True).post(np.arange(COUNT, dtype=np.float32), 1, 10)
    Ledger(folder / "learner" / "ledger", create=True)
    Counters(folder / "learner" / "counters", COUNTERS, create=True)
    for index in range(ACTORS):
        Ring(folder / "machine" / f"ring-{index}", SPEC, SLOTS, create=True)
    Board(folder / "machine" / "board", COUNT, create=True)
    Counters(folder / "machine" / "counters", relay_module.COUNTERS, create=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        (folder / "port").write_text(str(free.getsockname()[1]), encoding="utf-8")


def address(folder: Path) -> str:
    return f"tcp://127.0.0.1:{(folder / 'port').read_text(encoding='utf-8')}"


def unroll(actor: int, number: int) -> Arrays:
    """One column of rows; `episode_steps` says its number, its task follows from it."""
    rows = SPEC.empty(1)
    rows["episode_steps"][...] = number
    rows["frame"][...] = number % 251
    rows["task"][...] = actor
    rows["actor"][...] = FIRST_REMOTE_ACTOR + actor
    rows["version"][...] = 1
    rows["first"][0] = True
    return rows


def number_of(found: Arrays) -> int:
    """Its number, after a look at whether it is whole."""
    number = int(found["episode_steps"][0])
    assert (found["episode_steps"] == number).all() and (found["frame"] == number % 251).all(), "torn"
    return number


class World:
    """The test's ends: the actors' and the learner's."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.actors = [Ring(folder / "machine" / f"ring-{i}", SPEC, SLOTS) for i in range(ACTORS)]
        self.learner = [[Ring(folder / "learner" / f"ring-{i}", SPEC, LEARNER_SLOTS)] for i in range(len(LEGAL))]
        self.board = Board(folder / "learner" / "board", COUNT)
        self.copy = Board(folder / "machine" / "board", COUNT)
        self.ledger = Ledger(folder / "learner" / "ledger")
        self.counters = Counters(folder / "learner" / "counters", COUNTERS)
        self.machine = Counters(folder / "machine" / "counters", relay_module.COUNTERS)
        self.read: list[list[int]] = [[] for _ in range(ACTORS)]

    def play(self, goal: int | None = None) -> None:
        """Every actor writes what has space, up to unroll `goal`."""
        for actor, ring in enumerate(self.actors):
            while len(ring) < ring.num_slots and (goal is None or ring.committed < goal):
                ring.write(unroll(actor, ring.committed), 0)

    def learn(self) -> int:
        """Read all that has come; returns how many that was."""
        count = 0
        for ring in (ring for ranks in self.learner for ring in ranks):
            while len(ring):
                found = ring.peek()
                self.read[int(found["actor"]) - FIRST_REMOTE_ACTOR].append(number_of(found))
                ring.release()
                count += 1
        return count


def admit(session: int, hello: dict[str, Any]) -> Admission | str:
    """As launch does, but that one word decides."""
    if "refuse" in hello:
        return f"not with {hello['refuse']}"
    return Admission(0 if session == SESSION else ACTORS, ACTORS, {"config": "seed: 1"})


def make_listener(folder: Path, context: zmq.Context, settings: RemoteSettings = SETTINGS) -> tuple[Listener, Any, zmq.Socket]:
    """A listener at work on the world's files, its guard and socket."""
    world = World(folder)

    def refused() -> None:
        world.counters["key"] += 1

    largest = wire.largest(wire.to_listener(SPEC))
    router, guard = sockets.listen(context, address(folder), largest, folder / "keys", refused)
    ends = (router, world.learner, world.board, world.ledger, world.counters)
    return Listener(*ends, LEGAL, WORDS, admit, settings), guard, router


def make_relay(folder: Path, context: zmq.Context, settings: RemoteSettings = SETTINGS) -> Relay:
    """A relay at work on the world's files."""
    world = World(folder)
    said = {"actors": ACTORS}

    def connect() -> zmq.Socket:
        return sockets.connect(context, address(folder), wire.largest(wire.to_relay(COUNT)), folder / "keys")

    ends = (connect, SESSION, world.actors, world.copy, COUNT, world.machine)
    return Relay(*ends, lambda: said, lambda content: None, 2, settings)


def run_listener(folder: Path) -> None:
    """For ever; waits for the port of the one before."""
    context = zmq.Context()
    listener, _, _ = make_listener(folder, context)
    while True:
        listener.step()


def run_relay(folder: Path) -> None:
    """For ever."""
    relay = make_relay(folder, zmq.Context())
    while True:
        relay.step()


def pump(*ends: Listener | Relay | World, until: Any, timeout: float = 30) -> None:
    """Let all work in turn until something is so."""
    deadline = time.monotonic() + timeout
    while not until():
        assert time.monotonic() < deadline, f"waited {timeout} s in vain"
        for end in ends:
            if isinstance(end, World):
                end.learn()
            else:
                end.step()
