"""Whole runs through real processes: learning, records, interrupts, resumes, kills, and refusals of data."""

import json
import os
import random
import signal
from pathlib import Path

import numpy as np
import psutil
import pytest
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import runs
from agent import checkpoint
from agent.network import Network, NetworkSpec
from eval import score
from launch.config import read_run
from launch.process import PREFIX, InUseError, memory_root
from launch.start import claim
from runs import PAIR, QUICK, assert_nothing_left, lines, pids, roles_of, run_here, send, started, updates, wait_for

SECRET = "hunter2-not-on-disk"


def train_toy(run_dir: Path, seed: int) -> str:
    """A short run of the whole toy suite, from start to end; what it printed."""
    done = runs.run(
        "--suite", "toy", "--run-dir", str(run_dir), "--total-frames", "110000", "--seed", str(seed),
        "log.every_seconds=1", "debug.dump_unrolls=40", timeout=240, API_TOKEN=SECRET,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def learned(run_dir: Path) -> dict[str, bool]:
    """An oracle apart from the product: the raw returns of the last 100 games of each level, against the best possible."""
    games = lines(run_dir / "episodes.jsonl")
    reached = {}
    for name, random_score, best in (
        ("catch", -0.6, 1),
        ("memory", 0, 1),
        ("instruction", 1.25, 5),
        ("large_rewards", -36.5, 100),
    ):
        last = [game["return"] for game in games if game["task"] == name][-100:]
        reached[name] = bool(np.mean(last) >= random_score + 0.9 * (best - random_score))
    return reached


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("toy") / "run"
    return run_dir, train_toy(run_dir, 1)


def test_all_four_toy_levels_are_learned(toy, tmp_path):
    run_dir, _ = toy
    if not all(learned(run_dir).values()):
        # Seldom a run ends with one level a little below 90 %, in a policy that misses one start; not two in a row.
        run_dir = tmp_path / "again"
        train_toy(run_dir, 2)
    reached = learned(run_dir)
    assert len(reached) == 4 and all(reached.values()), reached
    tasks = lines(run_dir / "metrics.jsonl")[-1]["tasks"]
    assert set(tasks) == set(reached)
    for name, numbers in tasks.items():
        assert numbers["normalised_percent"] >= 90, name


def test_metrics_say_what_happened(toy):
    run_dir, _ = toy
    records = lines(run_dir / "metrics.jsonl")
    last = records[-1]
    for key in (
        "frames", "steps", "updates", "seconds", "frames_per_second", "learning_rate", "skipped_updates", "actor_restarts",
        "sample_age_versions_mean", "sample_age_versions_max", "sample_age_seconds_mean", "off_policy_share",
        "effective_sample_size", "kl_behaviour_target", "queue_depth_unrolls", "learner_waiting_share", "limited_by",
        "actors_environment_share", "actors_inference_share", "actors_waiting_share", "memory_bytes",
        "samples_per_second", "explained_variance", "live_units", "units", "value_gradient_share", "relative_steps",
    ):  # fmt: skip
        assert key in last, key
    assert last["frames"] == sum(task["frames"] for task in last["tasks"].values()) >= 110_000
    assert last["steps"] == sum(task["steps"] for task in last["tasks"].values()) == last["frames"], "toy: a frame a step"
    assert (
        last["episodes"] == sum(task["episodes"] for task in last["tasks"].values()) == len(lines(run_dir / "episodes.jsonl"))
    )
    assert [r["frames"] for r in records] == sorted(r["frames"] for r in records)
    assert last["learning_rate"] < 0.01 * 2e-3, "linear to 0"
    for record in records:
        if "effective_sample_size" in record:
            assert 0 < record["effective_sample_size"] <= 1.0001
            assert 0 <= record["off_policy_share"] <= 1
            assert record["kl_behaviour_target"] > -1e-4
            assert record["sample_age_versions_mean"] <= record["sample_age_versions_max"]
            ages = [task["sample_age_versions_mean"] for task in record["tasks"].values() if "sample_age_versions_mean" in task]
            assert min(ages) <= record["sample_age_versions_mean"] <= max(ages)


def test_gradients_of_tasks_are_compared_within_the_bound(toy):
    run_dir, _ = toy
    last = lines(run_dir / "metrics.jsonl")[-1]
    cosines = last["gradient_cosines"]
    assert cosines["tasks"] == list(last["tasks"])
    assert cosines["measurements"] >= 1
    assert 0 < cosines["cost_percent"] <= 4, "the bound is 2; the first one has to be made to know its price"
    matrix = np.array(cosines["matrix"], float)
    np.testing.assert_allclose(np.diag(matrix), 1, atol=1e-4)
    np.testing.assert_array_equal(matrix, matrix.T)
    pairs = matrix[np.triu_indices(4, 1)]
    assert cosines["share_negative"] == (pairs < 0).mean()
    assert all(task["gradient_norm"] > 0 for task in last["tasks"].values())
    saved = checkpoint.load(run_dir)["conflict"]
    assert saved["measurements"] == cosines["measurements"]


def test_episodes_are_whole_and_raw(toy):
    run_dir, _ = toy
    for game in lines(run_dir / "episodes.jsonl"):
        assert game["frames"] == game["steps"]
        if game["task"] == "catch":
            assert game["return"] in (-1, 1)
            assert game["steps"] == 4
        if game["task"] == "large_rewards":
            assert game["return"] in (-100, 100), "the learner saw it clipped, the record has it raw"
        assert 0 <= game["policy_version"]
        assert 0 < game["total_frames"] <= 110_400


def test_the_checkpoint_holds_the_run(toy, capsys):
    run_dir, _ = toy
    last = lines(run_dir / "metrics.jsonl")[-1]
    assert checkpoint.main([str(run_dir)]) == 0
    about = json.loads(capsys.readouterr().out)
    assert about["counters"]["frames"] == last["frames"]
    assert about["counters"]["updates"] == last["updates"]
    assert about["tasks"] == ["catch", "memory", "instruction", "large_rewards"]
    assert len(about["parameter_hash"]) == 64
    network, _ = checkpoint.load_network(run_dir)
    assert checkpoint.parameter_hash(network.state_dict()) == about["parameter_hash"]


def test_dumped_unrolls_are_what_the_network_did(toy):
    """The contract between actor and learner, seen from outside: same parameters, same rows, same log-probabilities."""
    run_dir, _ = toy
    run = read_run(run_dir)
    files = sorted((run_dir / "unrolls").glob("*.npz"))
    assert len(files) == 40
    last_of: dict[tuple[int, int], dict[str, np.ndarray]] = {}
    joins = 0
    for file in files:
        unroll = dict(np.load(file))
        assert unroll["frame"].shape == (11, 20, 20, 1)
        assert unroll["log_probs"].shape == (11, 5)
        legal = list(run.network.legal_actions.values())[int(unroll["task"])]
        assert (unroll["action"] < legal).all()
        first = unroll["first"]
        assert (unroll["last_action"][first] == -1).all()
        assert (unroll["reward"][first] == 0).all()
        assert (unroll["last_action"][1:][~first[1:]] == unroll["action"][:-1][~first[1:]]).all()
        assert (first[1:] == (unroll["terminated"] | unroll["truncated"])[:-1]).all()
        before = last_of.get(key := (int(unroll["actor"]), int(unroll["environment"])))
        if before is not None:
            joins += 1
            for name in ("frame", "reward", "first", "action", "log_probs", "last_action"):
                np.testing.assert_array_equal(before[name][-1], unroll[name][0], err_msg=name)
        last_of[key] = unroll
    assert joins >= 0


def test_what_is_on_the_screen(toy):
    _, out = toy
    assert "suite toy, 4 tasks, the suite's own settings, 4 actors" in out
    assert "limited by" in out
    assert "catch" in out
    assert "python eval/score.py" in out


def test_curves_against_frames_and_against_time(toy):
    run_dir, _ = toy
    for folder in ("by_frames", "by_seconds"):
        events = EventAccumulator(str(run_dir / "tensorboard" / folder))
        events.Reload()
        tags = events.Tags()["scalars"]
        assert "return_mean/catch" in tags
        assert "sample_age_versions_mean" in tags
        points = events.Scalars("return_mean/catch")
        assert all(np.isfinite(point.value) for point in points)
        assert [p.step for p in points] == sorted(p.step for p in points)


def test_no_secret_is_written(toy):
    run_dir, _ = toy
    for path in run_dir.rglob("*"):
        assert path.is_dir() or SECRET.encode() not in path.read_bytes(), path


def test_nothing_is_left(toy):
    run_dir, _ = toy
    assert roles_of(run_dir) == []
    assert not (run_dir / "pids.json").exists()


def test_a_finished_run_resumes_to_the_same_state(toy):
    """Nothing is lost or changed by saving, loading and saving again."""
    run_dir, _ = toy
    before = checkpoint.load(run_dir)
    done = run_here("--resume", str(run_dir), "actor.num_actors=1")
    assert done.returncode == 0, done.stdout + done.stderr
    after = checkpoint.load(run_dir)
    assert checkpoint.parameter_hash(before["parameters"]) == checkpoint.parameter_hash(after["parameters"])
    assert checkpoint.parameter_hash(before["optimiser"]) == checkpoint.parameter_hash(after["optimiser"])
    for key in ("frames", "steps", "updates", "episodes", "skipped_updates"):
        assert before["counters"][key] == after["counters"][key], key
    assert before["task_counters"] == after["task_counters"]
    assert before["generators"]["python"] == after["generators"]["python"]
    assert (before["generators"]["torch"] == after["generators"]["torch"]).all()


def test_interrupt_writes_a_checkpoint_and_a_resume_goes_on(tmp_path):
    run_dir = tmp_path / "run"
    with started("--suite", "toy", "--run-dir", str(run_dir), "total_frames=100000000", *QUICK) as process:
        wait_for(lambda: updates(run_dir) >= 20, process=process)
        supervisor = pids(run_dir)["supervisor"]
        for actor in pids(run_dir)["actors"]:
            assert psutil.Process(actor).num_threads() <= 2, "one computes, one watches the parent"
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=15)
    assert process.returncode == 130
    assert "Traceback" not in out
    assert f"--resume {run_dir}" in out
    assert_nothing_left(run_dir, supervisor)
    saved = checkpoint.load(run_dir)["counters"]
    games = lines(run_dir / "episodes.jsonl")
    assert len(games) == saved["episodes"]

    # As after a crash: lines newer than the checkpoint are there, one of them torn.
    with (run_dir / "episodes.jsonl").open("a", encoding="utf-8") as stream:
        stream.write(json.dumps({**games[-1], "total_frames": saved["frames"] + 1}) + "\n" + '{"task": "ca')
    total = saved["frames"] + 4000
    done = run_here("--resume", str(run_dir), "--total-frames", str(total))
    assert done.returncode == 0, done.stdout + done.stderr
    after = checkpoint.load(run_dir)["counters"]
    assert after["frames"] >= total
    assert after["updates"] > saved["updates"]
    assert after["seconds"] > saved["seconds"]
    games = lines(run_dir / "episodes.jsonl")
    assert len(games) == after["episodes"]
    records = lines(run_dir / "metrics.jsonl")
    assert [r["frames"] for r in records] == sorted(r["frames"] for r in records)
    assert [r["seconds"] for r in records] == sorted(r["seconds"] for r in records)
    for folder in ("by_frames", "by_seconds"):
        events = EventAccumulator(str(run_dir / "tensorboard" / folder))
        events.Reload()
        steps = [point.step for point in events.Scalars("updates")]
        assert steps == sorted(steps), "points beyond the checkpoint were purged"
        assert len(list((run_dir / "tensorboard" / folder).iterdir())) == 2, "one file per start"
    starts = [event for event in lines(run_dir / "restarts.jsonl") if event["event"] == "start"]
    assert [event["resume"] for event in starts] == [False, True]


def test_a_run_killed_as_it_starts_begins_anew_and_sigterm_is_the_same_as_one_interrupt(tmp_path):
    run_dir = tmp_path / "run"
    with started("--suite", "toy", "--run-dir", str(run_dir), "total_frames=100000000", *QUICK) as process:
        wait_for(lambda: (run_dir / "pids.json").exists(), process=process)
        process.kill()
        wait_for(lambda: not roles_of(run_dir))  # a role notices when its imports are done
    for file in (run_dir / "checkpoints").iterdir():
        file.unlink()
    with started("--resume", str(run_dir)) as process:
        wait_for(lambda: updates(run_dir) >= 1, process=process)
        process.terminate()
        process.communicate(timeout=60)
    assert process.returncode == 143
    assert checkpoint.load(run_dir)["counters"]["updates"] >= 1
    assert roles_of(run_dir) == []


def test_two_interrupts_end_at_once(tmp_path):
    run_dir = tmp_path / "run"
    with started("--suite", "toy", "--run-dir", str(run_dir), "total_frames=100000000", *QUICK) as process:
        wait_for(lambda: updates(run_dir) >= 1, process=process)
        supervisor = pids(run_dir)["supervisor"]
        send(pids(run_dir)["learner"], signal.SIGSTOP)  # it will not answer the first one
        process.send_signal(signal.SIGINT)
        wait_for(lambda: roles_of(run_dir) and len(roles_of(run_dir)) <= 2)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=5)
    assert_nothing_left(run_dir, supervisor)


def test_actors_killed_and_stopped_at_random_moments_then_the_learner(tmp_path):
    """Actors are replaced; a killed learner ends the run."""
    run_dir = tmp_path / "run"
    rng = random.Random(0)
    with started(
        "--suite", "toy", "--run-dir", str(run_dir), "total_frames=100000000",
        "supervisor.silent_seconds=6", "supervisor.start_seconds=20", "supervisor.max_start_failures=1000", *PAIR,
    ) as process:  # fmt: skip
        wait_for(lambda: updates(run_dir) >= 1, process=process)
        supervisor = pids(run_dir)["supervisor"]
        hit: set[int] = set()

        def fresh() -> list[int]:
            return [pid for pid in pids(run_dir)["actors"] if pid is not None and pid not in hit]

        for number in (signal.SIGKILL, signal.SIGSTOP, signal.SIGKILL):
            target = updates(run_dir) + rng.randrange(5, 60)
            wait_for(lambda target=target: updates(run_dir) >= target, process=process)
            actor = rng.choice(wait_for(fresh, process=process))
            assert send(actor, number)
            hit.add(actor)
        wait_for(lambda: sum(e["event"] == "restart" for e in lines(run_dir / "restarts.jsonl")) >= len(hit), process=process)
        target = updates(run_dir) + 50
        wait_for(lambda: updates(run_dir) >= target, process=process)
        send(pids(run_dir)["learner"], signal.SIGKILL)
        out, _ = process.communicate(timeout=60)
    assert process.returncode == 1, out
    assert "the learner was killed by SIGKILL" in out
    assert_nothing_left(run_dir, supervisor)
    reasons = [event["reason"] for event in lines(run_dir / "restarts.jsonl") if event["event"] == "restart"]
    assert len(reasons) == len(hit) == 3
    assert sum("SIGKILL" in reason for reason in reasons) == 2
    assert sum("no sign of life" in reason for reason in reasons) == 1
    last = lines(run_dir / "metrics.jsonl")[-1]
    assert last["actor_restarts"] == len(hit)
    assert last["skipped_updates"] == 0
    assert last["frames"] == sum(task["frames"] for task in last["tasks"].values())
    for game in lines(run_dir / "episodes.jsonl"):
        if game["task"] == "catch":
            assert (game["steps"], abs(game["return"])) == (4, 1), "a torn or mixed unroll would break a game"


def test_kill_9_of_the_main_process_leaves_nothing(tmp_path):
    run_dir = tmp_path / "run"
    with started("--suite", "toy", "--run-dir", str(run_dir), "total_frames=100000000", *PAIR) as process:
        wait_for(lambda: updates(run_dir) >= 1, process=process)
        supervisor = pids(run_dir)["supervisor"]
        send(pids(run_dir)["actors"][0], signal.SIGSTOP)
        second = run_here("--resume", str(run_dir))
        assert (second.returncode, f"process {supervisor} works on {run_dir}" in second.stderr) == (2, True)
        process.kill()
        wait_for(lambda: not roles_of(run_dir) and not list(memory_root().glob(f"{PREFIX}*-{supervisor}-*")), timeout=10)
    assert checkpoint.load(run_dir)["counters"]["updates"] >= 1, "the learner saved before it went"


def own_suite(folder: Path, *tasks: dict) -> str:
    """A suite file beside tests/my_suites.py's import path."""
    path = folder / "own.yaml"
    (folder / "my_suites.py").write_bytes((Path(__file__).parent / "my_suites.py").read_bytes())
    path.write_text(yaml.safe_dump({"name": "own", "tasks": list(tasks)}, allow_unicode=True), encoding="utf-8")
    return str(path)


def moving(name: str, **kwargs) -> dict:
    return {"name": name, "env": "my_suites:make_moving", "env_kwargs": kwargs}


def test_an_actor_that_dies_at_every_start_ends_the_run_with_its_trace(tmp_path):
    suite = own_suite(tmp_path, moving("good"), moving("broken", fault="raise", at=2))
    settings = ["environment.probe=false", "supervisor.max_start_failures=2", *PAIR]
    done = run_here("--suite", suite, "--run-dir", str(tmp_path / "run"), *settings)
    assert done.returncode == 1
    assert "the engine of this level broke" in done.stderr
    assert "actor 1 (broken)" in done.stderr
    assert "2 times in a row" in done.stderr
    assert checkpoint.exists(tmp_path / "run"), "a run that gives up saves first"


def test_a_dead_observation_is_refused_at_the_start(tmp_path):
    suite = own_suite(tmp_path, moving("frozen", fault="constant"))
    done = run_here("--suite", suite, "--run-dir", str(tmp_path / "run"), *QUICK)
    assert done.returncode == 1
    for word in ("frozen", "environment.probe=false"):
        assert word in done.stderr
    assert roles_of(tmp_path / "run") == []


def test_a_nan_reward_is_refused_named_and_counted(tmp_path):
    suite = own_suite(tmp_path, moving("good"), moving("poison", length=200, fault="nan", at=130))
    run_dir = tmp_path / "run"
    with started("--suite", suite, "--run-dir", str(run_dir), "total_frames=100000000", *PAIR) as process:
        events = wait_for(lambda: [e for e in lines(run_dir / "restarts.jsonl") if e["event"] == "restart"], process=process)
        wait_for(lambda: lines(run_dir / "metrics.jsonl")[-1]["actor_restarts"] >= 1, process=process)
    for word in ("rewards are not finite", "task poison", "environment", "episode 0", "step 129"):
        assert word in events[0]["last_line"]
    assert lines(run_dir / "metrics.jsonl")[-1]["skipped_updates"] == 0, "it never reached the learner"


def test_an_own_suite_with_a_name_outside_ascii_runs_under_lang_c_beside_files_that_are_called_like_ours(tmp_path):
    suite = own_suite(tmp_path, moving("café"), moving("keys", length=9))
    run_dir, here = tmp_path / "run", tmp_path / "here"
    here.mkdir()
    for name in ("tasks.py", "agent.py", "queue.py"):
        (here / name).write_text("raise RuntimeError('not yours')", encoding="utf-8")
    arguments = ("--suite", suite, "--run-dir", str(run_dir), "total_frames=2000", *QUICK)
    done = runs.run(*arguments, cwd=here, LANG="C", LC_ALL="C")
    assert done.returncode == 0, done.stdout + done.stderr
    games = lines(run_dir / "episodes.jsonl")
    assert {game["task"] for game in games} == {"café", "keys"}
    assert all(game["return"] == game["steps"] == {"café": 5, "keys": 9}[game["task"]] for game in games)


@pytest.fixture(scope="module")
def cut(toy, tmp_path_factory):
    """The short run, resumed with fewer tasks, whose largest action set is smaller."""
    run_dir, _ = toy
    cut = tmp_path_factory.mktemp("cut")
    for name in ("config.yaml", "resolved.yaml", "episodes.jsonl"):
        (cut / name).write_bytes((run_dir / name).read_bytes())
    before = checkpoint.load(run_dir)
    checkpoint.save(cut, {key: value for key, value in before.items() if key != "format"}, keep=1)
    done = run_here("--resume", str(cut), "--tasks", "memory,catch", "actor.num_actors=1")
    assert done.returncode == 0, done.stdout + done.stderr
    return cut


def test_heads_follow_their_tasks_when_the_list_is_cut(toy, cut):
    """The network keeps its width and the heads their names."""
    before, after = checkpoint.load(toy[0]), checkpoint.load(cut)
    assert list(after["network"]["legal_actions"]) == ["catch", "memory"]
    assert after["network"]["num_actions"] == 5
    for name, value in after["parameters"].items():
        assert (value == before["parameters"][name]).all(), name
    assert not any("large_rewards" in name for name in after["parameters"])
    Network(NetworkSpec.from_dict(after["network"])).load_state_dict(after["parameters"])
    assert read_run(cut).dropped_tasks == ("instruction", "large_rewards")
    assert score.main([str(cut)]) == 0, "games of the tasks that were cut off do not stand in the way"


def test_a_resume_that_does_not_fit_changes_nothing(toy):
    run_dir, _ = toy
    before = {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}
    short = run_here("--resume", str(run_dir), "--total-frames", "100")
    assert (short.returncode, "total_frames=100" in short.stderr) == (2, True)
    fixed = run_here("--resume", str(run_dir), "loss.time_limit=terminate")
    assert (fixed.returncode, "loss.time_limit" in fixed.stderr) == (2, True)
    assert {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()} == before


def test_a_resume_may_not_add_tasks(cut):
    before = (cut / "resolved.yaml").read_bytes()
    added = run_here("--resume", str(cut), "--tasks", "catch,memory,instruction")
    assert (added.returncode, "instruction is new" in added.stderr, added.stdout) == (2, True, "")
    assert (cut / "resolved.yaml").read_bytes() == before


def test_an_early_interrupt_leaves_no_trace(tmp_path):
    with started("--suite", "toy", "--run-dir", str(tmp_path / "run")) as process:
        me = psutil.Process(process.pid)
        wait_for(lambda: me.cpu_times().user > 0.5, process=process)  # in the midst of the imports
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=20)
    assert (process.returncode, out) == (130, "")
    assert not (tmp_path / "run").exists()


def test_runs_of_the_same_second_do_not_meet(tmp_path):
    first, lock = claim(tmp_path / "runs" / "toy-1", is_default=True)
    second, other = claim(tmp_path / "runs" / "toy-1", is_default=True)
    assert (first.name, second.name) == ("toy-1", "toy-1-2")
    with pytest.raises(InUseError, match=str(os.getpid())):
        claim(first, is_default=False)
    lock.close()
    other.close()
    claim(first, is_default=False)[1].close()
