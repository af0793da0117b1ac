"""A real run whose actors share one inference process, which is killed again and again."""

import signal

import numpy as np
import pytest
import torch

from agent import checkpoint
from agent.network import Network
from launch.config import read_run
from runs import QUICK, assert_nothing_left, lines, pids, send, started, updates, wait_for

KILLS = 2


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """With learning rate 0 all versions have the same parameters: what each unroll must say can be computed afterwards."""
    run_dir = tmp_path_factory.mktemp("batched") / "run"
    with started(
        "--suite", "toy", "--run-dir", str(run_dir), "total_frames=100000000", "actor.inference=batched", "seed=3",
        "optimiser.learning_rate=0", "debug.dump_unrolls=3000", *QUICK,
    ) as process:  # fmt: skip
        wait_for(lambda: updates(run_dir) >= 1, timeout=180, process=process)
        before = pids(run_dir)
        for _ in range(KILLS):
            pid = wait_for(lambda: pids(run_dir)["workers"]["inference"], timeout=180, process=process)
            assert send(pid, signal.SIGKILL)
            wait_for(lambda pid=pid: pids(run_dir)["workers"]["inference"] not in (pid, None), timeout=180, process=process)
            target = updates(run_dir) + 5
            wait_for(lambda target=target: updates(run_dir) >= target, timeout=180, process=process)
        after = pids(run_dir)
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=30)
    assert process.returncode == 130, out
    assert_nothing_left(run_dir, before["supervisor"])
    return run_dir, before, after


def test_only_the_inference_process_is_replaced(killed):
    run_dir, before, after = killed
    assert after["actors"] == before["actors"] and after["learner"] == before["learner"]
    events = [event for event in lines(run_dir / "restarts.jsonl") if event["event"] == "restart"]
    assert [event.get("service") for event in events] == ["inference"] * KILLS
    assert all("SIGKILL" in event["reason"] for event in events)
    records = lines(run_dir / "metrics.jsonl")
    assert records[-1]["skipped_updates"] == 0 and records[-1]["updates"] >= 5 * KILLS
    assert max(record.get("actors_inference_share", 0.0) for record in records) > 0


def test_no_unroll_is_torn_lost_or_doubled(killed):
    """Each unroll says what the network says to its rows and state; the next one of an environment goes on where it ended."""
    run_dir, _, _ = killed
    run = read_run(run_dir)
    network = Network(run.network)
    network.load_state_dict(checkpoint.load(run_dir)["parameters"])
    unrolls = [dict(np.load(file)) for file in sorted((run_dir / "unrolls").glob("*.npz"))]
    names = ("frame", "reward", "first", "last_action", "instruction", "log_probs")
    rows = {name: torch.from_numpy(np.stack([unroll[name] for unroll in unrolls], 1)) for name in names}
    state = torch.from_numpy(np.stack([unroll["core_state"] for unroll in unrolls]))
    with torch.no_grad():
        output = network(rows, state, [int(unroll["task"]) for unroll in unrolls])
    torch.testing.assert_close(rows["log_probs"], output.logits.log_softmax(-1), rtol=0, atol=1e-4)
    last_of: dict[tuple[int, int], dict[str, np.ndarray]] = {}
    joins = 0
    for unroll in unrolls:
        before = last_of.get(key := (int(unroll["actor"]), int(unroll["environment"])))
        if before is not None:
            joins += 1
            for name in ("frame", "reward", "first", "action", "log_probs", "last_action"):
                np.testing.assert_array_equal(before[name][-1], unroll[name][0], err_msg=name)
            assert before["version"] <= unroll["version"]
        last_of[key] = unroll
    assert joins > 40
    assert max(int(unroll["version"]) for unroll in unrolls) > 0, "parameters newer than the first arrived"
