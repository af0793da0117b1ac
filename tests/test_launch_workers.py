"""Replacing workers: which generation, and so which seeds, a start has."""

import subprocess
import sys

from launch import workers
from launch.config import SupervisorSettings
from launch.status import Status
from launch.workers import RestartLog, Worker, Workers


def test_workers_that_die_together_start_again_with_generations_of_their_own(tmp_path, monkeypatch):
    """Actors of a machine that has joined take their seeds by generation alone."""
    started: list[tuple[str, int]] = []

    def spawn(folder, memory, name, arguments, variables=None):
        started.append((name, int(arguments[arguments.index("--generation") + 1])))
        return subprocess.Popen([sys.executable, "-c", "raise SystemExit(1)"], start_new_session=True)

    monkeypatch.setattr(workers, "spawn", spawn)
    (tmp_path / "logs").mkdir()
    for name in ("a", "b"):
        (tmp_path / "logs" / f"{name}.log").touch()
    status = Status(tmp_path / "status", 0, 2, 0, 1, create=True)
    log = RestartLog(tmp_path)
    log.write({"event": "start"})
    both = [Worker(name, name, (), row, lambda: 0, {"actor": row}) for row, name in enumerate("ab")]
    crew = Workers(tmp_path, tmp_path, status, SupervisorSettings(backoff_seconds=0.0), log, both)
    crew.start()
    for worker in both:
        assert worker.process is not None
        worker.process.wait()
    crew.check()  # both are dead before either is started again
    crew.check()
    crew.kill()
    log.close()
    assert started == [("a", 1), ("b", 1), ("a", 2), ("b", 3)]
