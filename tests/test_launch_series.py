"""Single-task baselines: the multi-task run's network and frames, one run after another, interrupted, resumed, refused."""

import json
import os
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from agent import checkpoint
from agent.network import Network
from eval import score
from launch import multitask, series
from launch.config import read_run
from launch.plan import make_plan
from launch.records import METRICS
from launch.start import new_run, resumed_run
from runs import QUICK, assert_nothing_left, lines, pids, roles_of, run_here, started, updates, wait_for

HERE = Path(__file__).parent


def own_suite(folder: Path, *tasks: dict) -> str:
    """A suite file with the small environments of the tests beside it."""
    for name in ("my_envs.py", "my_suites.py"):
        (folder / name).write_bytes((HERE / name).read_bytes())
    path = folder / "own.yaml"
    path.write_text(yaml.safe_dump({"name": "own", "tasks": list(tasks)}), encoding="utf-8")
    return str(path)


def spoken_suite(folder: Path) -> str:
    """One task without instruction and with 3 actions, one with an instruction and 4."""
    plain = {"name": "plain", "env": "my_envs:make_counting"}
    return own_suite(folder, plain, {"name": "spoken", "env": "my_envs:make_dm_counting"})


@pytest.fixture
def signals():
    """A series that runs within the test sets handlers: those of before come back."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("suite_name", ["toy", "atari5", "own"])
def test_a_baseline_has_the_network_actors_and_frames_of_the_multi_task_run(tmp_path, suite_name):
    name = spoken_suite(tmp_path) if suite_name == "own" else suite_name
    _, multi = new_run(name, None, [], tmp_path / "multi", 700)
    parent, baselines = series.new_series(name, None, [], tmp_path / "single", "all", 700)
    assert multi.config.total_frames == 700 * len(multi.suite.tasks)
    assert [one.task for one in baselines] == list(multi.suite.task_names)
    assert parent == tmp_path / "single" and not parent.exists()
    torch.manual_seed(0)
    whole = {key: value.shape for key, value in Network(multi.network).state_dict().items()}
    for one in baselines:
        shapes = {key: value.shape for key, value in Network(one.run.network).state_dict().items()}
        own_heads = {key for key in whole if key.split(".")[0] not in ("policy_heads", "value_heads", "normaliser")}
        own_heads |= {key for key in whole if f".task_{one.task}." in key}
        assert shapes == {key: whole[key] for key in own_heads}
        assert one.run.network.legal_actions == {one.task: multi.network.legal_actions[one.task]}
        assert one.run.config.total_frames == 700
        plan = make_plan(multi)
        assert one.plan.unroll == plan.unroll, "the same instructions and action probabilities in every row"
        alone = new_run(name, None, [f"tasks=[{one.task}]"], tmp_path / "alone", None)[1]
        sizes = [[actor.num_envs for actor in each.actors] for each in (one.plan, make_plan(alone))]
        assert sizes[0] == sizes[1], "as any run of one task has here"
        assert suite_name == "atari5" or set(sizes[0]) == {actor.num_envs for actor in plan.actors}, "5 games share 16 as 15"


def test_weights_of_actors_do_not_stop_a_baseline(tmp_path):
    overrides = ["actor.weights={memory: 3}"]
    _, baselines = series.new_series("toy", None, overrides, tmp_path / "x", "catch,memory", 100)
    assert [len(one.plan.actors) for one in baselines] == [4, 4]


def test_names_keep_the_order_of_the_suite_and_a_file_may_cut_it(tmp_path):
    file = tmp_path / "cut.yaml"
    file.write_text("tasks: [catch, memory]\n", encoding="utf-8")
    _, baselines = series.new_series("toy", file, [], tmp_path / "x", "all", 100)
    assert [one.task for one in baselines] == ["catch", "memory"]
    assert {one.run.network.num_actions for one in baselines} == {3}, "the run of these two has three actions"
    _, baselines = series.new_series("toy", None, [], tmp_path / "x", "large_rewards, catch", 100)
    assert [one.task for one in baselines] == ["catch", "large_rewards"]


def test_the_dry_run_prints_the_series(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert multitask.main(["--suite", "toy", "--single-task", "all", "--frames-per-task", "5e4", "--dry-run", "seed=3"]) == 0
    about = json.loads(capsys.readouterr().out)
    assert (about["frames_per_task"], about["total_frames"]) == (50_000, 200_000)
    assert about["run_dir"].startswith("runs/toy-single-")
    tasks = [one["task"] for one in about["runs"]]
    assert tasks == ["catch", "memory", "instruction", "large_rewards"]
    for one in about["runs"]:
        assert one["run_dir"] == f"{about['run_dir']}/{one['task']}"
        assert (one["state"], one["plan"]["tasks"]) == ("new", [one["task"]])
        assert (one["config"]["seed"], one["config"]["total_frames"]) == (3, 50_000)
    assert list(tmp_path.iterdir()) == []


def test_frames_per_task_of_a_multi_task_run(capsys):
    flags = ["--suite", "toy", "--frames-per-task", "1e3", "--dry-run"]
    assert multitask.main(flags) == 0
    assert json.loads(capsys.readouterr().out)["config"]["total_frames"] == 4000
    assert multitask.main([*flags, "--tasks", "catch,memory"]) == 0
    assert json.loads(capsys.readouterr().out)["config"]["total_frames"] == 2000


ALL = ["--single-task", "all"]
FRAMES = ["--frames-per-task", "500"]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--single-task", "catsh", *FRAMES], ["'catsh'", "catch"]),
        (["--single-task", "catch,", *FRAMES], ["--single-task 'catch,'", "empty name"]),
        (["--single-task", "catch,catch", *FRAMES], ["catch is named 2 times"]),
        ([*ALL, *FRAMES, "--tasks", "catch"], ["--single-task", "leave out --tasks"]),
        ([*ALL, *FRAMES, "tasks=[catch]"], ["--single-task", "leave out --tasks"]),
        (ALL, ["--single-task needs --frames-per-task"]),
        ([*ALL, *FRAMES, "--total-frames", "5"], ["total_frames", "use --frames-per-task"]),
        ([*FRAMES, "--total-frames", "5"], ["--frames-per-task 500 and total_frames"]),
        ([*FRAMES, "total_frames=5"], ["--frames-per-task 500 and total_frames"]),
        ([*ALL, "--frames-per-task", "0"], ["--frames-per-task 0", "at least 1"]),
        ([*ALL, "--frames-per-task", "-5"], ["--frames-per-task -5", "at least 1"]),
        (["--frames-per-task", "1.5"], ["--frames-per-task 1.5", "whole number"]),
        (["--frames-per-task", "many"], ["--frames-per-task many", "whole number"]),
        ([*ALL, *FRAMES, "actor.num_envs=3"], ["actor.num_envs=3 is odd"]),
        ([*ALL, *FRAMES, "--run-dir", "full"], ["--run-dir full exists and is not empty"]),
        ([*ALL, "--resume", "full"], ["--resume full is no series"]),
        ([*FRAMES, "--resume", "full"], ["--frames-per-task is for a new run or a series"]),
    ],
)
def test_contradictions_are_refused_in_one_sentence(capsys, tmp_path, monkeypatch, flags, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "something").write_text("x", encoding="utf-8")
    assert multitask.main(["--suite", "toy", *flags]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and len(captured.err.strip().splitlines()) == 1
    for word in words:
        assert word in captured.err
    assert [path.name for path in tmp_path.rglob("*")] == ["full", "something"]


def test_an_unknown_task_of_an_own_suite_is_refused(capsys, tmp_path):
    suite = spoken_suite(tmp_path)
    assert multitask.main(["--suite", suite, "--single-task", "plan", *FRAMES, "--run-dir", str(tmp_path / "x")]) == 2
    assert "plain" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


def test_an_interrupt_ends_the_series_and_a_resume_does_the_rest(tmp_path, capsys, signals):
    """The whole life of a series: interrupted in its first run, resumed as a whole, resumed when all is done."""
    parent = tmp_path / "series"
    flags = ["--suite", "toy", "--single-task", "catch,memory", "--run-dir", str(parent)]
    with started(*flags, "--frames-per-task", "100000000", *QUICK) as process:
        wait_for(lambda: updates(parent / "catch") >= 5, process=process)
        supervisor = pids(parent / "catch")["supervisor"]
        assert multitask.main(["--resume", str(parent)]) == 2
        assert f"process {supervisor} works on" in capsys.readouterr().err
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=30)
    assert process.returncode == 130, out
    assert "Traceback" not in out
    assert "baseline 1 of 2, catch" in out and "baseline 2" not in out
    assert f"--resume {parent}" in out
    assert_nothing_left(parent / "catch", supervisor)
    saved = checkpoint.load(parent / "catch")["counters"]
    assert not checkpoint.exists(parent / "memory") and not (parent / "memory" / METRICS).exists()

    assert multitask.main(["--resume", str(parent), "--frames-per-task", "1"]) == 2
    assert "total_frames=1" in capsys.readouterr().err
    assert multitask.main(["--resume", str(parent), "--single-task", "instruction"]) == 2
    assert "no such task" in capsys.readouterr().err

    frames = saved["frames"] + 400
    done = run_here("--resume", str(parent), "--suite", "toy", "--single-task", "all", "--frames-per-task", str(frames))
    assert done.returncode == 0, done.stdout + done.stderr
    for task, starts in (("catch", [False, True]), ("memory", [False])):
        folder = parent / task
        content = checkpoint.load(folder)
        assert content["counters"]["frames"] >= frames > saved["frames"]
        assert content["network"]["num_actions"] == 5 and content["network"]["instruction_length"] == 16
        assert list(content["network"]["legal_actions"]) == [task]
        assert [event["resume"] for event in lines(folder / "restarts.jsonl") if event["event"] == "start"] == starts
        games = lines(folder / "episodes.jsonl")
        assert {game["task"] for game in games} == {task} and len(games) == content["counters"]["episodes"]
        config = read_run(folder).config
        assert (config.tasks, config.total_frames) == ([task], frames)
        assert content["config"]["total_frames"] == frames

    before = {path: path.read_bytes() for path in parent.rglob("*.pt")}
    assert multitask.main(["--resume", str(parent)]) == 0
    assert capsys.readouterr().out.count("finished before") == 2
    assert {path: path.read_bytes() for path in parent.rglob("*.pt")} == before
    assert roles_of(parent / "catch") == roles_of(parent / "memory") == []


def test_a_run_that_fails_does_not_stop_the_others(tmp_path):
    """Its exit code is the command's; the other one is trained, with instructions that only its neighbour has."""
    broken = {"name": "broken", "env": "my_suites:make_moving", "env_kwargs": {"fault": "raise", "at": 2}}
    suite = own_suite(tmp_path, broken, {"name": "good", "env": "my_suites:make_moving"})
    parent = tmp_path / "series"
    done = run_here(
        "--suite", suite, "--run-dir", str(parent), "--single-task", "all", "--frames-per-task", "300",
        "environment.probe=false", "supervisor.max_start_failures=1", *QUICK,
    )  # fmt: skip
    assert done.returncode == 1, done.stdout + done.stderr
    assert "the engine of this level broke" in done.stderr
    assert "failed: broken;" in done.stderr
    assert checkpoint.load(parent / "good")["counters"]["frames"] >= 300


def test_a_task_without_instructions_learns_beside_those_of_its_suite(tmp_path):
    """The network reads words that this task does not have: it runs, and it resumes, alone as well."""
    parent = tmp_path / "series"
    suite = spoken_suite(tmp_path)
    done = run_here(
        "--suite", suite, "--run-dir", str(parent), "--single-task", "plain", "--frames-per-task", "300", *QUICK,
        "debug.dump_unrolls=1",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    unroll = np.load(parent / "plain" / "unrolls" / "unroll_000000.npz")
    assert unroll["instruction"].shape == (17, 16) and not unroll["instruction"].any()
    assert unroll["log_probs"].shape == (17, 4) and unroll["action"].max() < 3
    run = resumed_run(parent / "plain", None, ["total_frames=400"])
    assert run.network == read_run(parent / "plain").network
    assert score.main([str(parent / "plain"), "--episodes", "2", "--trust"]) == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_between_two_runs_is_not_lost(tmp_path, monkeypatch, capsys, signals, number):
    """It comes as the first run has just ended well: the second is not started."""
    begun = []

    def start(run_dir, run, plan, resume, overrides, interrupts):
        begun.append(run_dir.name)
        os.kill(os.getpid(), number)
        return 0

    monkeypatch.setattr(series, "start", start)
    parent, baselines = series.new_series("toy", None, [], tmp_path / "x", "all", 100)
    assert series.run_series(parent, baselines, [], is_default=False) == 128 + number
    assert begun == ["catch"]
    assert f"--resume {parent}" in capsys.readouterr().out
    # What a resume changes is kept for all, also for those that it did not come to.
    baselines = series.resumed_series(parent, None, [], None, 200)
    assert [one.state for one in baselines] == ["new"] * 4
    assert series.run_series(parent, baselines, [], is_default=False) == 128 + number
    assert [read_run(parent / one.task).config.total_frames for one in baselines] == [200] * 4


def test_a_default_folder_taken_in_the_same_second_gets_a_number(tmp_path, monkeypatch, signals):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(series, "start", lambda run_dir, *_: run_dir.mkdir(parents=True, exist_ok=True) or 0)
    for _ in range(2):
        _, baselines = series.new_series("toy", None, [], None, "catch", 100)
        assert series.run_series(Path("runs/toy-single-1"), baselines, [], is_default=True) == 0
    assert sorted(path.name for path in Path("runs").iterdir()) == ["toy-single-1", "toy-single-1-2"]
    for folder in Path("runs").iterdir():
        assert series.is_series(folder) and read_run(folder / "catch").config.total_frames == 100
