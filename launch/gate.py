"""What all learner ranks agree on before an update: whether all have a batch, what rank 0's clock says, and who has to stop.

A rank without a batch says so within half a second: a slow task never looks like a dead rank. The same exchange carries what
records need of all ranks' batches, so that rank 0 can write them, each game once.
"""

from typing import NamedTuple

import numpy as np

from agent.distributed import Ranks
from agent.unroll import Arrays, UnrollSpec
from launch.status import Status

# Fields of a batch that records are made of.
RECORDED = (
    *("task", "version", "acted_at", "actor"),
    *("frames", "episode_return", "episode_frames", "episode_steps"),
)


class Wish(NamedTuple):
    """What one rank brings to the gate. starved: it had no batch for learner.wait_seconds."""

    ready: bool
    stop: bool
    starved: bool
    log: bool
    save: bool
    measure: bool


class Agreed(NamedTuple):
    """The same on all ranks. `log`, `save` and `measure` as rank 0 wishes; arrays: RECORDED fields of all ranks' batches,
    [T+1, ranks * B] or [ranks * B], or None if a rank is not ready; starved: these ranks; stopping: those, and all
    that were told to stop."""

    stop: bool
    starved: list[int]
    log: bool
    save: bool
    measure: bool
    arrays: Arrays | None
    stopping: list[int]

    def why_stop(self, rank: int) -> str | None:
        """For the log of a `rank` that stops only because of others."""
        if not self.stopping or rank in self.stopping:
            return None
        reason = "had no batch for learner.wait_seconds" if self.starved else "was told to stop"
        return f"learner rank {', '.join(map(str, self.starved or self.stopping))} {reason}, so all stop"


class Gate:
    """The exchange.

    Args:
        ranks: who takes part; one alone passes at once.
        spec, batch_size: sizes of a batch, the same on all ranks.
    """

    def __init__(self, ranks: Ranks, spec: UnrollSpec, batch_size: int) -> None:
        self._ranks = ranks
        self._fields = {
            name: ((spec.unroll_length + 1, batch_size) if field.per_row else (batch_size,), np.dtype(field.dtype))
            for name, field in spec.fields().items()
            if name in RECORDED
        }
        self._num_bytes = sum(int(np.prod(shape)) * dtype.itemsize for shape, dtype in self._fields.values())

    def agree(self, wish: Wish, arrays: Arrays | None) -> Agreed:
        """Wait for all ranks' wishes; `arrays` is this rank's batch if it is ready."""
        if self._ranks.size == 1:
            return _agreed([wish], arrays)
        message = np.zeros(len(wish) + self._num_bytes, np.uint8)
        message[: len(wish)] = wish
        if arrays is not None:
            parts = [np.ascontiguousarray(arrays[name]).reshape(-1).view(np.uint8) for name in self._fields]
            message[len(wish) :] = np.concatenate(parts)
        rows = self._ranks.gather(message)
        wishes = [Wish(*map(bool, row[: len(wish)])) for row in rows]
        joined = self._join(rows[:, len(wish) :]) if all(one.ready for one in wishes) else None
        return _agreed(wishes, joined)

    def _join(self, rows: np.ndarray) -> Arrays:
        joined, start = {}, 0
        for name, (shape, dtype) in self._fields.items():
            end = start + int(np.prod(shape)) * dtype.itemsize
            parts = [row[start:end].copy().view(dtype).reshape(shape) for row in rows]
            joined[name] = np.concatenate(parts, axis=-1)
            start = end
        return joined


def gather_status(ranks: Ranks, status: Status, depth: int, is_apart: bool) -> int:
    """Unrolls that wait on all ranks, from `depth` on this one; and if ranks have tables of their own (`is_apart`), rank 0
    copies the others' rows into its own."""
    if ranks.size == 1:
        return depth
    numbers = np.concatenate([[float(depth)], status.snapshot() if is_apart else []])
    rows = ranks.gather(numbers.view(np.uint8)).copy().view(np.float64)
    if is_apart and ranks.rank == 0:
        status.mirror(list(rows[1:, 1:]))
    return int(rows[:, 0].sum())


def _agreed(wishes: list[Wish], arrays: Arrays | None) -> Agreed:
    starved = [rank for rank, wish in enumerate(wishes) if wish.starved]
    first = wishes[0]
    stopping = [rank for rank, wish in enumerate(wishes) if wish.stop or wish.starved]
    return Agreed(bool(stopping), starved, first.log, first.save, first.measure, arrays, stopping)
