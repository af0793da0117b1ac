"""Relay and listener over loopback with CURVE: every unroll once, whoever dies; newest parameters; nothing for strangers."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq

import agent_children as children
import remote_children as remote
import wire_fuzz
from agent.transport import sockets, wire
from agent.transport.listener import REFUSALS, Listener
from agent.transport.relay import RefusedError, Relay, greet
from agent.transport.ring import Ring
from agent.transport.wire import Kind
from remote_children import ACTORS, COUNT, SESSION, SETTINGS, SPEC, World, pump

ONE_AFTER_THE_OTHER = [[*range(40)], [*range(40)]]


class Both:
    """A world with both ends in this process, to be opened and closed at will."""

    def __init__(self, folder: Path) -> None:
        remote.make_world(folder)
        self.folder, self.world = folder, World(folder)
        self.context = zmq.Context()
        self._open: dict[str, list[Any]] = {}

    def listener(self, **changes: Any) -> Listener:
        listener, guard, socket = remote.make_listener(self.folder, self.context, replace(SETTINGS, **changes))
        self._open["listener"] = [guard, socket]
        return listener

    def relay(self, **changes: Any) -> Relay:
        relay = remote.make_relay(self.folder, self.context, replace(SETTINGS, **changes))
        self._open["relay"] = [relay]
        return relay

    def peer(self, keys: Path | None = None) -> zmq.Socket:
        """Another machine's socket, without a relay."""
        dealer = sockets.connect(self.context, remote.address(self.folder), 2**20, keys or self.folder / "keys")
        self._open.setdefault("peers", []).append(dealer)
        return dealer

    def close(self, name: str) -> None:
        for end in self._open.pop(name, []):
            end.stop() if hasattr(end, "stop") else end.close()

    def close_all(self) -> None:
        for name in list(self._open):
            self.close(name)
        self.context.term()


@pytest.fixture
def both(tmp_path: Path) -> Iterator[Both]:
    ends = Both(tmp_path)
    yield ends
    ends.close_all()


def has_read(world: World, count: int) -> Callable[[], bool]:
    return lambda: world.learn() >= 0 and all(len(read) >= count for read in world.read)


def send_and_wait(peer: zmq.Socket, listener: Listener, message: Any) -> None:
    """Handed over as soon as there is a connection."""

    def sent() -> bool:
        try:
            peer.send_multipart(message, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    pump(listener, until=sent)


def test_every_unroll_comes_once_and_in_order(both):
    world, listener, relay = both.world, both.listener(), both.relay()
    for goal in (5, 11, 40):
        pump(listener, relay, until=lambda goal=goal: world.play(goal) or has_read(world, goal)())
    assert world.read == ONE_AFTER_THE_OTHER
    pump(listener, relay, until=lambda: not any(len(ring) for ring in world.actors))
    assert world.ledger.totals() == (80, 0, 0)
    assert world.machine["acknowledged"] == 80 and world.machine["dropped"] == 0
    assert all(world.counters[kind] == 0 for kind in REFUSALS if kind not in ("stranger", "repeated"))


def test_a_slow_learner_makes_actors_wait_and_costs_nothing(both):
    """Rings of the learner, window and rings of the machine fill up; nothing is dropped, and memory is bounded."""
    world, listener, relay = both.world, both.listener(), both.relay()
    full = remote.LEARNER_SLOTS + remote.SLOTS
    pump(listener, relay, until=lambda: world.play() or all(ring.committed == full for ring in world.actors))
    for _ in range(20):
        world.play()
        listener.step(), relay.step()
    assert [ring.committed for ring in world.actors] == [full] * ACTORS
    assert all(len(queue) <= SETTINGS.window for queue in listener._waiting.values())
    pump(listener, relay, until=lambda: world.play(40) or has_read(world, 40)())
    assert world.read == ONE_AFTER_THE_OTHER and world.ledger.totals() == (80, 0, 0)


def test_a_task_that_nobody_reads_does_not_stop_the_others(both):
    world, listener, relay = both.world, both.listener(), both.relay()

    def one_task() -> bool:
        world.play(40)
        ring = world.learner[1][0]
        while len(ring):
            world.read[1].append(remote.number_of(ring.peek()))
            ring.release()
        return len(world.read[1]) == 40

    pump(listener, relay, until=one_task)
    assert world.read == [[], [*range(40)]]


def test_kills_of_relay_listener_and_both(tmp_path):
    """Processes killed with -9 at random moments; every unroll arrives once, in order, and is acknowledged."""
    remote.make_world(tmp_path)
    world, rng = World(tmp_path), np.random.default_rng(0)
    goal = 0
    with ExitStack() as stack:
        nurseries = {role: stack.enter_context(children.nursery(role, tmp_path)) for role in ("listener", "relay")}
        pids = {role: nursery.start() for role, nursery in nurseries.items()}
        for victims in [("relay",), ("listener",), ("listener", "relay")] * 2:
            goal += int(rng.integers(3, 30))
            pump(world, until=lambda goal=goal: world.play() or has_read(world, goal)())
            for role in victims:
                nurseries[role].kill(pids[role])
                pids[role] = nurseries[role].start()
        goal = max(ring.committed for ring in world.actors) + 5
        pump(world, until=lambda: world.play(goal) or has_read(world, goal)())
        assert world.read == [[*range(goal)]] * ACTORS
        pump(world, until=lambda: not any(len(ring) for ring in world.actors))
        assert world.ledger.totals() == (ACTORS * goal, 0, 0)
        for role, nursery in nurseries.items():
            nursery.kill(pids[role])


def test_a_kill_between_the_ring_and_the_ledger(both, monkeypatch):
    """The unroll is in the learner's ring, and nobody has written that down: its tag says so."""
    world, listener, relay = both.world, both.listener(), both.relay()
    pump(listener, relay, until=lambda: world.play(3) or has_read(world, 2)())

    def die(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(listener._ledger, "note", die)
        with pytest.raises(KeyboardInterrupt):
            pump(listener, relay, until=lambda: world.play(6) or False)
    before = sum(ring.committed for ranks in world.learner for ring in ranks)
    both.close("listener")
    assert world.ledger.totals()[0] == before - 1
    listener = both.listener()
    assert world.ledger.totals()[0] == before
    pump(listener, relay, until=lambda: world.play(12) or has_read(world, 12)())
    assert world.read == [[*range(12)]] * ACTORS


def test_the_oldest_are_dropped_only_while_nobody_answers(both):
    """Counted to the unroll at both ends; then comes the newest, parameters too."""
    world, listener = both.world, both.listener(unreachable_seconds=0.4)
    relay = both.relay(unreachable_seconds=0.4)
    pump(listener, relay, until=lambda: world.play(4) or has_read(world, 4)())
    pump(listener, relay, until=lambda: world.copy.version() == 1)
    both.close("listener")
    world.play()
    pump(relay, until=lambda: world.play() or world.machine["dropped"] >= 12)
    for version in range(2, 9):
        world.board.post(np.full(COUNT, version, np.float32), version, version)
    listener = both.listener(unreachable_seconds=0.4)
    pump(listener, relay, until=lambda: not relay._silent and relay._said is not None)
    goal = max(ring.committed for ring in world.actors) + 3
    pump(listener, relay, world, until=lambda: world.play(goal) or all(read and read[-1] == goal - 1 for read in world.read))
    pump(listener, relay, world, until=lambda: not any(len(ring) for ring in world.actors))
    received, lost, refused = world.ledger.totals()
    assert (received + lost, refused) == (ACTORS * goal, 0)
    assert received == sum(len(read) for read in world.read)
    assert lost == world.machine["dropped"] >= 12
    for read in world.read:
        assert read == sorted(set(read)), "none twice, none out of order"
    pump(listener, relay, until=lambda: world.copy.version() == 8)
    np.testing.assert_array_equal(world.copy.copy()[1], np.full(COUNT, 8))


def test_parameters_travel_as_changes_and_the_newest_wins(both):
    world, listener, relay = both.world, both.listener(), both.relay()
    rng = np.random.default_rng(0)
    numbers = rng.standard_normal(COUNT).astype(np.float32)
    for version in range(2, 6):
        world.board.post(numbers, version, 7 * version)
        pump(listener, relay, until=lambda version=version: world.copy.version() == version)
        posted, found = world.copy.copy()
        assert posted == (version, 7 * version)
        np.testing.assert_array_equal(found, numbers)
        numbers = (numbers * (1 + 1e-6 * rng.standard_normal(COUNT))).astype(np.float32)
    assert world.counters["saved_bytes"] > 2 * COUNT * 4, "most of four sets"
    assert world.counters["saved_bytes"] == pytest.approx(world.machine["saved_bytes"], abs=100)
    both.close("relay")
    for version in range(6, 60):
        world.board.post(numbers + version, version, 1)
        listener.step()
    relay = both.relay()
    versions = set()
    pump(listener, relay, until=lambda: versions.add(world.copy.version()) or world.copy.version() == 59)
    assert versions == {5, 59}, "no backlog"


def test_a_resumed_run_that_went_back_is_followed(both):
    """Its unrolls of parameters that never were are counted and not trained on."""
    world, listener, relay = both.world, both.listener(), both.relay()
    world.board.post(np.ones(COUNT, np.float32), 9, 1)
    pump(listener, relay, until=lambda: world.copy.version() == 9)
    both.close("listener")
    world.board.post(np.zeros(COUNT, np.float32), 0, 1)
    listener = both.listener()
    pump(listener, relay, until=lambda: world.copy.version() == 0)
    pump(listener, relay, until=lambda: world.play(5) or world.ledger.totals() == (0, 0, 10))
    assert world.counters["version"] == 10 and world.learn() == 0


def test_parameters_of_the_same_version_are_not_taken_for_the_same(both):
    """A resumed run went back, and has made another version 9."""
    world, listener, relay = both.world, both.listener(), both.relay()
    world.board.post(np.ones(COUNT, np.float32), 9, 1)
    pump(listener, relay, until=lambda: world.copy.version() == 9)
    both.close("listener")
    world.board.post(np.zeros(COUNT, np.float32), 9, 1)
    pump(both.listener(), relay, until=lambda: not world.copy.copy()[1].any())
    assert world.copy.version() == 9


def test_an_unroll_with_bad_numbers_is_counted_and_the_next_is_taken(both, capsys):
    world, listener, relay = both.world, both.listener(), both.relay()
    for number in range(4):
        rows = remote.unroll(1, number)
        rows["action"][...] = 99 if number in (1, 2) else 0
        world.actors[1].write(rows, 0)
    pump(listener, relay, world, until=lambda: world.ledger.totals() == (2, 0, 2))
    pump(listener, relay, world, until=lambda: world.read[1] == [0, 3])
    assert world.counters["unroll"] == 2
    assert capsys.readouterr().out.count("refused an unroll of actor 10001") == 1


def test_whatever_comes_is_dropped_and_counted_and_the_others_go_on(both, capsys):
    world, listener, relay = both.world, both.listener(), both.relay()
    pump(listener, relay, until=lambda: world.play(2) or has_read(world, 2)())
    peer, rng = both.peer(), np.random.default_rng(0)

    def refused() -> int:
        return sum(world.counters[kind] for kind in REFUSALS)

    before, count = refused(), 300
    for message in wire_fuzz.messages(rng, SPEC, SESSION, count):
        send_and_wait(peer, listener, message)
        listener.step()
    pump(listener, relay, until=lambda: refused() == before + count)
    for kind in ("frames", "header", "kind", "size", "checksum", "content", "stranger"):
        assert world.counters[kind] > 0, kind
    pump(listener, relay, until=lambda: world.play(20) or has_read(world, 20)())
    assert world.read == [[*range(20)]] * ACTORS
    assert capsys.readouterr().out.count("refused a message of 127.0.0.1") == 1


def test_a_huge_message_is_not_even_read(both):
    """The connection is cut; others go on."""
    world, listener, relay, peer = both.world, both.listener(), both.relay(), both.peer()
    both._open["monitor"] = [monitor := peer.get_monitor_socket(zmq.Event.DISCONNECTED)]
    send_and_wait(peer, listener, [b"x" * 10**7, b""])
    pump(listener, relay, until=lambda: monitor.poll(0))
    pump(listener, relay, until=lambda: world.play(9) or has_read(world, 9)())
    assert all(world.counters[kind] == 0 for kind in wire.FAULTS)


def test_a_replay_is_counted_and_answered(both):
    """What was taken once is not taken again, whatever its content; a flood of one actor has to say hello again."""
    world, listener = both.world, both.listener()
    peer = both.peer()
    assert greet_while(peer, listener, {}) == {"config": "seed: 1", "seen": [-1, -1]}
    payload = np.zeros(SPEC.unroll_bytes(), np.uint8)
    SPEC.copy_out(SPEC.views(payload), remote.unroll(0, 0), 0)
    for _ in range(3):
        send_and_wait(peer, listener, wire.pack(Kind.UNROLL, SESSION, 0, 0, payload.tobytes()))
    pump(listener, world, until=lambda: world.counters["repeated"] == 2)
    assert world.read == [[0], []]
    for sequence in range(1, 1 + remote.LEARNER_SLOTS + SETTINGS.window + 1):
        send_and_wait(peer, listener, wire.pack(Kind.UNROLL, SESSION, 0, sequence, payload.tobytes()))
    pump(listener, until=lambda: world.counters["flood"] >= 1)
    send_and_wait(peer, listener, wire.pack(Kind.PING, SESSION))
    pump(listener, until=lambda: world.counters["stranger"] >= 1)


def greet_while(peer: zmq.Socket, listener: Listener, hello: dict[str, Any]) -> dict[str, Any]:
    """As `greet`, with the listener in the same thread."""
    send_and_wait(peer, listener, wire.pack(Kind.HELLO, SESSION, payload=wire.pack_json(hello)))
    pump(listener, until=lambda: peer.poll(0))
    return greet(peer, SESSION, hello, 2)


def test_a_refusal_says_why(both):
    listener, peer = both.listener(), both.peer()
    with pytest.raises(RefusedError, match="not with another task table"):
        greet_while(peer, listener, {"refuse": "another task table"})
    assert both.world.counters["hello"] == 1


def test_nobody_there_ends_in_words(both):
    with pytest.raises(TimeoutError, match="no answer for 0 s"):
        greet(both.peer(), SESSION, {}, 0.01)


def test_a_run_that_is_not_ready_gives_no_answer_yet(both):
    """Before the learner has parameters nobody is let in; the relay asks again."""
    world, peer = both.world, both.peer()
    world.board._newest[0] = 0
    listener = both.listener()
    send_and_wait(peer, listener, wire.pack(Kind.HELLO, SESSION, payload=b"{}"))
    send_and_wait(peer, listener, wire.pack(Kind.PING, SESSION))
    pump(listener, until=lambda: world.counters["stranger"] == 1)  # both have come
    assert peer.poll(5000) and wire.unpack(peer.recv_multipart(), wire.to_relay(0)).kind == Kind.AGAIN
    world.board.post(np.zeros(COUNT, np.float32), 3, 0)
    pump(listener, both.relay(), until=lambda: world.copy.version() == 3)


def test_dropped_unrolls_that_had_arrived_are_no_drops(both, monkeypatch):
    """They were taken, and the answer was lost: after the cut both ends count the same."""
    world, listener = both.world, both.listener(unreachable_seconds=0.4)
    relay = both.relay(unreachable_seconds=0.4)
    pump(listener, relay, until=lambda: world.copy.version() == 1)
    monkeypatch.setattr(listener, "_acknowledge", lambda *_: None)
    pump(listener, relay, until=lambda: world.play() or world.ledger.totals()[0] == 2 * SETTINGS.window)
    both.close("listener")
    pump(relay, until=lambda: world.play() or world.machine["dropped"] >= 10)
    listener = both.listener(unreachable_seconds=0.4)
    goal = max(ring.committed for ring in world.actors) + 3
    pump(listener, relay, world, until=lambda: world.play(goal) or all(read and read[-1] == goal - 1 for read in world.read))
    pump(listener, relay, world, until=lambda: not any(len(ring) for ring in world.actors))
    received, lost, _ = world.ledger.totals()
    assert received + lost == ACTORS * goal
    assert lost == world.machine["dropped"] and world.machine["acknowledged"] == received


@pytest.mark.parametrize("kind", ["another pair", "another run", "no keys"])
def test_strangers_get_nothing(both, tmp_path_factory, kind):
    """Not even a refusal; the owner of a key that is added while the listener works gets in."""
    world, listener = both.world, both.listener()
    keys = tmp_path_factory.mktemp("keys") / "keys"
    sockets.make_keys(keys)
    run_key = (both.folder / "keys" / "run.key").read_text(encoding="utf-8")
    if kind == "another pair":
        (keys / "run.key").write_text(run_key, encoding="utf-8")
    peer = both.peer(keys)
    if kind == "no keys":
        peer = sockets.connect(both.context, remote.address(both.folder), 2**20, None)
        both._open["plain"] = [peer]
    if kind == "another pair":
        pump(listener, until=lambda: world.counters["key"] == 1)
    assert "seen" in greet_while(both.peer(), listener, {})
    assert not peer.poll(200)
    with pytest.raises(zmq.Again):
        peer.send_multipart(wire.pack(Kind.HELLO, SESSION, payload=b"{}"), zmq.NOBLOCK)
    assert all(world.counters[name] == (name == "key" and kind == "another pair") for name in REFUSALS)
    if kind == "another pair":
        public = keys / "actors.key"
        (both.folder / "keys" / "authorised" / "friend.key").write_text(public.read_text(encoding="utf-8"), encoding="utf-8")
        assert "seen" in greet_while(both.peer(keys), listener, {})


def test_keys_are_for_their_owner_only(tmp_path):
    sockets.make_keys(tmp_path / "keys")
    for path in (tmp_path / "keys").rglob("*"):
        assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600), path
    assert (tmp_path / "keys").stat().st_mode & 0o777 == 0o700
    with pytest.raises(ValueError, match=r"nothing.key is no key file: copy it"):
        sockets.read_key(tmp_path / "nothing.key")


def test_the_emptiest_rank_gets_the_next(both):
    """Two learner ranks with a ring each."""
    world, listener, relay = both.world, both.listener(), both.relay()
    other = Ring(both.folder / "learner" / "other", SPEC, remote.LEARNER_SLOTS, create=True)
    listener._rings[0].append(other)
    first = world.learner[0][0]
    pump(listener, relay, until=lambda: world.play(6) or len(first) + len(other) == 6)
    assert len(first) == len(other) == 3
