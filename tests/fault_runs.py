"""A real run to play faults against, and what came of it. Used by tests/faults.py."""

import os
import signal
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

import runs
from agent import checkpoint
from agent.network import Network, NetworkSpec
from agent.transport.board import Board, num_parameters
from agent.transport.ring import Ring
from fault_ledger import Books, Life, Oracle, audit, compare_lines, read_dump, read_rows
from launch.config import read_run
from launch.plan import make_plan
from launch.status import Status, open_status

PATIENCE_SECONDS = 120.0
LENGTH = 10
ENDLESS = "total_frames=1000000000"
QUIET = ["log.tensorboard=false", "log.every_seconds=0.5", "learner.conflict_every=0"]


class Broken(Exception):
    """What was promised did not hold."""


class NotRun(Exception):
    """This machine cannot play the fault; says what is missing."""


@dataclass
class Result:
    """One row of the table. seconds: to recover, one per fault. broken: promises that did not hold. not_run: why."""

    done: str = ""
    times: int = 0
    promised: str = ""
    found: dict[str, Any] = field(default_factory=dict)
    seconds: list[float] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    not_run: str = ""

    def expect(self, holds: bool, otherwise: str) -> None:
        """Note a promise that did not hold."""
        if not holds:
            self.broken.append(otherwise)

    def recovery(self) -> str:
        """Median and maximum."""
        return f"{statistics.median(self.seconds):.1f} / {max(self.seconds):.1f}" if self.seconds else "-"

    def verdict(self) -> str:
        """For the last column."""
        return "not run" if self.not_run else "BROKEN" if self.broken else "ok"


class Run:
    """A run folder, and its lives one after another; `start` begins one, `end` takes what it left.

    Args:
        folder: to work in.
        arguments: of the command for a new run.
        check: of its unrolls; None = unrolls are not dumped.
        variables: of the environment.
        prefix: a command that starts the command.
    """

    def __init__(
        self,
        folder: Path,
        arguments: list[str],
        check: Any,
        variables: dict[str, str] | None = None,
        prefix: Sequence[str] = (),
    ) -> None:
        self.folder, self.run_dir, self._prefix = folder, folder / "run", prefix
        self.lives: list[Life] = []
        self.process: subprocess.Popen[bytes] | None = None
        self._arguments, self._check = arguments, check
        self._variables = {**os.environ, **(variables or {})}
        folder.mkdir(parents=True, exist_ok=True)

    @property
    def witness(self) -> Path:
        """Where environments write how many rows they showed."""
        return self.folder / "witness"

    def start(self) -> "Run":
        """Begin the run or resume it, unless it lives; returns when it trains. After a resume, what the learner posts first has
        to have the hash that the checkpoint was saved with: actors stand still until that is seen."""
        if self.process is not None:
            return self
        resume = self.run_dir.exists()
        arguments = ["--resume", str(self.run_dir)] if resume else ["--run-dir", str(self.run_dir), *self._arguments]
        self._rows_before = set(read_rows(self.witness)) if self.witness.exists() else set()
        self._log = self.folder / f"out-{len(self.lives)}.txt"
        with self._log.open("wb") as log:
            command = [*self._prefix, *runs.command(*arguments)]
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=self._variables)
        self.wait(lambda: (self.run_dir / "pids.json").exists() and self.pids()["supervisor"] == self.process.pid)
        if resume:
            self.signal_actors(signal.SIGSTOP)
        self._attach(Path(self.pids()["memory"]))
        if resume:
            self._compare_hash()
            self.signal_actors(signal.SIGCONT)
        self._before = self._counters()
        self._populate()
        self.wait(lambda: self.board.version() > self._before["updates"])
        return self

    def _populate(self) -> None:
        """Give it actors, if it has none of its own."""

    def _attach(self, memory: Path) -> None:
        run = read_run(self.run_dir)
        plan = make_plan(run)
        self.rings = [Ring(memory / f"ring-{actor.index}", plan.unroll, plan.slots) for actor in plan.actors]
        self.board = Board(memory / "board", num_parameters(Network(plan.network)))
        self.status: Status = open_status(memory, plan)
        self.memory = memory
        self._batch_size, self._length = run.config.learner.batch_size, run.config.actor.unroll_length

    def _counters(self) -> dict[str, int]:
        if not checkpoint.exists(self.run_dir):
            return {"updates": 0, "frames": 0}
        counters = checkpoint.load(self.run_dir)["counters"]
        return {name: counters[name] for name in ("updates", "frames")}

    def _compare_hash(self) -> None:
        saved = checkpoint.load(self.run_dir)
        self.wait(lambda: self.board.version() >= 0)
        network = Network(NetworkSpec.from_dict(saved["network"]))
        posted = self.board.read(network)
        if posted != (saved["counters"]["updates"], saved["counters"]["frames"]):
            raise Broken(f"resumed at {posted}, the checkpoint says {saved['counters']}")
        if checkpoint.parameter_hash(network.state_dict()) != saved["parameter_hash"]:
            raise Broken("the parameters after the resume are not those of the checkpoint")

    def wait(self, what: Callable[[], Any], pause: float = 0.01) -> Any:
        """What `what` returns as soon as it is true; `Broken` if it never is, or the run ends before."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not (found := what()):
            if self.process is None or self.process.poll() is not None:
                raise Broken(f"the run ended by itself: {self.last_words()}")
            if time.monotonic() > deadline:
                raise Broken(f"waited {PATIENCE_SECONDS:.0f} s in vain")
            time.sleep(pause)
        return found

    def pids(self) -> dict[str, Any]:
        """As runs.pids."""
        return runs.pids(self.run_dir)

    def output(self) -> str:
        """Of the command in this life."""
        return self._log.read_text(encoding="utf-8", errors="replace")

    def last_words(self) -> str:
        """The end of it, one line."""
        return " ".join(self.output().split())[-400:]

    def signal_actors(self, number: signal.Signals) -> None:
        """Send a signal to all."""
        for pid in self.pids()["actors"]:
            runs.send(pid, number)

    def restarts(self) -> list[str]:
        """Reasons of all restarts of workers, over the life of the run."""
        return [line["reason"] for line in restart_lines(self.run_dir)]

    def interrupt(self) -> None:
        """One Ctrl-C, and the end of this life."""
        assert self.process is not None
        self.process.send_signal(signal.SIGINT)
        code = self.process.wait(PATIENCE_SECONDS)
        self.end()
        if code != 130:
            raise Broken(f"Ctrl-C gave exit code {code}: {self.last_words()}")

    def end(self) -> None:
        """The process is gone: put its unrolls aside, note the counters."""
        assert self.process is not None
        self.process.wait(PATIENCE_SECONDS)
        self.process = None
        unrolls, unreadable = [], 0
        dump = self.run_dir / "unrolls"
        if self._check is not None and dump.exists():
            unrolls, unreadable = read_dump(dump.rename(self.folder / f"unrolls-{len(self.lives)}"), self._check)
        committed, released = ([getattr(ring, name) for ring in self.rings] for name in ("committed", "released"))
        rows = read_rows(self.witness) if self.witness.exists() else {}
        rows = {seed: count for seed, count in rows.items() if seed not in self._rows_before}
        life = Life(unrolls, unreadable, self._batch_size, committed, released, self._before, self._counters(), rows)
        self.lives.append(life)

    def kill(self) -> None:
        """End what lives, whatever it does; for a way out after a failure."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            for role in runs.roles_of(self.run_dir):
                role.kill()
            self.process = None

    def books(self) -> list[Books]:
        """Of each life; games are compared over all of them, and stand in the last."""
        books = audit(self.lives, self._length)
        return [*books[:-1], books[-1] + compare_lines(self.lives, runs.lines(self.run_dir / "episodes.jsonl"))]


def restart_lines(folder: Path) -> list[dict[str, Any]]:
    """Restarts of workers."""
    return [line for line in runs.lines(folder / "restarts.jsonl") if line["event"] == "restart"]


def nothing_left(run: Run, seconds: float) -> float:
    """Seconds until no process and no mapped file of a run is left; `Broken` after `seconds`."""
    began = time.monotonic()
    while left := [*runs.roles_of(run.run_dir), *([run.memory] if run.memory.exists() else [])]:
        if time.monotonic() - began > seconds:
            raise Broken(f"after {seconds:.0f} s there is still {left}")
        time.sleep(0.05)
    return time.monotonic() - began


def numbered(folder: Path, seed: int, silent_seconds: int = 20) -> list[str]:
    """Arguments of a run with numbered environments; a network large enough for a save that a kill can hit."""
    (folder / "witness").mkdir(parents=True)
    (folder / "fault_envs.py").write_bytes((Path(__file__).parent / "fault_envs.py").read_bytes())
    task = {"env": "fault_envs:make_numbered", "env_kwargs": {"witness": str(folder / "witness"), "pause": 0.004}}
    suite = {"name": "numbered", "tasks": [{"name": "first", **task}, {"name": "second", **task}]}
    (folder / "suite.yaml").write_text(yaml.safe_dump(suite), encoding="utf-8")
    return [
        "--suite", str(folder / "suite.yaml"), "--seed", str(seed), ENDLESS, "environment.probe=false", *QUIET,
        "--preset", "published", "actor.num_envs=8", f"actor.unroll_length={LENGTH}", "learner.batch_size=8",
        "network.torso=small", "network.hidden_size=256", "network.core_size=256", "checkpoint.every_seconds=1",
        "debug.dump_unrolls=1000000", f"supervisor.silent_seconds={silent_seconds}", "supervisor.start_seconds=120",
        "supervisor.max_start_failures=1000", "supervisor.backoff_seconds=0.1", "supervisor.sound_seconds=0",
    ]  # fmt: skip


def numbered_run(folder: Path, seed: int, *more: str, silent_seconds: int = 20, prefix: Sequence[str] = ()) -> Run:
    """Two actors of eight numbered environments."""
    return Run(folder, [*numbered(folder, seed, silent_seconds), "actor.num_actors=2", *more], Oracle().check, prefix=prefix)
