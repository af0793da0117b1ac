"""Several learner ranks in whole runs: under torchrun and on one machine, killed, stopped, and resumed with other numbers."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import runs
from agent import checkpoint
from agent.distributed import Ranks
from launch import checks, multitask, supervisor, torchrun
from launch.config import RunFiles, load_config, parse_run, run_texts
from launch.gate import RECORDED, Gate, Wish
from launch.plan import deal_ranks
from launch.process import EXIT_STOPPED, hold
from launch.ranks import Place, find_place
from launch.status import open_status
from launch.torchrun import with_ranks
from launch.workers import Workers
from runs import PAIR, lines, pids, updates, wait_for
from test_launch_plan import plan_of

TORCHRUN = {
    "RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "node7",
    "MASTER_PORT": "29500",
}
TWO_TASKS = ["--tasks", "catch,memory"]


def actors_that_played(run_dir: Path) -> set[int]:
    return {game["actor"] for game in lines(run_dir / "episodes.jsonl")}


def assert_whole(run_dir: Path) -> int:
    """Every game is in the file once, and the checkpoint is of the same moment; its updates."""
    content = checkpoint.load(run_dir)
    games = lines(run_dir / "episodes.jsonl")
    assert len(games) == content["counters"]["episodes"] == sum(t["episodes"] for t in content["task_counters"].values())
    assert content["counters"]["frames"] == sum(task["frames"] for task in content["task_counters"].values())
    return content["counters"]["updates"]


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, int]:
    """Under torchrun, rank 1's learner is killed: folder, output, exit code."""
    run_dir = tmp_path_factory.mktemp("ranks") / "run"
    output = run_dir.parent / "output"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [runs.MULTITASK, "--suite", "toy", *TWO_TASKS, "--run-dir", str(run_dir), *PAIR]
    with output.open("w") as stream:
        process = subprocess.Popen(command, stdout=stream, stderr=stream)
        try:
            wait_for(lambda: process.poll() is not None or updates(run_dir) >= 3, 240)
            assert process.poll() is None, output.read_text()
            os.kill(pids(run_dir / "rank-1")["learners"][0], signal.SIGKILL)
            code = process.wait(120)
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait(120)
    return run_dir, output.read_text(), code


def test_torchrun_a_killed_rank_ends_the_job_and_is_named(killed: tuple[Path, str, int]) -> None:
    run_dir, output, code = killed
    assert code != 0
    assert "the run ends: learner rank 1 was killed by SIGKILL" in output
    assert assert_whole(run_dir) >= 3
    assert "learner rank 1 is gone" in (run_dir / "logs" / "learner-0.log").read_text()
    assert runs.roles_of(run_dir) == []
    assert actors_that_played(run_dir) == {0, 1}, "also the games of rank 1"
    record = lines(run_dir / "metrics.jsonl")[-1]
    assert 0 < record["learner_ranks_waiting_share"] < 1
    assert all(record["memory_bytes"][name] > 0 for name in ("learner", "learner_1", "actor_0", "actor_1"))
    assert sorted(path.name for path in (run_dir / "rank-1").iterdir()) == [
        "config.yaml", "lock", "logs", "resolved.yaml", "restarts.jsonl"
    ]  # fmt: skip


def test_one_rank_continues_what_two_had_begun_and_two_what_one_had(killed: tuple[Path, str, int]) -> None:
    """2 -> 1 -> 2, the last on one machine, until they are told to stop."""
    run_dir, _, _ = killed
    before = checkpoint.load(run_dir)["counters"]
    done = runs.run_here("--resume", str(run_dir), "learner.ranks=1", f"total_frames={before['frames'] + 400}", timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    one = checkpoint.load(run_dir)["counters"]
    assert one["frames"] >= before["frames"] + 400
    assert one["frames"] - before["frames"] <= 80 * (one["updates"] - before["updates"]), "8 unrolls of 10 frames, less resets"
    assert_whole(run_dir)
    with runs.started("--resume", str(run_dir), "learner.ranks=2", "total_frames=100000000") as process:
        wait_for(lambda: updates(run_dir) >= one["updates"] + 3, 240, process)
        process.terminate()
        assert process.wait(120) == 143
    two = assert_whole(run_dir)
    frames = checkpoint.load(run_dir)["counters"]["frames"] - one["frames"]
    assert 80 * (two - one["updates"]) < frames <= 160 * (two - one["updates"]), "of both ranks"
    generations = [line["generation"] for line in lines(run_dir / "restarts.jsonl") if line["event"] == "start"]
    assert generations == sorted(set(generations))
    runs.assert_nothing_left(run_dir, process.pid)


@pytest.mark.slow
def test_a_killed_rank_ends_a_run_on_one_machine(tmp_path: Path) -> None:
    """Slow because it starts a run of its own: the short form is the same under torchrun, above."""
    run_dir = tmp_path / "run"
    with runs.started("--suite", "toy", *TWO_TASKS, "--run-dir", str(run_dir), "learner.ranks=2", *PAIR) as process:
        wait_for(lambda: updates(run_dir) >= 3, 240, process)
        os.kill(pids(run_dir)["learners"][1], signal.SIGKILL)
        assert process.wait(120) == 1
        assert process.stdout is not None
        assert "the run ends: learner rank 1 was killed by SIGKILL" in process.stdout.read()
    assert assert_whole(run_dir) >= 3
    runs.assert_nothing_left(run_dir, process.pid)


@pytest.mark.slow
def test_the_toy_suite_is_learned_by_two_ranks(tmp_path: Path) -> None:
    """Half the unrolls on each rank: the update is that of the usual one rank."""
    run_dir = tmp_path / "run"
    settings = ["learner.ranks=2", "learner.batch_size=16", "actor.num_actors=8", "actor.num_envs=8"]
    done = runs.run("--suite", "toy", "--run-dir", str(run_dir), "--total-frames", "150000", *settings, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    for name, numbers in lines(run_dir / "metrics.jsonl")[-1]["tasks"].items():
        assert numbers["normalised_percent"] >= 90, name


def test_a_rank_that_hangs_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rank 0 has ended because it waited in vain: the last line says for whom."""
    monkeypatch.setattr(supervisor, "CULPRIT_SECONDS", 0.1)
    monkeypatch.setattr(supervisor, "LOST_SECONDS", 0.1)
    run, plan = plan_of("toy", "actor.num_actors=2", "learner.ranks=2")
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "learner-0.log").write_text("learner rank 1 is gone or did not answer for 60 s", encoding="utf-8")
    parent = supervisor.Supervisor(tmp_path, run, plan, range(2), False, [], [])
    parent._status, parent.memory, parent._workers = open_status(tmp_path, plan, create=True), tmp_path, None
    parent._began = time.monotonic()
    for code in (f"import sys; sys.exit({EXIT_STOPPED})", "import time; time.sleep(100)"):
        parent._learners.append(subprocess.Popen([sys.executable, "-c", code], start_new_session=True))
    try:
        workers = Workers(tmp_path, tmp_path, parent._status, run.config.supervisor, parent._log, [])
        assert parent._watch(lambda: None, workers) == 1
    finally:
        parent._kill_all()
        parent._log.close()
    assert "learner rank 0 ended because another rank had to stop or is gone (rank 1 has not ended)" in capsys.readouterr().err


@pytest.mark.parametrize("has_saved", [True, False])
def test_what_a_learner_that_does_not_end_has_saved_is_not_denied(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], has_saved: bool
) -> None:
    """It is told to stop, writes its checkpoint or not, and hangs until it is killed."""
    run, plan = plan_of("toy", "supervisor.stop_seconds=1")
    (tmp_path / checkpoint.FOLDER).mkdir()
    parent = supervisor.Supervisor(tmp_path, run, plan, [0], False, [], [signal.SIGTERM])
    parent._workers = None
    save = f"open({str(tmp_path / checkpoint.FOLDER / checkpoint.LATEST)!r}, 'w').close()" if has_saved else "None"
    told = tmp_path / "told"
    code = f"import pathlib, signal, time; signal.signal(15, lambda *_: {save}); pathlib.Path({str(told)!r}).touch()"
    sleeps = "while True: time.sleep(1)"
    parent._learners.append(subprocess.Popen([sys.executable, "-c", f"{code}\n{sleeps}"], start_new_session=True))
    wait_for(told.exists)
    try:
        assert parent._stop() == 128 + signal.SIGTERM
    finally:
        parent._kill_all()
        parent._log.close()
    denied = "stopped without a checkpoint, it did not come within supervisor.stop_seconds=1" in capsys.readouterr().err
    assert denied is not has_saved


def test_actors_are_dealt_so_that_ranks_share_the_tasks() -> None:
    assert deal_ranks([(0,), (1,), (0,), (1,)], 2) == [0, 0, 1, 1], "each rank has one of each task"
    assert deal_ranks([(0, 1), (2,), (3,)], 1) == [0, 0, 0]
    _, plan = plan_of("toy", "actor.num_actors=9", "learner.ranks=3")
    assert sorted(actor.rank for actor in plan.actors) == [0] * 3 + [1] * 3 + [2] * 3
    assert plan.num_ranks == 3
    assert checks.shared_bytes(plan) - checks.shared_bytes(plan, 0) == 6 * plan.ring_bytes()


def test_too_few_actors_for_the_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    assert multitask.main(["--suite", "toy", "learner.ranks=5", "actor.num_actors=4"]) == 2
    assert "learner.ranks=5 needs an actor for each rank, there are 4: use actor.num_actors=5" in capsys.readouterr().err


def test_more_ranks_than_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert str(multitask.choose_device("auto", 1, 2)) == "cuda:1"
    with pytest.raises(ValueError, match=r"learner\.device=cuda does not fit 3 learner ranks.* torch sees 2"):
        multitask.choose_device("auto", 0, 3)
    with pytest.raises(ValueError, match="each needs a GPU of its own"):
        multitask.choose_device("cuda:1", 0, 2)
    assert str(multitask.choose_device("cpu", 0, 3)) == "cpu"


def test_torchruns_variables() -> None:
    assert find_place({}) is None
    assert find_place({**TORCHRUN, "WORLD_SIZE": "1"}) is None
    assert find_place(TORCHRUN) == Place(1, 4, 1, 2, "node7", 29500, True, "0")
    assert find_place({**TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE": "True"}).is_store_ours is False  # type: ignore[union-attr]
    for name, value in (("RANK", ""), ("MASTER_PORT", "http"), ("MASTER_ADDR", "")):
        with pytest.raises(ValueError, match=f"WORLD_SIZE=4 asks for several ranks, but {name}={value!r}"):
            find_place({**TORCHRUN, name: value})
    for name, value, count in (("RANK", "4", "WORLD_SIZE=4"), ("LOCAL_RANK", "2", "LOCAL_WORLD_SIZE=2")):
        with pytest.raises(ValueError, match=f"{name}={value} does not fit {count}"):
            find_place({**TORCHRUN, name: value})


def test_another_number_of_ranks_than_torchruns_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert with_ranks(["seed=1", "learner.ranks=4"], 4) == ["seed=1", "learner.ranks=4"]
    assert load_config("toy", None, with_ranks([], 4)).learner.ranks == 4
    with pytest.raises(ValueError, match=r"learner\.ranks=2 is not the WORLD_SIZE=4"):
        with_ranks(["learner.ranks=2"], 4)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in TORCHRUN.items():
            patch.setenv(name, value)
        assert multitask.main(["--suite", "toy", "--single-task", "all", "--frames-per-task", "9"]) == 2
    assert "--single-task does not run under torchrun" in capsys.readouterr().err


class Pair(Ranks):
    """Two ranks in one process: the other sends `other`, or else the same."""

    def __init__(self) -> None:
        super().__init__()
        self.size = 2
        self.other: np.ndarray | None = None

    def gather(self, data: np.ndarray) -> np.ndarray:
        self.last = data
        return np.stack([data, data if self.other is None else self.other])


def test_the_gate_joins_what_records_need() -> None:
    """Columns of all ranks stand side by side, and types stay; nobody updates unless all are ready."""
    _, plan = plan_of("toy", "actor.num_actors=4")
    batches = [plan.unroll.empty(3) for _ in range(2)]
    for number, batch in enumerate(batches):
        for array in batch.values():
            array[...] = number + 1
    ready = Wish(ready=True, stop=False, starved=False, log=False, save=True, measure=False)
    pair = Pair()
    gate = Gate(pair, plan.unroll, 3)
    gate.agree(ready._replace(starved=True, save=False), batches[1])
    pair.other = pair.last
    agreed = gate.agree(ready, batches[0])
    assert (agreed.stop, agreed.starved, agreed.save, agreed.log) == (True, [1], True, False)
    assert agreed.why_stop(1) is None, "says it itself"
    assert agreed.why_stop(0) == "learner rank 1 had no batch for learner.wait_seconds, so all stop"
    assert agreed.arrays is not None and set(agreed.arrays) == set(RECORDED)
    for name, array in agreed.arrays.items():
        assert array.dtype == batches[0][name].dtype
        np.testing.assert_array_equal(array, np.concatenate([batch[name] for batch in batches], -1))
    pair.other = None
    waiting = gate.agree(ready._replace(ready=False, log=True), None)
    assert (waiting.arrays, waiting.stop, waiting.log, waiting.why_stop(0)) == (None, False, True, None)
    gate.agree(ready._replace(stop=True), batches[1])
    pair.other = pair.last
    assert gate.agree(ready, batches[0]).why_stop(0) == "learner rank 1 was told to stop, so all stop"


def test_the_table_of_another_machine_is_copied_into_rank_0s(tmp_path: Path) -> None:
    _, plan = plan_of("toy", "actor.num_actors=2", "learner.ranks=2")
    tables = []
    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
        tables.append(open_status(tmp_path / str(rank), plan, create=True))
        for row in (tables[rank].learner_row(rank), tables[rank].actor_row(rank)):
            tables[rank].beat(row)
            tables[rank].write(row, steps=100 + rank)
        tables[rank].engines(rank, 0)[:] = 5 + rank
        tables[rank].restarts += 3 + rank
    mine = tables[0].table()
    for _ in range(2):
        tables[0].mirror([tables[1].snapshot()])
        assert tables[0].restarts == 7
    np.testing.assert_array_equal(tables[0].table()[[1, 3]], tables[1].table()[[1, 3]])
    np.testing.assert_array_equal(tables[0].table()[[0, 2]], mine[[0, 2]])
    assert tables[0].engine_totals()[0].tolist() == [11] * tables[0].engine_totals().shape[1]
    tables[0].restarts += 1
    assert tables[0].restarts == 8


def agree(make: Any, run_dir: Path) -> list[str]:
    """What ranks 0 and 1 of torchrun are refused with, before anything starts; both in this process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    errors = ["", ""]

    def supervise(rank: int) -> None:
        try:
            torchrun.train_rank(Place(rank, 2, rank, 2, "127.0.0.1", port, True, "0"), make, False, False, [])
        except ValueError as error:
            errors[rank] = str(error)

    threads = [threading.Thread(target=supervise, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not (run_dir / "logs").exists(), "nothing has started"
    return errors


def test_what_rank_0_refuses_nobody_starts(tmp_path: Path) -> None:
    def make() -> tuple[Path, RunFiles]:
        raise ValueError("loss.discount=2 is out of range")

    assert agree(make, tmp_path) == [
        "loss.discount=2 is out of range",
        "rank 0 refused: loss.discount=2 is out of range",
    ]


def test_what_another_rank_refuses_nobody_starts(tmp_path: Path) -> None:
    """Somebody works on its part of the folder already. It has been told the run by then, with the number of actors."""
    run, _ = plan_of("toy", "learner.ranks=2")
    (tmp_path / "rank-1").mkdir()
    with hold(tmp_path / "rank-1" / "lock"):
        first, second = agree(lambda: (tmp_path, run), tmp_path)
    assert first.startswith("rank 1 refused: process ") and "works on" in second
    assert first == f"rank 1 refused: {second}"
    with hold(tmp_path / "lock"):
        pass  # rank 0 let go of the run, too
    again = parse_run(run_texts(run))
    assert again._replace(code_version="") == run._replace(code_version="")
