"""Signs of life, stage times and counts of engines, in one mapped file: each process writes its own row, everybody reads."""

import os
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import psutil

from agent.transport import mapped
from launch.plan import Plan
from tasks.contract import ENGINE_COUNTS

STAGES = ("environment", "inference", "waiting", "transport")
FIELDS = ("heartbeat", "generation", "steps", "rss_bytes", *STAGES)
_HEADER = 8  # numbers: restarts of workers here, and of those on other machines


class Status:
    """A row per process: learners by rank, then actors, then services; columns as FIELDS. Times are those of time.monotonic.

    Args:
        path: of the mapped file.
        num_learners, num_actors, num_services, num_tasks: of the run on this machine.
        create: make the file (the supervisor does), or open it.
    """

    def __init__(
        self, path: Path, num_learners: int, num_actors: int, num_services: int, num_tasks: int, create: bool = False
    ) -> None:
        make = mapped.create if create else mapped.attach
        num_rows = num_learners + num_actors + num_services
        numbers = make(path, status_bytes(num_rows, num_actors, num_tasks)).view(np.float64)
        self._first_actor, self._first_service = num_learners, num_learners + num_actors
        self._numbers, self._header = numbers, numbers[:_HEADER]
        rows = num_rows * len(FIELDS)
        self._rows = numbers[_HEADER : _HEADER + rows].reshape(num_rows, len(FIELDS))
        self._engines = numbers[_HEADER + rows :].reshape(num_actors, num_tasks, len(ENGINE_COUNTS))
        self._process = psutil.Process(os.getpid())

    def learner_row(self, rank: int) -> int:
        """Of a learner."""
        assert rank < self._first_actor
        return rank

    def actor_row(self, actor: int) -> int:
        """Of an actor."""
        assert self._first_actor + actor < self._first_service
        return self._first_actor + actor

    def service_row(self, index: int) -> int:
        """Of a service, counted in the order of the plan."""
        return self._first_service + index

    @property
    def restarts(self) -> int:
        """Restarts of workers since this start of the run."""
        return int(self._header[:2].sum())

    @restarts.setter
    def restarts(self, count: int) -> None:
        self._header[0] = count - self._header[1]

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
        """A copy of all rows, [rows, len(FIELDS)]."""
        return self._rows.copy()

    def actors(self) -> np.ndarray:
        """A copy of the actors' rows, [actors, len(FIELDS)]."""
        return self._rows[self._first_actor : self._first_service].copy()

    def learners(self) -> np.ndarray:
        """A copy of the learners' rows, [ranks, len(FIELDS)]."""
        return self._rows[: self._first_actor].copy()

    def snapshot(self) -> np.ndarray:
        """Everything, float64 [n], for `mirror` of a table of the same run on another machine."""
        return self._numbers.copy()

    def mirror(self, snapshots: Sequence[np.ndarray]) -> None:
        """Copy in the rows of processes that live on other machines, from all of those."""
        for numbers in snapshots:
            rows = numbers[_HEADER : _HEADER + self._rows.size].reshape(self._rows.shape)
            engines = numbers[_HEADER + self._rows.size :].reshape(self._engines.shape)
            there = rows[:, 0] > 0
            self._rows[there] = rows[there]
            actors = there[self._first_actor : self._first_service]
            self._engines[actors] = engines[actors]
        self._header[1] = sum(numbers[0] for numbers in snapshots)


def status_bytes(num_rows: int, num_actors: int, num_tasks: int) -> int:
    """Bytes of the mapped file."""
    return 8 * (_HEADER + num_rows * len(FIELDS) + num_actors * num_tasks * len(ENGINE_COUNTS))


def open_status(memory: Path, plan: Plan, create: bool = False) -> Status:
    """The status table of a run with this memory folder."""
    counts = (plan.num_ranks, len(plan.actors), len(plan.services), len(plan.task_names))
    return Status(memory / "status", *counts, create=create)
