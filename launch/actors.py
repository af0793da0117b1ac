"""Join a running learner from another machine: its actors play here, a relay carries their unrolls there.

examples:
  python launch/actors.py --connect tcp://learner.example:5555 --actors 8 --keys keys-of-the-run
"""

import os
import signal
import sys

if __name__ == "__main__":  # before the slow imports: an interrupt while they load ends without a trace
    for _number in (signal.SIGINT, signal.SIGTERM):
        # At once: an exception would abort the process where C++ code, such as torch's as it loads, calls Python.
        signal.signal(_number, lambda number, _: os._exit(128 + number))
    from launch.screen import keep_descriptors

    keep_descriptors()

import argparse
import secrets
import time
from collections.abc import Sequence
from pathlib import Path
from socket import getaddrinfo

import zmq

from agent.network import Network
from agent.transport.board import Board, num_parameters
from agent.transport.relay import RefusedError, greet
from launch import screen
from launch.checks import check_descriptors, check_memory, shared_bytes
from launch.config import RunFiles, read_run, write_run
from launch.plan import Plan
from launch.process import make_memory_folder, remove_folders
from launch.remote import MAX_ACTORS, RELAY, Machine, as_joined, check_address, greeting, plan_of, this_code
from launch.services import connect, open_counters
from launch.start import claim
from launch.status import open_status
from launch.supervisor import POLL_SECONDS, make_workers
from launch.workers import PIDS, RestartLog, Workers, tail
from tasks.environment import check_suite

ANSWER_SECONDS = 60.0


def main(arguments: Sequence[str] | None = None) -> int:
    """The command. Exit code 1 failed, 2 refused before anything started, 130 or 143 interrupted."""
    options = parse(arguments)
    with screen.guarded():
        return play(options)


def play(options: argparse.Namespace) -> int:
    """The command, parsed. Exit codes as `main`."""
    folder = options.folder or Path("runs") / f"actors-{time.strftime('%Y%m%d-%H%M%S')}"
    try:
        if not 1 <= options.actors <= MAX_ACTORS:
            raise ValueError(f"--actors {options.actors} is out of range: use 1 to {MAX_ACTORS}")
        check_address("--connect", options.connect, options.keys is not None)
        if folder.exists() and any(folder.iterdir()):
            raise ValueError(f"--folder {folder} exists and is not empty: choose another")
        machine, files = join(options.connect, options.actors, options.keys)
        folder, lock = claim(folder, is_default=options.folder is None)
        run = take_over(folder, files, machine, options.actors)
        plan = plan_of(run, machine)
        check_suite(run.suite, run.config.environment)
        check_memory(shared_bytes(plan), len(plan.actors))
        check_descriptors(len(plan.actors), run.config.actor.num_envs)
    except (ValueError, OSError, RefusedError) as error:
        print(f"actors: {error}", file=sys.stderr)
        return 2
    with lock:
        what = f"suite {run.suite.name}, {len(plan.actors)} actors"
        print(f"joined {options.connect}: {what}; logs are in {folder}", flush=True)
        return Crew(folder, run, plan).run()


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Command line; argparse ends with exit code 2 on an unknown flag."""
    parser = argparse.ArgumentParser(
        prog="actors.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--connect", required=True, metavar="ADDRESS", help="where the run listens: tcp://HOST:5555")
    parser.add_argument("--actors", type=int, default=os.cpu_count() or 1, metavar="N", help="default: one per core")
    parser.add_argument("--keys", type=Path, metavar="FOLDER", help="has run.key and actors.key_secret of the run")
    parser.add_argument("--folder", type=Path, metavar="DIR", help="for logs; default: runs/actors-TIME")
    return parser.parse_args(arguments)


def _look_up(address: str) -> None:
    host = address.removeprefix("tcp://").rpartition(":")[0].strip("[]")
    try:
        getaddrinfo(host, None)
    except OSError as error:
        raise ValueError(f"--connect {address}: no machine is called {host} ({error.strerror})") from error


def join(address: str, num_actors: int, keys: Path | None) -> tuple[Machine, dict[str, str]]:
    """Say hello: the stay of this machine, and the run's configuration files.

    Raises:
        ValueError: no such keys, or nobody answers. RefusedError: the run refuses, and says why.
    """
    folder = str(keys.resolve()) if keys is not None else ""
    session = 1 + secrets.randbits(52)
    socket = connect(address, folder, 0)
    try:
        _look_up(address)
        print(f"waiting for an answer of {address}", flush=True)
        answer = greet(socket, session, greeting(num_actors, num_actors, {}, this_code()), ANSWER_SECONDS)
    except TimeoutError as error:
        raise ValueError(
            f"{error} from {address}: is the run listening there, and are the keys in --keys those of the run?"
        ) from error
    except zmq.ZMQError as error:
        raise ValueError(f"--connect {address}: {zmq.strerror(error.errno or 0)}") from error
    finally:
        socket.close()
    return Machine(address, folder, session, answer["first"], answer["agreement"], answer["seeds"]), answer["files"]


def take_over(folder: Path, files: dict[str, str], machine: Machine, num_actors: int) -> RunFiles:
    """Write the run's files, cut to this machine, where its roles look for them."""
    (folder / "logs").mkdir()
    for name, text in files.items():
        (folder / Path(name).name).write_text(text, encoding="utf-8")
    run = as_joined(read_run(folder), num_actors)
    write_run(folder, run)
    machine.write(folder)
    return run


class Crew:
    """The parent of all processes of a machine that has joined.

    Args:
        folder: of logs; has the run's files already.
        run, plan: of this machine.
    """

    def __init__(self, folder: Path, run: RunFiles, plan: Plan) -> None:
        self.folder, self.config, self.plan = folder, run.config, plan
        self._interrupts: list[int] = []

    def run(self) -> int:
        """Play until told to stop. Returns the exit code of the command."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda number, _: self._interrupts.append(number))
        screen.log_to(self.folder / "logs" / screen.LOG)
        log = RestartLog(self.folder)
        log.write({"event": "start"})
        memory, owner = make_memory_folder(self.folder)
        workers = None
        try:
            status = open_status(memory, self.plan, create=True)
            Board(memory / "board", num_parameters(Network(self.plan.network)), create=True)
            roles = make_workers(memory, status, self.plan)
            workers = Workers(self.folder, memory, status, self.config.supervisor, log, roles)
            workers.start()
            return self._watch(memory, workers)
        finally:
            if workers is not None:
                workers.kill()
            (self.folder / PIDS).unlink(missing_ok=True)
            remove_folders(memory)
            owner.close()
            log.close()

    def _watch(self, memory: Path, workers: Workers) -> int:
        report = Report(memory, len(self.plan.actors), self.config.remote.unreachable_seconds)
        while not self._interrupts:
            workers.write_pids()
            if (failure := workers.check()) is not None:
                worker, why = failure
                path = self.folder / "logs" / f"{worker.name}.log"
                print(f"{tail(path)}\n{worker.title} {why}; its log is {path}", file=sys.stderr)
                return 1
            if report.seconds >= self.config.log.every_seconds:
                print(report.line(), flush=True)
            time.sleep(POLL_SECONDS)
        return 128 + self._interrupts[0]


class Report:
    """One plain line of what the machine does, from the relay's counters."""

    def __init__(self, memory: Path, num_actors: int, unreachable_seconds: float) -> None:
        self._counters, self._num_actors, self._unreachable = open_counters(memory, RELAY), num_actors, unreachable_seconds
        self._joined = self._began = time.monotonic()
        self._before = 0

    @property
    def seconds(self) -> float:
        """Since the last line."""
        return time.monotonic() - self._began

    def line(self) -> str:
        """Of the time since the last one."""
        counters, sent = self._counters, self._counters["acknowledged"]
        rate, self._before = (sent - self._before) / self.seconds, sent
        self._began = time.monotonic()
        age = f"{self._began - counters['parameters_at']:.0f} s old" if counters["parameters_at"] else "none yet"
        silent = self._began - max(self._joined, counters["heard_at"])
        wait = (
            f" | the run has not answered for {silent:.0f} s: it has ended or is out of reach"
            if silent > self._unreachable
            else ""
        )
        return (
            f"{self._num_actors} actors | {rate:,.1f} unrolls/s sent, {sent:,} in all, {counters['dropped']:,} dropped | "
            f"parameters {counters['version']:,} of {counters['newest_version']:,}, {age} | "
            f"{counters['saved_bytes'] / 1e6:,.1f} MB saved{wait}"
        )


if __name__ == "__main__":
    sys.exit(main())
