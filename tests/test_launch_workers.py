"""Replacing workers: when, how often, and which generation, and so which seeds, a start has."""

import argparse
import os
import signal
import subprocess
import sys
from dataclasses import dataclass, field

import psutil
import pytest

import runs
from launch import roles, workers
from launch.config import SupervisorSettings
from launch.process import EXIT_REFUSED, remove_folders
from launch.records import read_lines
from launch.status import Status
from launch.workers import PATIENCE, RestartLog, Worker, Workers

DIES = "raise SystemExit('rewards are not finite: task poison')"
SLEEPS = "import time; time.sleep(1000)"


@dataclass
class Crew:
    """Workers that run `code` instead of a role, a clock that stands still, and what was started."""

    workers: Workers
    status: Status
    started: list[tuple[str, int]]
    now: float = 1e6
    done: list[int] = field(default_factory=lambda: [0, 0])

    def await_death(self) -> None:
        for worker in self.workers.workers:
            if worker.process is not None:
                worker.process.wait(30)


@pytest.fixture
def make_crew(tmp_path, monkeypatch):
    crews: list[tuple[Crew, RestartLog]] = []

    def make(code: str, names: str = "a", **settings: float) -> Crew:
        started: list[tuple[str, int]] = []

        def spawn(folder, memory, name, arguments, stop_seconds, variables=None):
            started.append((name, int(arguments[arguments.index("--generation") + 1])))
            with (tmp_path / "logs" / f"{name}.log").open("ab") as log:
                return subprocess.Popen([sys.executable, "-c", code], start_new_session=True, stderr=log)

        monkeypatch.setattr(workers, "spawn", spawn)
        (tmp_path / "logs").mkdir()
        (memory := tmp_path / "memory").mkdir()
        workers.scratch_folder(memory).mkdir()
        status = Status(tmp_path / "status", 0, len(names), 0, 1, create=True)
        log = RestartLog(tmp_path)
        log.write({"event": "start"})
        roles = [
            Worker(name, f"actor {name} (poison)", (), row, lambda row=row: crew.done[row], {"actor": row})
            for row, name in enumerate(names)
        ]
        monkeypatch.setattr(workers.time, "monotonic", lambda: crew.now if crews else 1e6)
        crew = Crew(Workers(tmp_path, memory, status, SupervisorSettings(**settings), log, roles), status, started)
        crews.append((crew, log))
        crew.workers.start()
        return crew

    yield make
    for crew, log in crews:
        crew.workers.kill()
        log.close()
        remove_folders(crew.workers.memory)


def test_workers_that_die_together_start_again_with_generations_of_their_own(make_crew):
    """Actors of a machine that has joined take their seeds by generation alone."""
    crew = make_crew(DIES, "ab", backoff_seconds=0.0)
    crew.await_death()
    crew.workers.check()  # both are dead before either is started again
    crew.workers.check()
    assert crew.started == [("a", 1), ("b", 1), ("a", 2), ("b", 3)]


def fail_again(crew: Crew, lived: float) -> tuple[Worker, str] | None:
    """It works a little, dies after `lived` seconds, and is started anew when that is due."""
    crew.await_death()
    crew.done[0] += 3
    crew.now += lived
    if (failure := crew.workers.check()) is None:
        crew.now = max(crew.now, crew.workers.workers[0].due)
        crew.workers.check()
    return failure


def test_a_worker_that_dies_soon_after_each_start_ends_the_run_although_it_does_some_work(make_crew, capsys):
    crew = make_crew(DIES, max_start_failures=1, silent_seconds=1e9)
    began = crew.now
    failures = 0
    while (failure := fail_again(crew, lived=5.0)) is None:
        failures += 1
        assert failures < PATIENCE
    assert f"ended with exit code 1, {PATIENCE} times in a row" in failure[1]
    assert crew.now - began > 60 * (PATIENCE - 7), "it waits longer each time"
    shown = capsys.readouterr().out.splitlines()
    expected = "actor a (poison) ended with exit code 1, starts again in 1 s: rewards are not finite: task poison"
    assert shown[0] == expected
    assert len(shown) == failures


def test_a_worker_that_lived_long_is_given_another_chance(make_crew):
    crew = make_crew(DIES, max_start_failures=1, silent_seconds=1e9)
    for _ in range(2 * PATIENCE):
        assert fail_again(crew, lived=61.0) is None


def beat(crew: Crew) -> None:
    """A sign of life of a worker that is at work."""
    crew.status.beat(0)
    crew.status.write(0, steps=1)


def test_a_pause_of_the_whole_run_is_nobodys_silence(make_crew):
    crew = make_crew(SLEEPS, silent_seconds=100.0)
    beat(crew)
    crew.now += 10_000  # docker pause: nobody was awake, this process neither
    assert crew.workers.check() is None
    crew.now += 20
    crew.workers.check()
    assert len(crew.started) == 1
    for _ in range(9):  # awake, and it still says nothing
        crew.now += 20
        crew.workers.check()
    assert len(crew.started) == 2
    reasons = [line["reason"] for line in read_lines(crew.workers.folder / "restarts.jsonl") if line["event"] == "restart"]
    assert reasons == ["gave no sign of life for 120 s"]


@pytest.mark.parametrize("is_stopped", [True, False])
def test_a_start_may_take_long_but_not_while_it_is_stopped(make_crew, is_stopped):
    crew = make_crew(SLEEPS, silent_seconds=10.0, start_seconds=300.0)
    process = crew.workers.workers[0].process
    if is_stopped:
        os.kill(process.pid, signal.SIGSTOP)
        runs.wait_for(lambda: psutil.Process(process.pid).status() == psutil.STATUS_STOPPED)
    for _ in range(10):
        crew.now += 2
        crew.workers.check()
    assert len(crew.started) == 1 + is_stopped


def test_an_environment_that_calls_sys_exit_is_no_refusal_of_ours(monkeypatch):
    monkeypatch.setattr(roles, "actor", lambda *_: sys.exit(EXIT_REFUSED))
    with pytest.raises(RuntimeError, match=rf"an environment called sys.exit\({EXIT_REFUSED}\)"):
        roles.play(argparse.Namespace(role="actor", run_dir="", memory="", index=0, generation=0))
