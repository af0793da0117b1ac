"""Two learner ranks that are real processes against one that sees all data; absent tasks, skips, and a rank that is killed."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import agent_ranks
from agent.distributed import Ranks

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """Scene -> what ranks 0 and 1 found; of the scene in which rank 1 is killed, rank 0 only."""
    folder = tmp_path_factory.mktemp("ranks")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}
    command = [sys.executable, str(ROOT / "tests" / "agent_ranks.py")]
    processes = [
        subprocess.Popen([*command, str(rank), "2", str(folder)], env=environment, stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    try:
        errors = [process.communicate(timeout=300)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, -9], errors
    return {
        scene: [torch.load(folder / f"{scene}-{rank}.pt", weights_only=False) for rank in range(count)]
        for scene, count in (("learn", 2), ("convolve", 2), ("skip", 2), ("compare", 2), ("lose", 1))
    }


@pytest.fixture(scope="module")
def one() -> dict[str, Any]:
    return agent_ranks.learn(Ranks())


def test_two_ranks_learn_what_one_with_all_data_learns(two: Any, one: dict[str, Any]) -> None:
    """Also that the limit of the norm was reached at times, and at times not: both are one rank's."""
    found = two["learn"][0]
    norms = [float(result["gradient_norm"]) for result in one["results"]]
    assert min(norms) < 5 < max(norms)
    for ours, expected in zip(found["states"], one["states"], strict=True):
        assert ours.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(ours[name], value, rtol=1e-6, atol=1e-6, msg=name)
    for ours, expected in zip(found["results"], one["results"], strict=True):
        for name, value in expected.items():
            torch.testing.assert_close(ours[name].double(), value.double(), rtol=1e-4, atol=1e-4)
    assert found["counters"] == one["counters"]
    assert found["counters"]["updates"] == agent_ranks.UPDATES


def test_all_ranks_have_the_same_bits_after_every_update(two: Any) -> None:
    first, second = two["learn"]
    assert first["hashes"] == second["hashes"] and len(set(first["hashes"])) == agent_ranks.UPDATES
    for ours, other in zip(first["results"], second["results"], strict=True):
        assert all(torch.equal(value, other[name]) for name, value in ours.items())


def test_a_task_in_nobodys_batch_is_left_alone_and_one_in_a_single_rank_learns_on_all(two: Any) -> None:
    """Every third update has the task `late`, on rank 1 only; `never` has no data at all."""
    for rank in range(2):
        states = two["learn"][rank]["states"]
        assert not any("never" in name and name.startswith("square") for name in states[-1])
        for update in range(1, agent_ranks.UPDATES):
            before, after = states[update - 1], states[update]
            has_late = 2 in agent_ranks.LAYOUTS[update % 3]
            for name, value in after.items():
                if "task_late" in name or name == "statistics late":
                    assert (name in before and torch.equal(before[name], value)) != has_late, (update, name)
                elif "never" in name:
                    assert torch.equal(before[name], value), name


def test_adam_on_convolutions_is_that_of_one_rank(two: Any) -> None:
    expected = agent_ranks.convolve(Ranks())["state"]
    for found in two["convolve"]:
        for name, value in expected.items():
            torch.testing.assert_close(found["state"][name], value, rtol=1e-4, atol=1e-5, msg=name)


def test_gradients_of_tasks_are_compared_over_all_ranks(two: Any, one: dict[str, Any]) -> None:
    for found in two["learn"]:
        np.testing.assert_allclose(found["norms"], one["norms"], rtol=1e-3)
        np.testing.assert_allclose(found["cosines"], one["cosines"], atol=1e-3)


def test_what_is_not_finite_on_one_rank_is_skipped_on_all(two: Any) -> None:
    for found in two["skip"]:
        assert found["skipped"]
        kept = {name: value for name, value in found["before"].items() if not name.startswith("normaliser.")}
        assert all(torch.equal(value, found["after"][name]) for name, value in kept.items())
        assert "not finite 2 times in a row" in found["error"]
        assert (found["counters"]["updates"], found["counters"]["skipped_updates"]) == (1, 2)
    assert two["skip"][0]["counters"] == two["skip"][1]["counters"]
    for name, value in two["skip"][0]["after"].items():
        assert torch.equal(value, two["skip"][1]["after"][name]), "also the pixels' statistics, which count what was seen"


def test_bytes_come_from_rank_0_and_unequal_digests_are_told(two: Any) -> None:
    for found in two["compare"]:
        assert found["bytes"] == [b"of rank 0" * 10**5, b""]
        assert "learner rank 1 has another number than rank 0" in found["error"]


def test_a_lost_rank_is_named_and_the_update_that_failed_left_no_trace(two: Any) -> None:
    (found,) = two["lose"]
    assert found["error"].startswith("learner rank 1 is gone")
    assert found["same"]
    assert all(torch.equal(value, found["after"][name]) for name, value in found["before"].items())


def test_one_rank_is_on_its_own() -> None:
    alone = Ranks()
    numbers = {"frames": torch.tensor(2**62)}
    assert alone.add_up(numbers, []) is numbers
    assert alone.broadcast(b"mine") == b"mine"
    assert alone.gather(np.array([1, 2], np.uint8)).tolist() == [[1, 2]]
    alone.check_equal(b"x", "number")
    alone.close()
