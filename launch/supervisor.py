"""Start a run's processes, watch them, and end all of them together: learners share one fate, workers are replaced."""

import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType

from agent import checkpoint
from agent.network import Network
from agent.transport.board import Board, num_parameters
from agent.transport.ring import Ring
from launch import screen
from launch.config import RunFiles
from launch.inference import open_mailboxes
from launch.plan import INFERENCE, ActorPlan, Plan
from launch.process import EXIT_STOPPED, make_memory_folder, remove_folders
from launch.services import make_service, open_remote_rings
from launch.status import Status, open_status
from launch.workers import PIDS, RestartLog, Worker, Workers, describe_exit, kill_group, spawn, tail

POLL_SECONDS = 0.1
FULL_DISK_BYTES = 2**20
# A learner that hangs, or has lost another rank, has so long to end when the run is given up.
LOST_SECONDS = 13.0
# After one rank ended because of another, that one has so long to end, too, and be named.
CULPRIT_SECONDS = 5.0


class Supervisor:
    """The parent of all processes of a run.

    Args:
        run_dir: of the run; has its configuration already.
        run, plan: of the run.
        ranks: learner ranks that this supervisor starts, with their actors.
        resume: the learners continue from the newest checkpoint.
        overrides: settings changed on this start, for the log.
        interrupts: signals received so far; those of this run are added. The caller's, because one that comes as the run
            ends must still end whatever the caller would start next.
        generation: of this start at least (see RestartLog).
    """

    def __init__(
        self,
        run_dir: Path,
        run: RunFiles,
        plan: Plan,
        ranks: Sequence[int],
        resume: bool,
        overrides: list[str],
        interrupts: list[int],
        generation: int = 0,
    ) -> None:
        self.run_dir, self.settings, self.plan, self.resume = run_dir, run.config.supervisor, plan, resume
        self._interrupts = interrupts
        self._learners: list[subprocess.Popen[bytes]] = []
        self._ranks = tuple(ranks)
        self._log = RestartLog(run_dir, generation)
        self._log.start(resume, overrides)

    def run(self, show: Callable[[], None]) -> int:
        """Everything from start to end; `show` is called a few times a second. Returns the exit code of the command."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._interrupt)
        screen.log_to(self.run_dir / "logs" / screen.LOG)
        self.memory, self._owner = make_memory_folder(self.run_dir)
        self._workers: Workers | None = None
        try:
            self._began = time.monotonic()
            self._status = open_status(self.memory, self.plan, create=True)
            Board(self.memory / "board", num_parameters(Network(self.plan.network)), create=True)
            workers = make_workers(self.memory, self._status, self.plan, self._ranks)
            self._workers = Workers(self.run_dir, self.memory, self._status, self.settings, self._log, workers)
            self._learners = [self._start_learner(rank) for rank in self._ranks]
            self._workers.start()
            return self._watch(show, self._workers)
        finally:
            self._kill_all()
            (self.run_dir / PIDS).unlink(missing_ok=True)
            remove_folders(self.memory)
            self._owner.close()
            self._log.close()

    def _start_learner(self, rank: int) -> subprocess.Popen[bytes]:
        arguments = ["learner", "--index", str(rank), *(["--resume"] if self.resume else [])]
        return spawn(self.run_dir, self.memory, self._learner_log(rank), arguments, self.settings.stop_seconds)

    def _watch(self, show: Callable[[], None], workers: Workers) -> int:
        patient_until = 0.0
        while True:
            workers.write_pids([learner.pid for learner in self._learners])
            show()
            if self._interrupts:
                return self._stop()
            codes = [learner.poll() for learner in self._learners]
            if all(code == 0 for code in codes):
                return 0
            if EXIT_STOPPED in codes and set(codes) <= {0, None, EXIT_STOPPED}:
                # The one that made the others end is still ending.
                patient_until = patient_until or time.monotonic() + CULPRIT_SECONDS
                if None in codes and time.monotonic() < patient_until:
                    time.sleep(POLL_SECONDS)
                    continue
            # One that was killed comes first: the others end because of it.
            for code, rank in sorted(zip(codes, self._ranks, strict=True), key=lambda one: one[0] or 0):
                why = describe_exit(code) if code else self._silence(rank, workers) if code is None else None
                if why is not None:
                    # Who ended because of another is not to blame, who has not ended since may be.
                    others = [str(rank) for code, rank in zip(codes, self._ranks, strict=True) if code is None]
                    if code == EXIT_STOPPED and others:
                        why += f" (rank {', '.join(others)} has not ended)"
                    return self._give_up(self._learner_title(rank), why, self._learner_log(rank), LOST_SECONDS)
            if (failure := workers.check()) is not None:
                worker, why = failure
                return self._give_up(worker.title, why, worker.name, self.settings.stop_seconds)
            time.sleep(POLL_SECONDS)

    def _silence(self, rank: int, workers: Workers) -> str | None:
        """Why a learner counts as hanging, if it does."""
        row = self._status.learner_row(rank)
        return workers.silence(row, self._began, is_starting=not self._status.heartbeat(row))

    def _learner_title(self, rank: int) -> str:
        return "the learner" if self.plan.num_ranks == 1 else f"learner rank {rank}"

    def _learner_log(self, rank: int) -> str:
        return "learner" if self.plan.num_ranks == 1 else f"learner-{rank}"

    def _interrupt(self, number: int, _: FrameType | None) -> None:
        self._interrupts.append(number)

    def _stop(self) -> int:
        """One Ctrl-C or SIGTERM: the learners write a checkpoint, then everything ends."""
        print("\nstopping: writing a checkpoint (once more to stop at once)", file=sys.stderr, flush=True)
        before = self._saved_at()
        if not self._end_learners(self.settings.stop_seconds) and self._saved_at() == before:
            why = (
                "at once"
                if len(self._interrupts) > 1
                else f"it did not come within supervisor.stop_seconds={self.settings.stop_seconds:g}"
            )
            print(f"stopped without a checkpoint, {why}: see {self.run_dir / 'logs'}", file=sys.stderr)
        return 128 + self._interrupts[0]

    def _saved_at(self) -> int:
        """When the newest checkpoint was written, 0 = there is none. By the pointer: the file itself may go at any moment."""
        pointer = self.run_dir / checkpoint.FOLDER / checkpoint.LATEST
        return pointer.stat().st_mtime_ns if pointer.exists() else 0

    def _end_learners(self, seconds: float) -> bool:
        """Let the learners write their checkpoint and end; whether they did. A second interrupt cuts that short."""
        for learner in self._learners:  # first: to end hundreds of actors takes time
            learner.terminate()
        if self._workers is not None:
            self._workers.kill()
        deadline = time.monotonic() + seconds
        while (
            any(learner.poll() is None for learner in self._learners)
            and len(self._interrupts) < 2
            and time.monotonic() < deadline
        ):
            time.sleep(0.05)
        return all(learner.poll() in (0, EXIT_STOPPED) for learner in self._learners)

    def _give_up(self, who: str, why: str, log: str, seconds: float) -> int:
        path = self.run_dir / "logs" / f"{log}.log"
        self._end_learners(seconds)
        free = shutil.disk_usage(self.run_dir).free
        full = f" (the disk of {self.run_dir} is full: {free:,} bytes are free)" if free < FULL_DISK_BYTES else ""
        print(f"\n{tail(path)}\nthe run ends: {who} {why}{full}; its log is {path}", file=sys.stderr)
        return 1

    def _kill_all(self) -> None:
        for learner in self._learners:
            kill_group(learner)
        if self._workers is not None:
            self._workers.kill()


def make_workers(memory: Path, status: Status, plan: Plan, ranks: Sequence[int] = (0,)) -> list[Worker]:
    """All roles of a machine but the learners `ranks`, and the mapped files between them."""
    mine = [actor for actor in plan.actors if actor.rank in ranks]
    workers = [make_actor(memory, status, plan, actor) for actor in mine]
    if plan.remote_slots:
        open_remote_rings(memory, plan, ranks, create=True)
    for service in plan.services:
        if service == INFERENCE:
            workers.append(make_inference(memory, status, plan, mine))
        else:
            workers.append(make_service(memory, status, plan, service))
    return workers


def make_actor(memory: Path, status: Status, plan: Plan, actor: ActorPlan) -> Worker:
    """An actor, and the ring that it will write to."""
    ring = Ring(memory / f"ring-{actor.index}", plan.unroll, plan.slots, create=True)
    title = f"actor {actor.index} ({', '.join(plan.task_names[t] for t in actor.tasks)})"
    arguments, row = ("actor", "--index", str(actor.index)), status.actor_row(actor.index)
    return Worker(f"actor-{actor.index}", title, arguments, row, lambda: ring.committed, {"actor": actor.index})


def make_inference(memory: Path, status: Status, plan: Plan, actors: Sequence[ActorPlan]) -> Worker:
    """The inference process, and the mailboxes of the actors that it answers."""
    boxes = [box for actor in actors for box in open_mailboxes(memory, plan, actor, create=True)]
    row = status.service_row(plan.services.index(INFERENCE))
    return Worker(INFERENCE, INFERENCE, (INFERENCE,), row, lambda: sum(box.answered for box in boxes), {"service": INFERENCE})
