"""Measure what the network costs: two actors in another network namespace, CURVE on, against the same two beside the learner.

`python tests/remote_speed.py` needs root and a quiet machine. Both runs live; in turn one works and the other stands still.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import psutil

import runs
from agent.network import Network
from agent.transport.board import Board, num_parameters
from fault_remote import two_namespaces
from fault_runs import ENDLESS, PATIENCE_SECONDS, NotRun
from launch.config import read_run
from launch.plan import make_plan

TARGET = 0.8
SUITES = {"toy": ["--suite", "toy"], "breakout": ["--suite", "atari57", "--tasks", "breakout"]}
# Who stands still must not be taken for dead.
PATIENT = ["supervisor.silent_seconds=100000", "log.tensorboard=false", "learner.conflict_every=0"]


class Window(NamedTuple):
    """frames_per_second: that the learner trained on. cpu_microseconds: per frame, by role."""

    frames_per_second: float
    cpu_microseconds: dict[str, float]


class Side:
    """A run and all its processes.

    Args:
        run_dir: of the run.
        commands: its own first.
        stack: ends them.
    """

    def __init__(self, run_dir: Path, commands: Sequence[Sequence[str]], stack: ExitStack) -> None:
        self._run_dir = run_dir
        self._processes: list[subprocess.Popen[bytes]] = []
        for number, command in enumerate(commands):
            if number:
                self._wait(lambda: (run_dir / "keys" / "run.key").exists() and (run_dir / "pids.json").exists())
            with (run_dir.parent / f"{run_dir.name}-{number}.txt").open("wb") as log:
                self._processes.append(subprocess.Popen(command, stdout=log, stderr=log))
            stack.callback(self._end, self._processes[-1])
        self._wait(lambda: (run_dir / "pids.json").exists())
        network = Network(make_plan(read_run(run_dir)).network)
        memory = Path(json.loads((run_dir / "pids.json").read_text(encoding="utf-8"))["memory"])
        self.board = Board(memory / "board", num_parameters(network))
        self._wait(lambda: self.board.version() > 0)

    def _wait(self, what: Callable[[], Any]) -> None:
        runs.wait_for(lambda: self._check() and what(), PATIENCE_SECONDS)

    def _check(self) -> bool:
        for process in self._processes:
            assert process.poll() is None, f"{process.args} ended: its output is beside {self._run_dir}"
        return True

    def _all(self) -> Iterator[psutil.Process]:
        """Every process of the run, supervisors first."""
        for process in self._processes:
            try:
                yield from (parent := psutil.Process(process.pid), *parent.children(recursive=True))
            except psutil.NoSuchProcess:
                continue

    def send(self, number: signal.Signals) -> None:
        """A signal to all."""
        for process in self._all():
            process.send_signal(number)

    def cpu_seconds(self) -> dict[str, float]:
        """By role, in the life of its processes."""
        found: dict[str, float] = {}
        for process in self._all():
            line, times = process.cmdline(), process.cpu_times()
            role = line[line.index("launch.roles") + 1] if "launch.roles" in line else "supervisor"
            found[role] = found.get(role, 0.0) + times.user + times.system
        return found

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        self.send(signal.SIGCONT)
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()

    def window(self, warm_seconds: float, seconds: float) -> Window:
        """Work for a while, after some time to get going again; it stands still afterwards."""
        self.send(signal.SIGCONT)
        time.sleep(warm_seconds)
        self._check()
        began, frames, before = time.monotonic(), self.board.copy()[0].frames, self.cpu_seconds()
        time.sleep(seconds)
        frames, seconds = self.board.copy()[0].frames - frames, time.monotonic() - began
        after = self.cpu_seconds()
        self.send(signal.SIGSTOP)
        return Window(frames / seconds, {role: (after[role] - before[role]) / frames * 1e6 for role in before})


def measure(suite: str, pairs: int, seconds: float, warm_seconds: float, more: Sequence[str]) -> float:
    """Print the rates of one suite; returns remote / local."""
    rates: dict[str, list[float]] = {"local": [], "remote": []}
    with tempfile.TemporaryDirectory(prefix="speed-") as name, two_namespaces() as cable, ExitStack() as stack:
        folder, address = Path(name), f"tcp://{cable.address_a}:5555"
        common = [*SUITES[suite], ENDLESS, *PATIENT, *more, "--run-dir"]
        local = [runs.command(*common, str(folder / "local"), "actor.num_actors=2")]
        remote = [
            [*cable.a, *runs.command(*common, str(folder / "remote"), "--listen", address, "remote.only=true")],
            [*cable.b, *runs.command("--connect", address, "--actors", "2", "--keys", str(folder / "remote" / "keys"),
                                     "--folder", str(folder / "machine"), script=runs.ACTORS)],
        ]  # fmt: skip
        sides = {}
        for side, commands in (("local", local), ("remote", remote)):
            sides[side] = Side(folder / side, commands, stack)
            sides[side].send(signal.SIGSTOP)
        for number in range(pairs):
            for side in ("local", "remote") if number % 2 == 0 else ("remote", "local"):
                window = sides[side].window(warm_seconds, seconds)
                rates[side].append(window.frames_per_second)
                costs = ", ".join(f"{role} {cost:,.0f}" for role, cost in window.cpu_microseconds.items())
                total = sum(window.cpu_microseconds.values())
                print(f"{suite} {side}: {rates[side][-1]:,.0f} frames/s; CPU us a frame {total:,.0f}: {costs}", flush=True)
    medians = {side: statistics.median(found) for side, found in rates.items()}
    ratio = medians["remote"] / medians["local"]
    words = ", ".join(f"{side} {median:,.0f}" for side, median in medians.items())
    print(f"{suite}: medians {words} frames/s; remote / local {ratio:.2f} (target {TARGET}), load {os.getloadavg()[0]:.1f}")
    return ratio


def main() -> int:
    """The command; exit code 1 if a ratio is below the target."""
    parser = argparse.ArgumentParser(prog="remote_speed.py", description=__doc__)
    parser.add_argument("--suites", default=",".join(SUITES), help="some of %(default)s")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=25.0, help="of a window")
    parser.add_argument("--warm-seconds", type=float, default=8.0, help="before each")
    parser.add_argument("more", nargs="*", metavar="KEY=VALUE", help="settings of both runs")
    options = parser.parse_args()
    try:
        found = [
            measure(suite, options.pairs, options.seconds, options.warm_seconds, options.more)
            for suite in options.suites.split(",")
        ]
    except NotRun as reason:
        print(f"not run: {reason}")
        return 0
    return int(min(found) < TARGET)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # as Ctrl-C: tidy up
    sys.exit(main())
