"""The actors' end of the network: their unrolls from this machine's rings to the learner, its parameters onto their board.

A slot is given back when the learner's end has acknowledged its unroll. A slow learner makes the actors wait; only while it
cannot be reached are the oldest unrolls dropped, counted, so that the actors play on.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import zmq

from agent.transport import mapped, wire
from agent.transport.board import Board
from agent.transport.listener import RemoteSettings
from agent.transport.ring import Ring
from agent.transport.wire import Kind, Message, WireError

COUNTERS = ("acknowledged", "dropped", "version", "newest_version", "parameters_at", "saved_bytes", "heard_at")
# Pings within the time after which the learner counts as unreachable.
_PINGS = 20
_IDLE_MS = 2


class RefusedError(RuntimeError):
    """The run does not want this machine; the message says why."""


def greet(socket: zmq.Socket, session: int, hello: dict[str, Any], timeout_seconds: float) -> dict[str, Any]:
    """Say hello until there is an answer, and return it.

    Raises:
        RefusedError: the run refuses; says why.
        TimeoutError: nobody answers.
    """
    deadline = time.monotonic() + timeout_seconds
    while time.monotonic() < deadline:
        _send(socket, Kind.HELLO, session, payload=wire.pack_json(hello))
        if not socket.poll(1000):
            continue
        try:
            message = wire.unpack(socket.recv_multipart(), wire.to_relay(0))
            content = wire.unpack_json(message.payload)
        except WireError:
            continue
        if message.kind == Kind.REFUSED:
            raise RefusedError(str(content.get("reason")))
        if message.kind == Kind.WELCOME:
            return content
    raise TimeoutError(f"no answer for {timeout_seconds:.0f} s")


class Relay:
    """Serves one machine in one thread; call `step` for ever.

    Args:
        connect: makes a DEALER, see sockets.connect; again when nobody answers, as ZeroMQ gives up after some errors.
        session: number of this machine's stay, the same when a relay follows another.
        rings: of the actors; this object is their only reader.
        board: of the actors; this object is its only writer.
        counters: this object is their only writer.
        hello: what to say; it is said again when it changes.
        welcomed: called with the answer.
        keep_free: unrolls that an actor hands over together.
        settings: of the run.
    """

    def __init__(
        self,
        connect: Callable[[], zmq.Socket],
        session: int,
        rings: Sequence[Ring],
        board: Board,
        count: int,
        counters: mapped.Counters,
        hello: Callable[[], dict[str, Any]],
        welcomed: Callable[[dict[str, Any]], None],
        keep_free: int,
        settings: RemoteSettings,
    ) -> None:
        self._connect, self._session, self._rings, self._board, self._counters = connect, session, rings, board, counters
        self._hello, self._welcomed, self._keep_free, self._settings = hello, welcomed, keep_free, settings
        self._count = count
        self._sizes = wire.to_relay(count)
        self._said: dict[str, Any] | None = None  # the hello that was answered
        self._asked: dict[str, Any] | None = None
        self._next = [ring.released for ring in rings]
        self._in_doubt: list[list[int]] = [[] for _ in rings]  # dropped after they were sent
        self._numbers: np.ndarray | None = None
        self._version = -1
        self._socket = connect()
        self._heard = self._connected = time.monotonic()
        self._pinged = 0.0
        self._silent = False

    def step(self) -> None:
        """Read what has come, send what waits.

        Raises:
            RefusedError: the run does not want this machine any more.
        """
        now = time.monotonic()
        busy = False
        while self._receive():
            busy = True
        if now - self._pinged >= self._settings.unreachable_seconds / _PINGS:
            self._pinged = now
            self._ping()
        self._notice_silence(now)
        if self._silent:
            self._make_room()
            if now - self._connected > self._settings.unreachable_seconds:
                self.close()
                self._socket, self._connected, self._said = self._connect(), now, None
        elif self._said is not None:
            busy = self._send_unrolls() or busy
        if not busy:
            self._socket.poll(_IDLE_MS)

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()

    def _receive(self) -> bool:
        try:
            frames = self._socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return False
        self._heard = time.monotonic()
        self._counters["heard_at"] = int(self._heard)
        try:
            self._handle(wire.unpack(frames, self._sizes))
        except WireError as error:
            print(f"a message of the run is not to be read ({error.fault}: {error})", flush=True)
            self._said = None
        return True

    def _handle(self, message: Message) -> None:
        if message.kind == Kind.REFUSED:
            raise RefusedError(str(wire.unpack_json(message.payload).get("reason")))
        if message.kind == Kind.AGAIN:
            if self._said is not None:
                self._said, self._pinged = None, 0.0
        elif message.kind == Kind.WELCOME:
            self._welcome(wire.unpack_json(message.payload))
        elif message.kind == Kind.PONG:
            self._counters["newest_version"] = message.sequence
        elif message.kind == Kind.ACK and 0 <= message.ring < len(self._rings):
            self._acknowledged(message.ring, message.sequence)
        elif message.kind == Kind.PARAMETERS:
            self._parameters(message)

    def _welcome(self, content: dict[str, Any]) -> None:
        seen = content.get("seen")
        if not isinstance(seen, list) or len(seen) != len(self._rings):
            raise WireError("content", "a welcome for another machine")
        self._welcomed(content)
        for index, sequence in enumerate(seen):
            self._acknowledged(index, int(sequence))
            self._next[index] = self._rings[index].released
        self._said = self._asked
        self._want(-1)  # all of them, whatever is here: a resumed run may have gone back

    def _acknowledged(self, index: int, sequence: int) -> None:
        """Everything up to `sequence` has arrived."""
        ring, doubtful = self._rings[index], self._in_doubt[index]
        arrived = [one for one in doubtful if one <= sequence]
        self._in_doubt[index] = doubtful[len(arrived) :]
        self._counters["dropped"] -= len(arrived)
        self._counters["acknowledged"] += len(arrived)
        while ring.released <= sequence and len(ring):
            ring.release()
            self._counters["acknowledged"] += 1
        self._next[index] = max(self._next[index], ring.released)

    def _parameters(self, message: Message) -> None:
        base = self._numbers if message.ring >= 0 else None
        if message.ring >= 0 and message.ring != self._version:
            self._want(-1)
            return
        self._numbers, frames = wire.unpack_parameters(message.payload, self._count, base)
        self._version = message.sequence
        self._board.post(self._numbers, self._version, frames)
        self._counters["version"], self._counters["parameters_at"] = self._version, int(time.monotonic())
        self._counters["newest_version"] = max(self._version, self._counters["newest_version"])
        self._counters["saved_bytes"] += 4 * self._count - message.payload.nbytes
        self._want(self._version)

    def _ping(self) -> None:
        if self._said is not None and self._hello() == self._said:
            self._send(Kind.PING)
            return
        self._said, self._asked = None, self._hello()
        self._send(Kind.HELLO, payload=wire.pack_json(self._asked))

    def _notice_silence(self, now: float) -> None:
        silent = now - self._heard > self._settings.unreachable_seconds
        if silent != self._silent:
            self._silent = silent
            state = f"has not answered for {now - self._heard:.0f} s: the oldest unrolls are dropped" if silent else "answers"
            print(f"the run {state} ({self._counters['dropped']} dropped so far)", flush=True)

    def _make_room(self) -> None:
        """Drop the oldest unrolls where the actor would have to wait."""
        for index, ring in enumerate(self._rings):
            while len(ring) and ring.num_slots - len(ring) < self._keep_free:
                if ring.released < self._next[index]:
                    self._in_doubt[index].append(ring.released)
                ring.release()
                self._counters["dropped"] += 1
            self._next[index] = max(self._next[index], ring.released)

    def _send_unrolls(self) -> bool:
        """One of each ring at a time, as far as the window allows; whether there was any."""
        sent = False
        for index, ring in enumerate(self._rings):
            sequence = self._next[index]
            if sequence < ring.committed and sequence - ring.released < self._settings.window:
                if not self._send(Kind.UNROLL, index, sequence, ring.bytes_of(sequence).tobytes()):
                    return sent
                self._next[index] += 1
                sent = True
        return sent

    def _want(self, version: int) -> None:
        if not self._send(Kind.WANT, sequence=version):
            self._said = None

    def _send(self, kind: Kind, ring: int = 0, sequence: int = 0, payload: bytes = b"") -> bool:
        return _send(self._socket, kind, self._session, ring, sequence, payload)


def _send(socket: zmq.Socket, kind: Kind, session: int, ring: int = 0, sequence: int = 0, payload: bytes = b"") -> bool:
    """Whether it was handed over: not while there is no connection."""
    try:
        socket.send_multipart(wire.pack(kind, session, ring, sequence, payload), zmq.NOBLOCK)
    except zmq.Again:
        return False
    return True
