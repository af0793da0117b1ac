"""The learner's loop: batch, update, publish; records and checkpoints on the way."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from agent import checkpoint
from agent.batching import Batcher, HostBatch, RingReader
from agent.conflict import Conflict
from agent.device import allow_tf32, compile_torso
from agent.learner import Counters, Learner, NonFiniteError
from agent.network import Network
from agent.transport.board import Board
from agent.transport.ring import Ring
from launch.config import RunFiles, flatten
from launch.plan import Plan
from launch.records import EPISODES, METRICS, Lines, TaskRecords, TensorBoard
from launch.reporter import Reporter
from launch.status import Status

# Frames in batches by which the fastest task may lead the slowest with learner.balance=frames.
SLACK_BATCHES = 2
WAIT_SECONDS = 0.5


class Training:
    """One learner at work on a run.

    Args:
        run_dir: where records and checkpoints go.
        run, plan: of the run.
        rings, board, status: shared with the other processes.
        rank: of this learner among all.
        resume: continue from the newest checkpoint of the folder.
        remote: what to record of actors on other machines, if there may be some: the last rings are theirs, one per task.

    Raises:
        ValueError: the checkpoint does not fit the configuration; says what does not.
    """

    def __init__(
        self,
        run_dir: Path,
        run: RunFiles,
        plan: Plan,
        rings: list[Ring],
        board: Board,
        status: Status,
        rank: int,
        resume: bool,
        remote: Callable[[], dict[str, Any]] | None = None,
    ) -> None:
        config, suite = run.config, run.suite
        self.run_dir, self.config, self.plan, self.board, self.status = run_dir, config, plan, board, status
        self.row, self._remote = status.learner_row(rank), remote
        self.device = choose_device(config.learner.device)
        network = Network(plan.network, config.learner.precision == "bf16").to(self.device)
        allow_tf32(config.learner.tf32)
        if config.learner.compile:
            compile_torso(network, config.learner.batch_size * (config.actor.unroll_length + 1))
        self.learner = Learner(network, config.loss, config.optimiser, config.total_frames)
        self.records = TaskRecords(suite.task_names, config.log.mean_over_episodes)
        limits = config.learner
        self.conflict = Conflict(suite.task_names, limits.conflict_every, limits.conflict_cost_percent, config.seed)
        if resume and checkpoint.exists(run_dir):
            self._restore(checkpoint.load(run_dir, self.device))
        counters = self.learner.counters
        self.board.publish(self.learner.network, counters.updates, counters.frames)
        last_frames = counters.frames if resume else None
        self.metrics = Lines(run_dir / METRICS, "frames", last_frames)
        self.episodes = Lines(run_dir / EPISODES, "total_frames", last_frames)
        self.tensorboard = (
            TensorBoard(run_dir / "tensorboard", counters.frames, counters.seconds) if config.log.tensorboard else None
        )
        self.reporter = Reporter(suite, self.records, status, counters, self.conflict)
        batch_frames = config.learner.batch_size * config.actor.unroll_length * plan.frames_per_step
        reader = RingReader(
            rings,
            [*(actor.tasks for actor in plan.actors), *((task,) for task in range(len(suite.tasks)) if remote is not None)],
            config.learner.balance,
            self.records.frames,
            SLACK_BATCHES * batch_frames,
            len(plan.actors),
        )
        self.batcher = Batcher(
            reader,
            plan.unroll,
            config.learner.batch_size,
            self.device,
            dump=(run_dir / "unrolls", config.debug.dump_unrolls) if config.debug.dump_unrolls else None,
        )
        self._seconds_before = counters.seconds
        self._began = time.monotonic()
        self._saved = self._fed = self._began

    def run(self, stopped: Callable[[], bool]) -> None:
        """Train to the last frame, or until `stopped`; a checkpoint is written at the end either way.

        Raises:
            TimeoutError: no batch for learner.wait_seconds; names the actors that sent nothing.
            NonFiniteError: updates are non-finite again and again.
            OSError: the disk is full, or not writable.
        """
        try:
            while self.learner.counters.frames < self.config.total_frames and not stopped():
                self._wait_and_step()
                if self.reporter.seconds >= self.config.log.every_seconds:
                    self._log()
                if time.monotonic() - self._saved >= self.config.checkpoint.every_seconds:
                    self.save()
        except (NonFiniteError, TimeoutError):
            self._finish()
            raise
        self._finish()

    def save(self) -> Path:
        """Write a checkpoint."""
        self._clock()
        path = checkpoint.save(self.run_dir, self._content(), self.config.checkpoint.keep)
        self._saved = time.monotonic()
        return path

    def _wait_and_step(self) -> None:
        """One update, or half a second of waiting for a batch."""
        began = time.monotonic()
        batch = self.batcher.next(WAIT_SECONDS)
        ready = time.monotonic()
        self.status.beat(self.row)
        self.reporter.waited(ready - began)
        if batch is not None:
            self._step(batch, ready)
            self._fed = time.monotonic()
        elif ready - self._fed > self.config.learner.wait_seconds and not self.config.remote.only:  # they may come later
            missing = self.batcher.reader.missing(self.plan.task_names)
            raise TimeoutError(f"no batch for {self.config.learner.wait_seconds:.0f} s: waiting for {missing}")

    def _step(self, batch: HostBatch, began: float) -> None:
        counters = self.learner.counters
        version = counters.updates
        data, tasks = batch.data, batch.arrays["task"].tolist()
        if self.conflict.due(version):
            learner = self.learner
            self.conflict.measure(learner.network, data, tasks, self.config.loss, version, learner.popart)
        result = self.learner.update(data, tasks, batch.arrays["first"])
        self.board.publish(self.learner.network, counters.updates, counters.frames)
        self._clock()
        games = self.records.add(batch.arrays, counters.frames, counters.seconds)
        counters.episodes += len(games)
        self.episodes.write_all(games)
        seconds = time.monotonic() - began
        self.conflict.worked(seconds)
        self.reporter.add(batch.arrays, result, version, seconds)
        self.batcher.release(batch)

    def _log(self) -> None:
        self.status.write(self.row)
        record = self.reporter.record(self.learner.learning_rate(), self.batcher.reader.depth())
        if (popart := self.learner.popart) is not None:
            for task, numbers in enumerate(record["tasks"].values()):
                numbers |= {"value_mean": popart.means[task], "value_deviation": popart.deviation(task)}
        if self._remote is not None:
            record["remote"] = self._remote()
        self.metrics.write(record)
        if self.tensorboard is not None:
            self.tensorboard.write(record)

    def _finish(self) -> None:
        self.batcher.close()
        self._log()
        self.save()
        self.metrics.close()
        self.episodes.close()
        if self.tensorboard is not None:
            self.tensorboard.close()

    def _clock(self) -> None:
        self.learner.counters.seconds = self._seconds_before + time.monotonic() - self._began

    def _content(self) -> dict[str, Any]:
        return {
            "counters": vars(self.learner.counters).copy(),
            "task_counters": self.records.state(),
            "conflict": self.conflict.state(),
            "network": self.plan.network.to_dict(),
            "parameters": self.learner.network.state_dict(),
            "optimiser": self.learner.optimiser_state(),
            "value_statistics": self.learner.popart.state() if self.learner.popart else {},
            "generators": checkpoint.generator_state(),
            "config": flatten(self.config),
        }

    def _restore(self, content: dict[str, Any]) -> None:
        network = self.learner.network
        dropped = frozenset(content["network"]["legal_actions"]) - set(network.task_names)
        try:
            network.load_state_dict(checkpoint.match_heads(content["parameters"], network, dropped))
        except RuntimeError as error:
            raise ValueError(f"the checkpoint does not fit this run: {' '.join(str(error).split())}") from error
        self.learner.load_optimiser_state(checkpoint.match_heads(content["optimiser"], network, dropped))
        if self.learner.popart is not None:
            self.learner.popart.restore(content.get("value_statistics", {}))
        self.learner.counters = Counters(**content["counters"])
        self.records.restore(content["task_counters"])
        if "conflict" in content:  # checkpoints of before it was measured have none
            self.conflict.restore(content["conflict"])
        checkpoint.restore_generators(content["generators"])


def choose_device(name: str, key: str = "learner.device") -> torch.device:
    """auto = the first GPU if there is one.

    Raises:
        ValueError: torch does not know it, or it is not here.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"{key}={name} is no device: use auto, cpu, cuda or cuda:0") from error
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"{key}={name} is not supported: use auto, cpu, cuda or cuda:0")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"{key}={name} is not here: torch sees {torch.cuda.device_count()} GPUs")
    return device
