"""One half-group asks, the inference process answers: a slot in a mapped file, with one writer for each side, without locks.

The actor alone writes the request and then moves `asked`; the inference process alone writes the answer and then moves
`answered`. A request stays as it is until it is answered: a killed inference process has not answered it, so its successor
does, from the same rows and the same core state.
"""

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from agent.transport import mapped
from agent.unroll import Arrays, Field, UnrollSpec

# Each counter has a page of its own: the two sides never share a cache line.
_PAGE = 4096
_HEADER = 2 * _PAGE
_SEEN = ("frame", "instruction", "reward", "first", "last_action")
_POLL_SECONDS = 1e-4


class Mailbox:
    """Of one half-group.

    Args:
        path: of the mapped file.
        spec: sizes.
        num_envs: E of the half-group.
        create: make the file (the supervisor does), or open it.

    Attributes:
        request: what a policy reads, [E, ...] as in agent/unroll.py: one row, `core_state` before it, and `task`.
        answer: `log_probs` float32 [E, A], `core_state` float32 [E, 2, K] after the row, `version` int64 [1].
    """

    def __init__(self, path: Path, spec: UnrollSpec, num_envs: int, create: bool = False) -> None:
        self.path, self.num_envs = path, num_envs
        buffer = (mapped.create if create else mapped.attach)(path, mailbox_bytes(spec, num_envs))
        self._asked = buffer[:8].view(np.int64)
        self._answered = buffer[_PAGE : _PAGE + 8].view(np.int64)
        request, answer = _fields(spec, num_envs)
        size = _bytes(request)
        self.request = _views(buffer[_HEADER : _HEADER + size], request)
        self.answer = _views(buffer[_HEADER + size :], answer)

    @property
    def answered(self) -> int:
        """Requests ever answered."""
        return int(self._answered[0])

    @property
    def pending(self) -> bool:
        """Whether a request waits."""
        return int(self._asked[0]) > self.answered

    def ask(self, request: Arrays, timeout_seconds: float, beat: Callable[[], None]) -> Arrays:
        """Hand over a request and wait for its answer, which is valid until the next one. `beat` is called meanwhile.

        Raises:
            TimeoutError: names the mailbox; nothing was answered for `timeout_seconds`.
        """
        self._wait(timeout_seconds, beat)  # an actor killed while it waited: its request is read until it is answered
        for name, array in self.request.items():
            array[...] = request[name]
        self._asked[0] += 1
        self._wait(timeout_seconds, beat)
        return self.answer

    def reply(self, log_probs: np.ndarray, core_state: np.ndarray, version: int) -> None:
        """Answer the request that waits."""
        self.answer["log_probs"][...], self.answer["core_state"][...] = log_probs, core_state
        self.answer["version"][0] = version
        self._answered[0] = self._asked[0]

    def _wait(self, timeout_seconds: float, beat: Callable[[], None]) -> None:
        deadline = time.monotonic() + timeout_seconds
        while self.pending:
            beat()
            if time.monotonic() > deadline:
                raise TimeoutError(f"waited {timeout_seconds:.0f} s for the inference process to answer {self.path}")
            time.sleep(_POLL_SECONDS)


def mailbox_bytes(spec: UnrollSpec, num_envs: int) -> int:
    """Bytes of the mapped file."""
    return _HEADER + sum(_bytes(fields) for fields in _fields(spec, num_envs))


def _fields(spec: UnrollSpec, num_envs: int) -> tuple[dict[str, Field], dict[str, Field]]:
    """Of request and answer, with the leading E."""
    table = {name: Field((num_envs, *field.shape), field.dtype) for name, field in spec.fields().items()}
    request = {name: table[name] for name in (*_SEEN, "core_state", "task") if name in table}
    return request, {name: table[name] for name in ("log_probs", "core_state")} | {"version": Field((1,), "int64")}


def _field_bytes(field: Field) -> int:
    return int(np.prod(field.shape, dtype=np.int64)) * np.dtype(field.dtype).itemsize


def _bytes(fields: dict[str, Field]) -> int:
    return sum(-(-_field_bytes(field) // 64) * 64 for field in fields.values())


def _views(buffer: np.ndarray, fields: dict[str, Field]) -> Arrays:
    arrays, start = {}, 0
    for name, field in fields.items():
        size = _field_bytes(field)
        arrays[name] = buffer[start : start + size].view(field.dtype).reshape(field.shape)
        start += -(-size // 64) * 64
    return arrays
