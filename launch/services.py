"""The roles between machines: a listener beside the learner, and a relay beside the actors of another machine."""

import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import zmq

from agent.network import Network
from agent.transport import listener as listening
from agent.transport import relay as relaying
from agent.transport import sockets, wire
from agent.transport.board import Board, num_parameters
from agent.transport.ledger import Ledger
from agent.transport.listener import Listener
from agent.transport.mapped import Counters
from agent.transport.relay import RefusedError, Relay
from agent.transport.ring import Ring
from launch.config import RunFiles
from launch.plan import LISTENER, Plan
from launch.process import EXIT_REFUSED
from launch.ranks import find_place, ranks_here
from launch.remote import KEYS, LEDGER, RELAY, STARTS_AHEAD, Machine, Members, greeting, remote_ring_name, this_code
from launch.status import FIELDS, Status, open_status
from launch.workers import Worker
from tasks.instruction import NUM_BUCKETS

# "work" grows while a service does its work.
COUNTERS = {LISTENER: ("work", *listening.COUNTERS), RELAY: ("work", *relaying.COUNTERS)}


def open_counters(memory: Path, service: str, create: bool = False) -> Counters:
    """A service's numbers."""
    return Counters(memory / service, COUNTERS[service], create)


def open_remote_rings(memory: Path, plan: Plan, ranks: Sequence[int], create: bool = False) -> list[list[Ring]]:
    """Rings of unrolls from other machines, by task, then by learner rank."""
    return [
        [Ring(memory / remote_ring_name(rank, task), plan.unroll, plan.remote_slots, create) for rank in ranks]
        for task in range(len(plan.task_names))
    ]


def make_service(memory: Path, status: Status, plan: Plan, service: str) -> Worker:
    """Listener or relay, for their supervisor."""
    counters = open_counters(memory, service, create=True)
    row, title = status.service_row(plan.services.index(service)), f"the {service}"
    return Worker(service, title, (service,), row, lambda: counters["work"], {"service": service})


def listener(run_dir: Path, memory: Path, run: RunFiles, plan: Plan) -> int:
    """Serve other machines until killed. Returns the exit code."""
    settings = run.config.remote
    status, counters = open_status(memory, plan), open_counters(memory, LISTENER)
    row = status.service_row(plan.services.index(LISTENER))
    status.beat(row)
    place = find_place(os.environ)
    rings = open_remote_rings(memory, plan, ranks_here(place, plan.num_ranks))
    board = Board(memory / "board", num_parameters(Network(plan.network)))

    def refused() -> None:
        counters["key"] += 1

    try:
        members = Members(run_dir, run, place.rank if place else 0)
        keys = run_dir / KEYS if settings.encrypt else None
        largest = wire.largest(wire.to_listener(plan.unroll))
        socket, _guard = sockets.listen(zmq.Context.instance(), settings.listen, largest, keys, refused)
    except (ValueError, zmq.ZMQError) as error:
        print(f"remote.listen {settings.listen}: {error}", file=sys.stderr)
        return 1
    legal = list(plan.network.legal_actions.values())
    ledger = Ledger(run_dir / LEDGER)
    end = Listener(socket, rings, board, ledger, counters, legal, NUM_BUCKETS, members.admit, settings)
    _serve(end.step, status, row, counters)
    return 0


def relay(folder: Path, memory: Path, run: RunFiles, plan: Plan, machine: Machine) -> int:
    """Serve this machine's actors until killed, or refused by the run. Returns the exit code."""
    settings, num_actors = run.config.remote, len(plan.actors)
    status, counters = open_status(memory, plan), open_counters(memory, RELAY)
    row = status.service_row(plan.services.index(RELAY))
    status.beat(row)
    count = num_parameters(Network(plan.network))
    code = this_code()

    def hello() -> dict[str, Any]:
        generation = int(status.actors()[:, FIELDS.index("generation")].max())
        starts = num_actors + STARTS_AHEAD * (2 + generation // STARTS_AHEAD)
        return greeting(num_actors, starts, machine.agreement, code)

    def welcomed(answer: dict[str, Any]) -> None:
        replace(machine, seeds=answer["seeds"]).write(folder)

    end = Relay(
        lambda: connect(machine.address, machine.keys, count),
        machine.session,
        [Ring(memory / f"ring-{actor.index}", plan.unroll, plan.slots) for actor in plan.actors],
        Board(memory / "board", count),
        count,
        counters,
        hello,
        welcomed,
        max(sum(group.count for group in half) for actor in plan.actors for half in actor.halves),
        settings,
    )
    try:
        _serve(end.step, status, row, counters)
    except RefusedError as error:
        print(error, file=sys.stderr)
        return EXIT_REFUSED
    return 0


def connect(address: str, keys: str, count: int) -> zmq.Socket:
    """The socket of a machine that joins; errors as sockets.read_key."""
    largest = wire.largest(wire.to_relay(count))
    return sockets.connect(zmq.Context.instance(), address, largest, Path(keys) if keys else None)


def _serve(step: Callable[[], None], status: Status, row: int, counters: Counters) -> None:
    told = 0.0
    while True:
        step()
        status.beat(row)
        if time.monotonic() - told >= 1:
            told = time.monotonic()
            counters["work"] += 1
            status.write(row, steps=counters["work"])
