"""The learner's end of the network: unrolls of other machines into its rings, parameters from its board to them.

Each unroll exactly once: it carries its number in its actor's ring, and only numbers above the last are taken. The last ones
are in the ledger; one that was committed to a ring in the instant before a kill is known by the tag in its slot.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import zmq

from agent.transport import mapped, wire
from agent.transport.board import Board
from agent.transport.inspection import fault_of
from agent.transport.ring import Ring
from agent.transport.wire import Kind, Message, WireError
from agent.unroll import UnrollSpec

# Remote actors in the life of a run, and the number of the first: local ones count from 0.
MAX_REMOTE_ACTORS = 2**16
FIRST_REMOTE_ACTOR = 10_000
# Why messages are refused: damaged on the way, of a stranger, not admitted, repeated, more than agreed, or bad content.
REFUSALS = (*wire.FAULTS, "content", "key", "stranger", "hello", "ring", "repeated", "flood", "unroll", "version")
COUNTERS = ("machines", "actors", "saved_bytes", *REFUSALS)
_MESSAGES_AT_ONCE = 64
_SNAPSHOTS = 4
_MAX_TOLD = 1000
_IDLE_MS, _BUSY_MS = 10, 1


@dataclass(frozen=True)
class RemoteSettings:
    """Actors on other machines.

    Attributes:
        listen: address for them, such as tcp://0.0.0.0:5555; empty = no actors on other machines.
        only: no actors on this machine.
        encrypt: false = without keys, then on this machine's own address (127.0.0.1) only.
        slots: unrolls of a task from other machines that may wait for a learner.
        window: unrolls of an actor that may be on their way or wait in the listener's memory.
        parameter_seconds: at least so long between two sets of parameters for a machine.
        unreachable_seconds: a machine that hears nothing from the learner for so long drops its oldest unrolls where actors
            would have to wait.
    """

    listen: str = ""
    only: bool = False
    encrypt: bool = True
    slots: int = field(default=32, metadata={"min": 1})
    window: int = field(default=8, metadata={"min": 1, "max": 64})
    parameter_seconds: float = field(default=0.2, metadata={"min": 0})
    unreachable_seconds: float = field(default=10.0, metadata={"min": 1})


class Ledger:
    """Per remote actor, by number: unrolls whose number is known, how many of them never came, and how many were refused.

    Args:
        path: of the mapped file, in the run folder: a resumed run goes on with it.
        create: make the file, or open it.
    """

    def __init__(self, path: Path, create: bool = False) -> None:
        make = mapped.create if create else mapped.attach
        self._rows = make(path, 24 * MAX_REMOTE_ACTORS).view(np.int64).reshape(MAX_REMOTE_ACTORS, 3)

    def next(self, number: int) -> int:
        """The lowest number of an unroll that is not known yet."""
        return int(self._rows[number, 0])

    def lost_before(self, number: int, sequence: int) -> int:
        """Lost unrolls of an actor, if `sequence` is the next to come."""
        return int(self._rows[number, 1]) + sequence - self.next(number)

    def note(self, number: int, sequence: int, lost: int, refused: int = 0) -> None:
        """Unroll `sequence` is known now; doing it twice does no harm but for `refused`."""
        row = self._rows[number]
        row[2] += refused
        row[1] = lost
        row[0] = sequence + 1

    def totals(self) -> tuple[int, int, int]:
        """Unrolls received, lost and refused in the life of the run."""
        known, lost, refused = self._rows.sum(0).tolist()
        return known - lost - refused, lost, refused


class Admission(NamedTuple):
    """Who may send: numbers first to first + actors - 1 in the ledger are this session's; `answer` goes into the WELCOME."""

    first: int
    actors: int
    answer: dict[str, Any]


@dataclass
class _Machine:
    session: int
    first: int
    actors: int
    identity: bytes
    heard: float
    want: int | None = None  # it has this version and waits for another
    served: float = 0.0


class _Waiting(NamedTuple):
    machine: _Machine
    sequence: int
    payload: np.ndarray
    task: int | None  # None: refused, but its number is known


class Listener:
    """Serves all machines in one thread; call `step` for ever.

    Args:
        socket: a ROUTER, see sockets.listen.
        rings: by task, then by learner rank; this object is their only writer.
        board: the learner's.
        ledger, counters: this object is their only writer.
        legal_actions: of each task [N]. num_words: largest word id.
        admit: session and HELLO -> an admission, or the reason of a refusal in words; WireError for what is no HELLO.
        settings: of the run.
    """

    def __init__(
        self,
        socket: zmq.Socket,
        rings: Sequence[Sequence[Ring]],
        board: Board,
        ledger: Ledger,
        counters: mapped.Counters,
        legal_actions: Sequence[int],
        num_words: int,
        admit: Callable[[int, dict[str, Any]], Admission | str],
        settings: RemoteSettings,
    ) -> None:
        self._socket, self._rings, self._board, self._ledger, self._counters = socket, rings, board, ledger, counters
        self._legal_actions, self._num_words, self._admit, self._settings = legal_actions, num_words, admit, settings
        self._spec: UnrollSpec = rings[0][0].spec
        self._sizes = wire.to_listener(self._spec)
        self._machines: dict[int, _Machine] = {}
        self._sessions: dict[bytes, int] = {}
        self._waiting: dict[int, deque[_Waiting]] = {}
        self._snapshots: dict[int, tuple[np.ndarray, int]] = {}
        self._packed: dict[tuple[int, int], bytes] = {}
        self._snapped = self._counted = -1e9
        self._told: set[str] = set()
        for ring in (ring for ranks in rings for ring in ranks):
            for number, sequence, lost in ring.tags():
                if number and sequence >= ledger.next(number - 1):
                    ledger.note(number - 1, sequence, lost)

    def step(self) -> None:
        """Read what has come, place what waits, answer who asks."""
        timeout = _BUSY_MS if self._waiting else _IDLE_MS
        if self._socket.poll(timeout):
            for _ in range(_MESSAGES_AT_ONCE):
                try:
                    frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
                except zmq.Again:
                    break
                self._receive(frames)
        self._place()
        now = time.monotonic()
        self._serve(now)
        if now - self._counted >= 1:
            self._counted = now
            here = [m for m in self._machines.values() if now - m.heard < self._settings.unreachable_seconds]
            self._counters["machines"], self._counters["actors"] = len(here), sum(m.actors for m in here)

    def _receive(self, frames: list[zmq.Frame]) -> None:
        identity = frames[0].bytes
        try:
            message = wire.unpack([frame.buffer for frame in frames[1:]], self._sizes)
            if message.kind == Kind.HELLO:
                self._hello(identity, message)
            else:
                self._from_machine(identity, message)
        except WireError as error:
            self._refuse(error, identity, frames[0])

    def _refuse(self, error: WireError, identity: bytes, frame: zmq.Frame) -> None:
        """Count and drop. A known peer has to say hello again: it sends anew what got lost here."""
        self._counters[error.fault] += 1
        self._sessions.pop(identity, None)
        try:
            peer = str(frame.get("Peer-Address")).removeprefix("::ffff:")
        except zmq.ZMQError:
            peer = "unknown"
        if error.fault not in ("stranger", "repeated") and peer not in self._told and len(self._told) < _MAX_TOLD:
            self._told.add(peer)
            print(f"refused a message of {peer} ({error.fault}: {error}); more of this peer are only counted", flush=True)

    def _hello(self, identity: bytes, message: Message) -> None:
        if self._board.version() < 0:
            return  # the learner is not ready: it will ask again
        if message.session < 1:
            raise WireError("content", "no session")
        admission = self._admit(message.session, wire.unpack_json(message.payload))
        if isinstance(admission, str):
            self._counters["hello"] += 1
            self._send(identity, Kind.REFUSED, message.session, payload=wire.pack_json({"reason": admission}))
            return
        first, actors, answer = admission
        machine = self._machines.setdefault(message.session, _Machine(message.session, first, actors, identity, 0.0))
        self._sessions.pop(machine.identity, None)
        self._sessions[identity] = message.session
        machine.identity, machine.heard, machine.want = identity, time.monotonic(), None
        numbers = range(first, first + actors)
        for number in numbers:
            self._waiting.pop(number, None)  # it sends again what was not acknowledged
        seen = [self._ledger.next(number) - 1 for number in numbers]
        self._send(identity, Kind.WELCOME, message.session, payload=wire.pack_json({**answer, "seen": seen}))

    def _from_machine(self, identity: bytes, message: Message) -> None:
        if self._sessions.get(identity) != message.session:
            self._send(identity, Kind.AGAIN, message.session)
            raise WireError("stranger", "said no hello")
        machine = self._machines[message.session]
        machine.heard = time.monotonic()
        if message.kind == Kind.PING:
            self._send(identity, Kind.PONG, message.session, sequence=self._board.version())
        elif message.kind == Kind.WANT:
            machine.want = message.sequence
        else:
            self._unroll(machine, message)

    def _unroll(self, machine: _Machine, message: Message) -> None:
        if not 0 <= message.ring < machine.actors or message.sequence < 0:
            raise WireError("ring", f"ring {message.ring}, unroll {message.sequence} of a machine with {machine.actors} actors")
        number = machine.first + message.ring
        queue = self._waiting.setdefault(number, deque())
        if message.sequence < (queue[-1].sequence + 1 if queue else self._ledger.next(number)):
            self._counters["repeated"] += 1
            self._acknowledge(machine, message.ring, self._ledger.next(number) - 1)
        elif len(queue) >= self._settings.window:
            raise WireError("flood", f"more than {self._settings.window} unrolls of an actor at once")
        else:
            payload = np.frombuffer(message.payload, np.uint8)
            queue.append(_Waiting(machine, message.sequence, payload, self._inspect(payload, number)))
        if not queue:
            del self._waiting[number]

    def _inspect(self, payload: np.ndarray, number: int) -> int | None:
        """The unroll's task, or None if the learner must not see it."""
        unroll = self._spec.views(payload)
        fault = fault_of(unroll, self._spec, self._legal_actions, self._num_words, FIRST_REMOTE_ACTOR + number)
        if fault is None and int(unroll["version"]) <= self._board.version():
            return int(unroll["task"])
        self._counters["unroll" if fault else "version"] += 1
        who = f"actor {FIRST_REMOTE_ACTOR + number}"
        if fault and who not in self._told and len(self._told) < _MAX_TOLD:
            self._told.add(who)
            print(f"refused an unroll of {who} ({fault}); more of this actor are only counted", flush=True)
        return None

    def _place(self) -> None:
        """Every actor's oldest unroll first, in turn, into the emptiest ring of its task; what finds no place waits."""
        for number in list(self._waiting):
            queue = self._waiting.pop(number)
            while queue and self._commit(number, queue[0]):
                one = queue.popleft()
                self._acknowledge(one.machine, number - one.machine.first, one.sequence)
            if queue:
                self._waiting[number] = queue

    def _commit(self, number: int, one: _Waiting) -> bool:
        """Whether the unroll is in a ring, or is counted as refused."""
        lost = self._ledger.lost_before(number, one.sequence)
        if one.task is not None:
            ring = min(self._rings[one.task], key=len)
            if len(ring) == ring.num_slots:
                return False
            ring.write_bytes(one.payload, (number + 1, one.sequence, lost))
        self._ledger.note(number, one.sequence, lost, refused=one.task is None)
        return True

    def _acknowledge(self, machine: _Machine, ring: int, sequence: int) -> None:
        self._send(machine.identity, Kind.ACK, machine.session, ring, sequence)

    def _serve(self, now: float) -> None:
        """Newer parameters for those who wait; one set at a time, so that a slow machine gets the newest and no backlog."""
        newest, pause = self._board.version(), self._settings.parameter_seconds
        for machine in self._machines.values():
            if machine.want is None or machine.want == newest or now - machine.served < pause:
                continue
            if now - self._snapped >= pause and newest not in self._snapshots:
                self._snapshot(now)
            version = max(self._snapshots)
            if machine.want == version:
                continue
            base = machine.want if machine.want in self._snapshots else -1
            payload = self._pack(version, base)
            if self._send(machine.identity, Kind.PARAMETERS, machine.session, base, version, payload):
                self._counters["saved_bytes"] += 4 * len(self._snapshots[version][0]) - len(payload)
            machine.want, machine.served = None, now

    def _snapshot(self, now: float) -> None:
        self._snapped = now
        posted, numbers = self._board.copy()
        self._snapshots[posted.version] = numbers.copy(), posted.frames
        while len(self._snapshots) > _SNAPSHOTS:
            del self._snapshots[min(self._snapshots)]
        self._packed.clear()

    def _pack(self, version: int, base: int) -> bytes:
        if (base, version) not in self._packed:
            numbers, frames = self._snapshots[version]
            before = self._snapshots[base][0] if base >= 0 else None
            self._packed[base, version] = wire.pack_parameters(numbers, frames, before)
        return self._packed[base, version]

    def _send(self, identity: bytes, kind: Kind, session: int, ring: int = 0, sequence: int = 0, payload: bytes = b"") -> bool:
        """Whether it was handed over. A peer that is gone, or reads nothing, has to say hello again."""
        try:
            self._socket.send_multipart([identity, *wire.pack(kind, session, ring, sequence, payload)], zmq.NOBLOCK)
        except (zmq.Again, zmq.ZMQError):
            self._sessions.pop(identity, None)
            return False
        return True
