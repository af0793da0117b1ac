"""The learner's loop: batch, update, publish; records and checkpoints on the way."""

import hashlib
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from agent import checkpoint
from agent.batching import Batcher, HostBatch, RingReader
from agent.conflict import Conflict
from agent.distributed import LostRankError, Ranks
from agent.health import Health
from agent.learner import Counters, NonFiniteError
from agent.transport.board import Board
from agent.transport.ring import Ring
from agent.unroll import Arrays
from launch.config import RunFiles
from launch.gate import Gate, Wish, gather_status
from launch.learners import make_learner
from launch.plan import Plan
from launch.records import Files, TaskRecords
from launch.reporter import Reporter
from launch.settings import flatten
from launch.status import Status

# Frames in batches by which the fastest task may lead the slowest with learner.balance=frames.
SLACK_BATCHES = 2
WAIT_SECONDS = 0.5
# Between two comparisons of the ranks' parameters; one more comes with every checkpoint.
CHECK_UPDATES = 1000


class Training:
    """One learner at work on a run, alone or as one of several ranks, of which rank 0 writes all files.

    Args:
        run_dir: where records and checkpoints go.
        run, plan: of the run.
        rings: of this rank's actors.
        board, status: shared with the other processes on this machine.
        device: of this learner.
        resume: continue from the newest checkpoint of the folder.
        ranks: this one and the others.
        is_apart: each rank has a status table and a board of its own, perhaps on another machine.
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
        resume: bool,
        device: torch.device,
        ranks: Ranks,
        is_apart: bool,
        remote: Callable[[], dict[str, Any]] | None = None,
    ) -> None:
        config, suite = run.config, run.suite
        self.run_dir, self.config, self.plan, self.board, self.status = run_dir, config, plan, board, status
        self._remote = remote
        self.row = status.learner_row(ranks.rank)
        self.ranks, self.device, self._is_apart = ranks, device, is_apart
        self.learner = make_learner(run, device, ranks)
        self.records = TaskRecords(suite.task_names, config.log.mean_over_episodes)
        limits = config.learner
        self.conflict = Conflict(suite.task_names, limits.conflict_every, limits.conflict_cost_percent, config.seed)
        if resume:
            self._load()
        ranks.check_equal(self._digest(), "state at the start")
        counters = self.learner.counters
        self._publish()
        is_writer = ranks.rank == 0
        self.files = Files(run_dir, counters.frames, counters.seconds, resume, config.log.tensorboard) if is_writer else None
        self.reporter = Reporter(suite, self.records, status, counters, self.conflict, ranks)
        self.gate = Gate(ranks, plan.unroll, config.learner.batch_size)
        batch_frames = config.learner.batch_size * config.actor.unroll_length * plan.frames_per_step
        mine = [actor for actor in plan.actors if actor.rank == ranks.rank]
        reader = RingReader(
            rings,
            [*(actor.tasks for actor in mine), *((task,) for task in range(len(suite.tasks)) if remote is not None)],
            config.learner.balance,
            self.records.frames,
            SLACK_BATCHES * batch_frames,
            [actor.index for actor in mine],
        )
        self.batcher = Batcher(
            reader,
            plan.unroll,
            config.learner.batch_size,
            self.device,
            dump=(run_dir / "unrolls", config.debug.dump_unrolls) if config.debug.dump_unrolls and not ranks.rank else None,
            prefetch=config.learner.prefetch,
        )
        self.health = Health(self.learner)
        self._seconds_before = counters.seconds
        self._began = time.monotonic()
        self._saved = self._fed = self._began
        self._batch: HostBatch | None = None

    def run(self, stopped: Callable[[], bool]) -> bool:
        """Train to the last frame, or until `stopped` on any rank; a checkpoint is written at the end either way.

        Returns:
            Whether the last frame was reached.

        Raises:
            TimeoutError: no batch for learner.wait_seconds; names the actors that sent nothing.
            NonFiniteError: updates are non-finite again and again.
            LostRankError: another rank is gone. The last whole update is in the checkpoint.
            UnequalRanksError: ranks have come apart; no checkpoint is written.
            OSError: the disk is full, or not writable.
        """
        try:
            try:
                while self.learner.counters.frames < self.config.total_frames and not self._round(stopped()):
                    pass
            except (NonFiniteError, TimeoutError):
                self._finish()
                raise
            self._finish()
            return self.learner.counters.frames >= self.config.total_frames
        except LostRankError:
            self.batcher.close()
            if self.files is not None:
                self._write_checkpoint()
                self.files.close()
            raise

    def save(self) -> None:
        """Write a checkpoint, if all ranks have the same parameters."""
        self.ranks.check_equal(self._digest(), "state")
        if self.files is not None:
            self._write_checkpoint()
        self._saved = time.monotonic()

    def _round(self, stop: bool) -> bool:
        """One update, or half a second of waiting for a batch; whether the run has to stop."""
        began = time.monotonic()
        self._batch = self._batch or self.batcher.next(WAIT_SECONDS)
        now = time.monotonic()
        if self._batch is not None:
            self._fed = now
        wish = Wish(
            ready=self._batch is not None,
            stop=stop,
            # Actors on other machines may come later.
            starved=now - self._fed > self.config.learner.wait_seconds and not self.config.remote.only,
            log=self.reporter.seconds >= self.config.log.every_seconds,
            save=now - self._saved >= self.config.checkpoint.every_seconds,
            measure=self.conflict.due(self.learner.counters.updates),
        )
        agreed = self.gate.agree(wish, self._batch.arrays if self._batch else None)
        ready = time.monotonic()
        self.status.beat(self.row)
        self.reporter.waited(ready - began)
        if (reason := agreed.why_stop(self.ranks.rank)) is not None:
            print(reason, file=sys.stderr, flush=True)
        if self.ranks.rank in agreed.starved:
            missing = self.batcher.reader.missing(self.plan.task_names)
            raise TimeoutError(f"no batch for {self.config.learner.wait_seconds:.0f} s: waiting for {missing}")
        if agreed.arrays is not None and not agreed.stop:
            self._step(agreed.arrays, agreed.measure, ready)
        if agreed.log:
            self._log()
        if agreed.save:
            self.save()
        return agreed.stop

    def _step(self, arrays: Arrays, measure: bool, began: float) -> None:
        """One update on this rank's batch; `arrays` are the recorded fields of all ranks' batches."""
        assert self._batch is not None
        batch, learner, counters = self._batch, self.learner, self.learner.counters
        version = counters.updates
        data, tasks = batch.data, batch.arrays["task"].tolist()
        if measure:
            present = arrays["task"].tolist()
            network, scales = learner.network, (learner.popart, self.ranks, present, learner.advantages)
            self.conflict.measure(network, data, tasks, self.config.loss, version, *scales)
        # Once per record; other ranks would measure the same.
        is_measured = self.files is not None and not self.reporter.health
        if is_measured:
            self.reporter.health = self.health.before(data, tasks)
        result = learner.update(data, tasks, batch.arrays["first"])
        if is_measured:
            self.reporter.health["relative_steps"] = self.health.after()
        self._publish()
        self._clock()
        games = self.records.add(arrays, counters.frames, counters.seconds)
        counters.episodes += len(games)
        if self.files is not None:
            self.files.episodes.write_all(games)
        seconds = time.monotonic() - began
        self.conflict.worked(seconds)
        self.reporter.add(arrays, result, version, seconds)
        self.batcher.release(batch)
        self._batch, self._fed = None, time.monotonic()
        if self.ranks.size > 1 and counters.updates // CHECK_UPDATES > version // CHECK_UPDATES:
            self.ranks.check_equal(self._digest(), "state")

    def _publish(self) -> None:
        """Post the parameters; of ranks that share a board, rank 0 does it for all."""
        if self.ranks.rank == 0 or self._is_apart:
            self.board.publish(self.learner.network, self.learner.counters.updates, self.learner.counters.frames)

    def _log(self) -> None:
        self.status.write(self.row)
        depth = gather_status(self.ranks, self.status, self.batcher.reader.depth(), self._is_apart)
        record = self.reporter.record(self.learner.learning_rate(), depth)
        if (popart := self.learner.popart) is not None:
            for task, numbers in enumerate(record["tasks"].values()):
                numbers |= {"value_mean": popart.means[task], "value_deviation": popart.deviation(task)}
        if self._remote is not None:
            record["remote"] = self._remote()
        if self.files is not None:
            self.files.write(record)

    def _finish(self) -> None:
        self.batcher.close()
        if self.reporter.has_news or not self.learner.counters.updates:
            self._log()
        self.save()
        if self.files is not None:
            self.files.close()

    def _write_checkpoint(self) -> None:
        self._clock()
        checkpoint.save(self.run_dir, self._content(), self.config.checkpoint.keep)

    def _digest(self) -> bytes:
        """Of all that every rank must have alike."""
        learner = self.learner
        scales = [scale.state() if scale else {} for scale in (learner.popart, learner.advantages)]
        rest = [vars(learner.counters) | {"seconds": 0}, *scales]
        hashes = [checkpoint.parameter_hash(learner.network.state_dict()), checkpoint.parameter_hash(learner.optimiser_state())]
        return hashlib.sha256(json.dumps([*rest, *hashes]).encode()).digest()

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
            "advantage_statistics": self.learner.advantages.state() if self.learner.advantages else {},
            "value_statistics": self.learner.popart.state() if self.learner.popart else {},
            "generators": checkpoint.generator_state(),
            "config": flatten(self.config),
        }

    def _load(self) -> None:
        """From rank 0's newest checkpoint, if it has one: other ranks may not see its disk."""
        file = checkpoint.find(self.run_dir) if self.ranks.rank == 0 and checkpoint.exists(self.run_dir) else None
        data = self.ranks.broadcast(file.read_bytes() if file else b"")
        if data:
            self._restore(checkpoint.decode(data, file or self.run_dir, self.device))

    def _restore(self, content: dict[str, Any]) -> None:
        network = self.learner.network
        dropped = frozenset(content["network"]["legal_actions"]) - set(network.task_names)
        try:
            network.load_state_dict(checkpoint.match_heads(content["parameters"], network, dropped))
        except RuntimeError as error:
            raise ValueError(f"the checkpoint does not fit this run: {' '.join(str(error).split())}") from error
        self.learner.load_optimiser_state(checkpoint.match_heads(content["optimiser"], network, dropped))
        if self.learner.advantages is not None:
            self.learner.advantages.restore(content.get("advantage_statistics", {}))
        if self.learner.popart is not None:
            self.learner.popart.restore(content.get("value_statistics", {}))
        self.learner.counters = Counters(**content["counters"])
        self.records.restore(content["task_counters"])
        if "conflict" in content:  # checkpoints of before it was measured have none
            self.conflict.restore(content["conflict"])
        checkpoint.restore_generators(content["generators"])
