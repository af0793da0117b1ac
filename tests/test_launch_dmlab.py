"""DeepMind Lab through real processes, on the engine or its stand-in: train, break, interrupt, resume, evaluate."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

import runs
import standin
from agent import checkpoint
from launch.records import EPISODES, METRICS, last_line
from runs import assert_nothing_left, lines, pids, send, started, updates, wait_for

LEVELS = "lasertag_one_opponent_small,language_execute_random_task,skymaze_irreversible_path_hard"
SECONDS = 2
SETTINGS = [
    "actor.num_actors=3", "actor.num_envs=2", "actor.unroll_length=10", "learner.batch_size=3", "network.torso=shallow",
    "log.every_seconds=0.5", f"environment.dmlab.engine.episodeLengthSeconds={SECONDS}", "environment.dmlab.wait_seconds=5",
]  # fmt: skip


def engines(run_dir: Path) -> list[psutil.Process]:
    """Engines of all actors of a run."""
    found = []
    for pid in pids(run_dir)["actors"]:
        if pid is not None and psutil.pid_exists(pid):
            found += [child for child in psutil.Process(pid).children() if "tasks.engine_worker" in child.cmdline()]
    return found


def restarts(run_dir: Path) -> int:
    record = last_line(run_dir / METRICS)
    return sum(task["engine_restarts"] for task in record["tasks"].values()) if record else 0


def test_three_levels_train_break_resume_and_are_scored(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    standin.install(monkeypatch)
    # Beyond the 50 steps of the probe, whose engine is another.
    monkeypatch.setenv("DMLAB_STANDIN_FAULT", f"exit@step:80,level=skymaze_irreversible_path_hard,once={tmp_path / 'once'}")
    run_dir = tmp_path / "run"
    cache = f"environment.dmlab.level_cache={tmp_path / 'maps'}"
    arguments = ("--suite", "dmlab30", "--tasks", LEVELS, "--run-dir", str(run_dir), "total_frames=10000000", cache, *SETTINGS)
    with started(*arguments) as process:
        wait_for(lambda: updates(run_dir) >= 2, timeout=120, process=process)
        supervisor, actors = pids(run_dir)["supervisor"], pids(run_dir)["actors"]
        expected = 0 if standin.IS_REAL else 1
        wait_for(lambda: restarts(run_dir) >= expected, process=process)
        for number in (signal.SIGKILL, signal.SIGSTOP):
            known = restarts(run_dir)
            send(engines(run_dir)[-1].pid, number)
            wait_for(lambda known=known: restarts(run_dir) > known, process=process)
        at = updates(run_dir)
        wait_for(lambda: updates(run_dir) > at + 2, process=process)
        assert pids(run_dir)["actors"] == actors, "the actors lived on"
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=30)
    assert process.returncode == 130
    assert_nothing_left(run_dir, supervisor)
    said = "".join(path.read_text(encoding="utf-8") for path in (run_dir / "logs").iterdir())
    # A game of two seconds may just have been over.
    assert "was killed by SIGKILL: its game" in said and "gave no answer in time: its game" in said

    before = checkpoint.load(run_dir)["counters"]
    done = runs.run("--resume", str(run_dir), "--total-frames", str(before["frames"] + 4000), timeout=180)
    assert done.returncode == 0, done.stdout + done.stderr
    counters = checkpoint.load(run_dir)["counters"]
    assert counters["frames"] >= before["frames"] + 4000 and counters["updates"] > before["updates"]
    last = lines(run_dir / METRICS)[-1]
    assert last["frames"] == sum(task["frames"] for task in last["tasks"].values())
    assert last["tasks"]["skymaze_irreversible_path_hard"]["cache_hits"] > 0
    games = lines(run_dir / EPISODES)
    assert len(games) > 3
    for game in games:  # a game that was lost in its middle, or counted twice, would have another length
        assert (game["frames"], game["steps"]) == (60 * SECONDS, 15 * SECONDS), game

    command = [sys.executable, str(runs.ROOT / "eval" / "score.py"), str(run_dir), "--episodes", "3", "--split", "test"]
    scored = subprocess.run([*command, "--out", str(tmp_path)], capture_output=True, text=True, check=False, env=os.environ)
    assert scored.returncode == 0, scored.stdout + scored.stderr
    report = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    assert report["identity"]["split"] == "test"
    assert [(name, task["n"]) for name, task in report["tasks"].items()] == [(name, 3) for name in report["identity"]["tasks"]]
    assert report["aggregates"]["mean_capped"]["value"] is not None
