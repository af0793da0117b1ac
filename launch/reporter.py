"""One record of metrics.jsonl: what happened since the last one, and where the run stands."""

import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import psutil

from agent.conflict import Conflict
from agent.diagnostics import SUMS, summarise
from agent.distributed import Ranks
from agent.learner import Counters
from launch.records import TaskRecords
from launch.status import FIELDS, STAGES, Status
from tasks.contract import ENGINE_COUNTS
from tasks.suite import Suite


class Reporter:
    """Adds up batches, and makes a record of them.

    Args:
        suite: for normalised scores.
        records: counts and returns per task.
        status: stage times of the actors.
        counters: the learner's.
        conflict: measurements of the tasks' gradients.
        ranks: the learner's, with the time that it spent in exchanges with the others.
    """

    def __init__(
        self,
        suite: Suite,
        records: TaskRecords,
        status: Status,
        counters: Counters,
        conflict: Conflict,
        ranks: Ranks | None = None,
    ) -> None:
        self._suite, self._records, self._status, self._counters = suite, records, status, counters
        self._ranks = ranks or Ranks()
        self._conflict = conflict
        self._scored = {
            task.name: task.random_score is not None and task.random_score != task.human_score for task in suite.tasks
        }
        self._start()

    def _start(self) -> None:
        self._began = time.monotonic()
        self._before = Counters(**vars(self._counters))
        self._task_frames = self._records.frames.copy()
        self._table = self._status.actors()
        self._sums = np.zeros((len(self._suite.tasks), len(SUMS)))
        self._waited, self._ranks_seconds = 0.0, self._ranks.seconds
        self._updating = 0.0
        self._ages_versions: list[np.ndarray] = []
        self._ages_seconds: list[np.ndarray] = []
        self._unroll_tasks: list[np.ndarray] = []
        self.health: dict[str, Any] = {}  # of agent/health.py, once per record
        self._last_sums = np.zeros_like(self._sums)
        self._samples = 0.0
        self._losses: list[float] = []
        self._norms: list[float] = []

    @property
    def seconds(self) -> float:
        """Since the last record."""
        return time.monotonic() - self._began

    @property
    def has_news(self) -> bool:
        """Whether there was an update since the last record."""
        return bool(self._unroll_tasks)

    def waited(self, seconds: float) -> None:
        """The learner, or another rank, had no batch for so long."""
        self._waited += seconds

    def add(self, arrays: Mapping[str, np.ndarray], result: Mapping[str, Any], version: int, seconds: float) -> None:
        """One update of `seconds` with parameters `version` on a batch [T+1, B, ...]; `result` is Learner.update's."""
        self._updating += seconds
        self._sums += result["task_sums"]
        self._last_sums += result["last_sums"]
        self._samples += result["samples"]
        self._ages_versions.append(version - arrays["version"])
        self._ages_seconds.append(time.time() - arrays["acted_at"])
        self._unroll_tasks.append(arrays["task"].copy())
        if np.isfinite([result["loss"], result["gradient_norm"]]).all():
            self._losses.append(result["loss"])
            self._norms.append(result["gradient_norm"])

    def record(self, learning_rate: float, queue_depth: int) -> dict[str, Any]:
        """The record since the last one; starts the next. Without a value, a key is left out."""
        seconds = max(self.seconds, 1e-9)
        counters, before = self._counters, self._before
        actors = self._actors(seconds)
        waiting, exchanging = self._waited / seconds, (self._ranks.seconds - self._ranks_seconds) / seconds
        record: dict[str, Any] = {
            "frames": counters.frames,
            "steps": counters.steps,
            "updates": counters.updates,
            "episodes": counters.episodes,
            "seconds": round(counters.seconds, 3),
            "interval_seconds": seconds,
            "frames_per_second": (counters.frames - before.frames) / seconds,
            "steps_per_second": (counters.steps - before.steps) / seconds,
            "updates_per_second": (counters.updates - before.updates) / seconds,
            "samples_per_second": self._samples / seconds,
            "learning_rate": learning_rate,
            "skipped_updates": counters.skipped_updates,
            "actor_restarts": self._status.restarts,
            "queue_depth_unrolls": queue_depth,
            "learner_waiting_seconds": self._waited,
            "learner_waiting_share": waiting,
            "learner_updating_share": self._updating / seconds,
            **({"learner_ranks_waiting_share": exchanging} if self._ranks.size > 1 else {}),
            **actors,
            "limited_by": _limit(waiting, actors),
            **summarise(self._sums.sum(0)),
            **{f"{name}_after_reuse": value for name, value in self._after_reuse().items()},
            **self.health,
        }
        for name, ages in (("versions", self._ages_versions), ("seconds", self._ages_seconds)):
            if ages:
                joined = np.concatenate(ages)
                record[f"sample_age_{name}_mean"] = float(joined.mean())
                record[f"sample_age_{name}_max"] = float(joined.max())
        if self._losses:
            record["loss"] = float(np.mean(self._losses))
            record["gradient_norm"] = float(np.mean(self._norms))
        if cosines := self._conflict.record():
            record["gradient_cosines"] = cosines
        record["memory_bytes"] = self._memory()
        engines = self._status.engine_totals() if self._suite.adapter == "dmlab" else None
        record["tasks"] = {name: self._task(i, seconds, engines) for i, name in enumerate(self._suite.task_names)}
        normalised = [task["normalised_percent"] for task in record["tasks"].values() if "normalised_percent" in task]
        if len(normalised) == len(self._suite.tasks):
            record["mean_normalised_percent"] = float(np.mean(normalised))
        self._start()
        return record

    def _after_reuse(self) -> dict[str, float]:
        """How far the policy had moved when a batch was gone through for the last time, if that was not the first."""
        if np.array_equal(self._sums, self._last_sums):
            return {}
        means = summarise(self._last_sums.sum(0))
        return {name: means[name] for name in ("kl_behaviour_target", "off_policy_share") if name in means}

    def _actors(self, seconds: float) -> dict[str, float]:
        """Share of the actors' time per stage, mean over actors; restarts between two records are left out."""
        table = self._status.actors()
        same = table[:, FIELDS.index("generation")] == self._table[:, FIELDS.index("generation")]
        if not same.any():
            return {}
        columns = [FIELDS.index(stage) for stage in STAGES]
        spent = (table[:, columns] - self._table[:, columns])[same].mean(0) / seconds
        shares = {f"actors_{stage}_share": float(share) for stage, share in zip(STAGES, spent, strict=True)}
        return {**shares, "actors_waiting_seconds": shares["actors_waiting_share"] * seconds}

    def _memory(self) -> dict[str, int]:
        rss = self._status.actors()[:, FIELDS.index("rss_bytes")]
        actors = {f"actor_{index}": int(count) for index, count in enumerate(rss)}
        others = self._status.learners()[1:, FIELDS.index("rss_bytes")]
        learners = {f"learner_{rank}": int(count) for rank, count in enumerate(others, 1)}
        return {"learner": psutil.Process().memory_info().rss, **learners, **actors}

    def _task(self, index: int, seconds: float, engines: np.ndarray | None) -> dict[str, Any]:
        records, name = self._records, self._suite.task_names[index]
        frames = int(records.frames[index])
        numbers: dict[str, Any] = {
            "frames": frames,
            "steps": int(records.steps[index]),
            "episodes": int(records.episodes[index]),
            "frames_per_second": (frames - int(self._task_frames[index])) / seconds,
            "share": frames / max(1, int(records.frames.sum())),
            **summarise(self._sums[index]),
        }
        if engines is not None:
            counts = zip(ENGINE_COUNTS, engines[index].tolist(), strict=True)
            numbers |= {key: count if key.endswith("seconds") else int(count) for key, count in counts}
        if (ages := self._task_ages(index)).size:
            numbers["sample_age_versions_mean"] = float(ages.mean())
        if (norm := self._conflict.norm(index)) is not None:
            numbers["gradient_norm"] = norm
        recent = records.recent[index]
        if recent:
            numbers["return_mean"] = float(np.mean(recent))
            numbers["return_episodes"] = len(recent)
            if self._scored[name]:
                numbers["normalised_percent"] = self._suite.normalise(name, numbers["return_mean"])
        return numbers

    def _task_ages(self, index: int) -> np.ndarray:
        """Ages in updates of a task's unrolls since the last record."""
        if not self._unroll_tasks:
            return np.empty(0)
        return np.concatenate(self._ages_versions)[np.concatenate(self._unroll_tasks) == index]


def _limit(learner_waiting: float, actors: Mapping[str, float]) -> str:
    """Which stage the run waits for."""
    if learner_waiting < 0.1:
        return "learner"
    stages = {stage: actors.get(f"actors_{stage}_share", 0.0) for stage in ("environment", "inference")}
    return f"actors ({max(stages, key=lambda stage: stages[stage])})"
