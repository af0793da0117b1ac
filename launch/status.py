"""Signs of life, stage times and counts of engines, in one mapped file: each process writes its own row, everybody reads."""

import os
import time
from pathlib import Path

import numpy as np
import psutil

from agent.transport import mapped
from tasks.contract import ENGINE_COUNTS

STAGES = ("environment", "inference", "waiting", "transport")
FIELDS = ("heartbeat", "generation", "steps", "rss_bytes", *STAGES)
_HEADER = 8  # numbers: actor restarts, starts of actors in the life of the run


class Status:
    """Row 0 is the learner's, row 1 + i that of actor i; columns as FIELDS. Times are those of time.monotonic.

    Args:
        path: of the mapped file.
        num_actors, num_tasks: rows - 1, and tasks of the run.
        create: make the file (the supervisor does), or open it.
    """

    def __init__(self, path: Path, num_actors: int, num_tasks: int, create: bool = False) -> None:
        make = mapped.create if create else mapped.attach
        numbers = make(path, status_bytes(num_actors, num_tasks)).view(np.float64)
        self._header = numbers[:_HEADER]
        rows = (num_actors + 1) * len(FIELDS)
        self._rows = numbers[_HEADER : _HEADER + rows].reshape(num_actors + 1, len(FIELDS))
        self._engines = numbers[_HEADER + rows :].reshape(num_actors, num_tasks, len(ENGINE_COUNTS))
        self._process = psutil.Process(os.getpid())

    @property
    def restarts(self) -> int:
        """Restarts of actors since this start of the run."""
        return int(self._header[0])

    @restarts.setter
    def restarts(self, count: int) -> None:
        self._header[0] = count

    def beat(self, row: int) -> None:
        """I live."""
        self._rows[row, 0] = time.monotonic()

    def heartbeat(self, row: int) -> float:
        """When a row's process gave its last sign of life; 0 = never."""
        return float(self._rows[row, 0])

    def write(self, row: int, **values: float) -> None:
        """Set fields by name, and this process's resident memory."""
        for name, value in values.items():
            self._rows[row, FIELDS.index(name)] = value
        self._rows[row, FIELDS.index("rss_bytes")] = self._process.memory_info().rss

    def engines(self, actor: int, task: int) -> np.ndarray:
        """Counts of an actor's engines of one task [len(ENGINE_COUNTS)], to be written in place; they outlive the actor."""
        return self._engines[actor, task]

    def engine_totals(self) -> np.ndarray:
        """Counts of all actors' engines, [tasks, len(ENGINE_COUNTS)]."""
        return self._engines.sum(0)

    def clear(self, row: int) -> None:
        """Before a process starts anew."""
        self._rows[row] = 0

    def table(self) -> np.ndarray:
        """A copy, [1 + actors, len(FIELDS)]."""
        return self._rows.copy()


def status_bytes(num_actors: int, num_tasks: int) -> int:
    """Bytes of the mapped file."""
    return 8 * (_HEADER + (num_actors + 1) * len(FIELDS) + num_actors * num_tasks * len(ENGINE_COUNTS))
