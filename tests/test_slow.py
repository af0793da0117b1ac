"""The long forms, minutes each: `pytest -m slow`. Their short forms stand in test_launch_run.py."""

import json
import random
import signal
import subprocess
import sys
import time
from subprocess import DEVNULL

import psutil
import pytest

import runs
from runs import PAIR, assert_nothing_left, lines, pids, send, started, updates, wait_for

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_toy_suite_within_two_minutes_of_wall_time(tmp_path, seed):
    run_dir = tmp_path / "run"
    began = time.monotonic()
    with started("--suite", "toy", "--seed", str(seed), "--run-dir", str(run_dir)) as process:

        def reached() -> bool:
            records = lines(run_dir / "metrics.jsonl")
            tasks = records[-1]["tasks"].values() if records else []
            return bool(tasks) and all(task.get("normalised_percent", 0) >= 90 for task in tasks)

        assert wait_for(reached, timeout=120, process=process)
        print(f"seed {seed}: all levels at 90 percent after {time.monotonic() - began:.0f} s, start-up included")


def test_actors_killed_and_stopped_a_hundred_times(tmp_path):
    run_dir = tmp_path / "run"
    rng = random.Random(1)
    settings = [
        "supervisor.silent_seconds=6",
        "supervisor.start_seconds=20",
        "supervisor.max_start_failures=1000",
        "supervisor.sound_seconds=0",
    ]
    with started(
        "--suite", "toy", "--run-dir", str(run_dir), "total_frames=1000000000", *settings, *PAIR, output=DEVNULL
    ) as process:
        wait_for(lambda: updates(run_dir) >= 1, process=process)
        supervisor = pids(run_dir)["supervisor"]
        hit: set[int] = set()
        while len(hit) < 100:
            target = updates(run_dir) + rng.randrange(1, 30)
            wait_for(lambda target=target: updates(run_dir) >= target, timeout=120, process=process)
            fresh = [pid for pid in pids(run_dir)["actors"] if pid is not None and pid not in hit]
            if fresh and send(actor := rng.choice(fresh), rng.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP])):
                hit.add(actor)
        descriptors = psutil.Process(pids(run_dir)["learner"]).num_fds()
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=15)
    assert process.returncode == 130
    assert descriptors < 60
    assert_nothing_left(run_dir, supervisor)
    last = lines(run_dir / "metrics.jsonl")[-1]
    assert last["frames"] == sum(task["frames"] for task in last["tasks"].values())
    assert all((g["steps"], abs(g["return"])) == (4, 1) for g in lines(run_dir / "episodes.jsonl") if g["task"] == "catch")


def test_memory_and_descriptors_stay_flat(tmp_path):
    """Known fault 33: after a minute of warm-up, less than 1 MB a minute in each process."""
    run_dir = tmp_path / "run"
    arguments = ("--suite", "atari57", "--tasks", "pong,breakout", "--run-dir", str(run_dir), "actor.num_envs=16")
    with started(*arguments, "log.every_seconds=5", output=DEVNULL) as process:
        wait_for(lambda: updates(run_dir) >= 1, timeout=120, process=process)

        def look() -> tuple[dict[str, int], list[int]]:
            now = pids(run_dir)
            numbers = [psutil.Process(pid).num_fds() for pid in [now["learner"], *now["actors"]]]
            return lines(run_dir / "metrics.jsonl")[-1]["memory_bytes"], numbers

        def after(seconds: float) -> tuple[dict[str, int], list[int]]:
            end = lines(run_dir / "metrics.jsonl")[-1]["seconds"] + seconds
            wait_for(lambda: lines(run_dir / "metrics.jsonl")[-1]["seconds"] >= end, timeout=2 * seconds + 30, process=process)
            return look()

        before, before_descriptors = after(60)
        minutes = 4
        memory, descriptors = after(60 * minutes)
    assert descriptors == before_descriptors
    assert len(memory) == 3
    for name in memory:
        assert memory[name] - before[name] < minutes * 2**20, name


def test_benchmark_prints_stages_bound_and_ratio():
    command = [sys.executable, str(runs.ROOT / "launch" / "benchmark.py"), "--suite", "atari57", "--tasks", "breakout"]
    done = subprocess.run(
        [*command, "--rounds", "1", "--run-seconds", "5", "--json"], capture_output=True, text=True, timeout=300, check=True
    )
    result = json.loads(done.stdout)
    stages = result["stages"]
    assert set(stages) == {"environment", "inference", "learner", "transport"}
    total = sum(stage["milliseconds_per_step"] for stage in stages.values())
    assert result["bound"]["steps_per_second"] == pytest.approx(1000 * result["cores"] / total)
    assert result["ratio"] == pytest.approx(result["run"]["steps_per_second"] / result["bound"]["steps_per_second"])
    assert result["limited_by"] == max(stages, key=lambda stage: stages[stage]["milliseconds_per_step"])
