"""Faults between machines: rows of the table of tests/faults.py."""

import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import zmq

from agent.transport import sockets, wire
from agent.transport.listener import REFUSALS
from fault_remote import Distance, Machine, RemoteRun, free_address, two_namespaces
from fault_runs import Broken, Result, restart_lines
from fault_shop import Row, Shop, enter
from launch.config import read_run
from launch.plan import make_plan
from wire_fuzz import messages

CUT_SECONDS, STALL_SECONDS = 60, 14  # the second a little more than remote.unreachable_seconds
LATENCY_SECONDS = 0.05


def remote_run(shop: Shop) -> RemoteRun:
    """The run that remote rows share, alive."""
    found = shop.shared("remote", lambda folder: RemoteRun(folder, shop.seed, free_address()))
    assert isinstance(found, RemoteRun)
    return found


def relays_killed(shop: Shop, result: Result) -> None:
    """The machine's actors must not notice."""
    run = remote_run(shop)
    machine = run.machines[0]
    for _ in range(result.times):
        kill_relay(shop, run, machine, result)
    events = [line["service"] for line in restart_lines(machine.folder)]
    result.expect(events[-result.times :] == ["relay"] * result.times, f"restarts: {events}")


def kill_relay(shop: Shop, run: RemoteRun, machine: Machine, result: Result) -> None:
    """At any moment."""
    time.sleep(shop.random.uniform(0, 0.5))
    actors, pid = machine.actors(), run.wait(lambda: machine.pids()["relay"])
    moment = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    run.wait(lambda: machine.pids()["relay"] not in (pid, None))
    arrive(run, machine)
    result.seconds.append(time.monotonic() - moment)
    result.expect(machine.actors() == actors, "actors were replaced")


def listeners_killed(shop: Shop, result: Result) -> None:
    """The learner and the machine's actors must not notice."""
    run = remote_run(shop)
    machine, known = run.machines[0], len(run.restarts())
    for _ in range(result.times):
        time.sleep(shop.random.uniform(0, 0.5))
        actors, pid = machine.actors(), run.wait(lambda: run.pids()["workers"]["listener"])
        moment = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        run.wait(lambda pid=pid: run.pids()["workers"]["listener"] not in (pid, None))
        arrive(run, machine)
        result.seconds.append(time.monotonic() - moment)
        result.expect(machine.actors() == actors, "actors were replaced")
    reasons = run.restarts()[known:]
    result.expect(reasons == ["was killed by SIGKILL"] * result.times, f"restarts: {reasons}")


def arrive(run: RemoteRun, machine: Machine) -> None:
    """Wait until unrolls of all its actors arrive again, newer parameters come back, and the learner goes on."""
    version, updates = machine.counters["version"], run.board.version()
    committed = [ring.committed for ring in machine.rings]
    run.wait(lambda: all(ring.released > before for ring, before in zip(machine.rings, committed, strict=True)))
    run.wait(lambda: machine.counters["version"] > max(version, updates) and run.board.version() > updates)


def fuzzed_with_key(shop: Shop, result: Result) -> None:
    """A peer with a valid key says nothing that is right."""
    run = remote_run(shop)
    before, spec = refusals(run), make_plan(read_run(run.run_dir)).unroll
    updates, context = run.board.version(), zmq.Context()
    moment = time.monotonic()
    peer = sockets.connect(context, run.address, 2**20, run.run_dir / "keys")
    try:
        rng, session = np.random.default_rng(shop.seed), 2**51 + 1
        for frames in messages(rng, spec, session, result.times):
            if not peer.poll(60_000, zmq.POLLOUT):
                raise Broken("the listener takes no more messages")
            peer.send_multipart(frames, zmq.NOBLOCK)
            while peer.poll(0):
                peer.recv_multipart()
        run.wait(lambda: sum(refusals(run).values()) - sum(before.values()) >= result.times)
    finally:
        peer.close()
        context.destroy(linger=0)
    result.seconds.append(time.monotonic() - moment)
    after_fuzz(run, before, updates, result)
    result.expect(sum(result.found["refused"].values()) == result.times, "the counts are not those of the messages")


def fuzzed_without_key(shop: Shop, result: Result) -> None:
    """Raw bytes, a peer without keys, and one with a key that nobody knows."""
    run = remote_run(shop)
    before, spec = refusals(run), make_plan(read_run(run.run_dir)).unroll
    updates, moment = run.board.version(), time.monotonic()
    rng = np.random.default_rng(shop.seed + 1)
    host, port = run.address.removeprefix("tcp://").split(":")
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x01"
    for frames in messages(rng, spec, 2**51 + 1, result.times):
        start = (b"", greeting + b"NULL".ljust(20, b"\0") + bytes(32), greeting + b"CURVE".ljust(20, b"\0") + bytes(32))
        with socket.create_connection((host, int(port)), 60) as stranger:
            try:
                stranger.sendall(start[int(rng.integers(3))] + b"".join(framed(part) for part in frames))
            except OSError:  # it has hung up
                pass
    wrong_key(run)
    run.wait(lambda: refusals(run)["key"] > before["key"])
    result.seconds.append(time.monotonic() - moment)
    after_fuzz(run, before, updates, result)
    result.expect(set(result.found["refused"]) == {"key"}, "messages without a key were read")


def framed(part: bytes) -> bytes:
    """As ZeroMQ sends a frame."""
    return b"\x02" + len(part).to_bytes(8, "big") + part


def wrong_key(run: RemoteRun) -> None:
    """A peer with a pair of its own asks in."""
    context = zmq.Context()
    peer = context.socket(zmq.DEALER)
    peer.setsockopt(zmq.LINGER, 0)
    peer.curve_publickey, peer.curve_secretkey = zmq.curve_keypair()
    peer.curve_serverkey = sockets.read_key(run.run_dir / "keys" / "run.key")[0]
    peer.connect(run.address)
    peer.send_multipart(wire.pack(wire.Kind.PING, 1))
    if peer.poll(500):
        raise Broken("a peer with another key was answered")
    context.destroy(linger=0)


def refusals(run: RemoteRun) -> dict[str, int]:
    """Counts by kind."""
    return {kind: run.counters[kind] for kind in REFUSALS}


def after_fuzz(run: RemoteRun, before: dict[str, int], updates: int, result: Result) -> None:
    """Training goes on, nobody was replaced; counts by kind into the row."""
    result.found["refused"] = {kind: count - before[kind] for kind, count in refusals(run).items() if count > before[kind]}
    arrive(run, run.machines[0])
    result.expect(run.board.version() > updates, "training stood still")
    result.expect(run.ledger.totals()[2] == 0, "unrolls of the machine were refused")


@contextmanager
def far_machine(run: RemoteRun, name: str) -> Iterator[tuple[Distance, Machine]]:
    """One actor at a distance joins for a while."""
    distance = Distance(run.address, LATENCY_SECONDS)
    try:
        machine = run.join(name, distance.address, 1)
        arrive(run, machine)
        yield distance, machine
        run.leave(machine)
    finally:
        distance.close()


def latency_added(shop: Shop, result: Result) -> None:
    """A machine far away plays as well as a near one."""
    run = remote_run(shop)
    for number in range(result.times):
        with far_machine(run, f"far-{number}") as (_, machine):
            moment, sent = time.monotonic(), machine.counters["acknowledged"]
            for _ in range(5):
                arrive(run, machine)
            seconds = time.monotonic() - moment
            result.seconds.append(seconds / 5)
            result.found["far_unrolls_per_second"] = round((machine.counters["acknowledged"] - sent) / seconds, 1)
            result.expect(not restart_lines(machine.folder), "its workers were replaced")


def connections_stalled(shop: Shop, result: Result) -> None:
    """Nothing arrives for a while, and then what was under way as well."""
    run = remote_run(shop)
    for number in range(result.times):
        with far_machine(run, f"stalled-{number}") as (distance, machine):
            cut(run, machine, lambda on, distance=distance: distance.cut(on), STALL_SECONDS, result)


def cut(run: RemoteRun, machine: Machine, switch, seconds: float, result: Result) -> None:
    """Cut for so long: the actors live and play, the drops are counted alike at both ends, the newest parameters come."""
    actors, lost = machine.actors(), run.ledger.totals()[1]
    dropped = machine.counters["dropped"]
    switch(True)
    time.sleep(seconds)
    result.expect(machine.counters["dropped"] > dropped, "nothing was dropped")
    committed = sum(ring.committed for ring in machine.rings)
    run.wait(lambda: sum(ring.committed for ring in machine.rings) > committed)  # the actors play on
    updates, moment = run.board.version(), time.monotonic()
    switch(False)
    run.wait(lambda: machine.counters["version"] >= updates and run.board.version() > updates)
    arrive(run, machine)
    arrive(run, machine)
    result.seconds.append(time.monotonic() - moment)
    result.expect(machine.actors() == actors and not restart_lines(machine.folder), "its workers were replaced")
    here, there = machine.counters["dropped"] - dropped, run.ledger.totals()[1] - lost
    result.found["dropped_here_and_there"] = f"{here} / {there}"
    result.expect(here == there, f"the machine counts {here} dropped unrolls, the learner's end {there}")


def network_cut(shop: Shop, result: Result) -> None:
    """The cable between two network namespaces, learner in one, actors in the other."""
    with two_namespaces() as cable:
        run = RemoteRun(shop.folder / "cut", shop.seed, f"tcp://{cable.address_a}:5555", cable.a, cable.b)
        try:
            run.start()
            for _ in range(result.times):
                arrive(run, run.machines[0])
                cut(run, run.machines[0], lambda on: cable.set("down" if on else "up"), CUT_SECONDS, result)
            run.interrupt()
        finally:
            run.kill()
        enter(result, run.books()[0])


REMOTE_ROWS = (
    Row(
        "relay killed", relays_killed, "kill -9 of the relay of another machine",
        "replaced; its actors play on, no unroll is lost uncounted", 1, 30, "remote",
    ),
    Row(
        "listener killed", listeners_killed, "kill -9 of the listener",
        "replaced; learner and actors go on, no unroll is lost uncounted", 1, 30, "remote",
    ),
    Row(
        "fuzz with key", fuzzed_with_key, "wrong messages to the listener, with a valid key",
        "all refused, counted by kind; training goes on", 500, 10_000, "remote",
    ),
    Row(
        "fuzz without key", fuzzed_without_key, "connections with wrong bytes, without a key or with another",
        "none is read; training goes on", 500, 10_000, "remote",
    ),
    Row(
        "latency", latency_added, f"a machine {LATENCY_SECONDS * 1000:.0f} ms away joins and leaves",
        "its unrolls and newer parameters keep coming", 1, 3, "remote",
    ),
    Row(
        "stalled", connections_stalled, f"its connection stalls for {STALL_SECONDS} s",
        "actors play on; drops counted alike at both ends; newest parameters after", 1, 10, "remote",
    ),
    Row(
        "network cut", network_cut, f"cable between two network namespaces out for {CUT_SECONDS} s",
        "actors play on; drops counted alike at both ends; newest parameters after", 0, 1, "",
    ),
)  # fmt: skip
