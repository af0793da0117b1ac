"""Gradients per task against gradients of the whole batch's loss, means by hand, the bound of the cost, and no trace left."""

import json
import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import agent_reference as reference
from agent import conflict
from agent.conflict import MAX_TASKS, SPAN, Conflict, Gradients, task_gradients
from agent.learner import Learner
from agent.losses import LossSettings, compute_losses
from agent.network import Network
from agent.optimisers import OptimiserSettings
from agent.unroll import Batch, take_columns

SPEC = reference.small_spec({"a": 2, "b": 3, "c": 3}, instruction_length=3)
LOSS = LossSettings(reward_transform="none")


def scene(seed: int, tasks: list[int], length: int = 6, spec: Any = SPEC) -> tuple[Network, Batch, list[int]]:
    batch = reference.random_batch(np.random.default_rng(seed), spec, length, len(tasks))
    batch["task"][:] = tasks
    batch["action"] %= 2
    batch["last_action"] = np.minimum(batch["last_action"], 1)
    return reference.make_network(spec, seed), reference.tensors(batch), tasks


def slow_truth(network: Network, batch: Batch, tasks: list[int]) -> np.ndarray:
    """[N, P] float64: one backward through the whole batch's graph per task, of the losses of the task's columns."""
    named = dict(network.named_parameters())
    shared = [name for name in named if name.split(".")[0] in ("torso", "instruction", "core")]
    losses = compute_losses(network(batch, batch["core_state"], tasks), batch, LOSS)
    rows = []
    for task in range(3):
        network.zero_grad(set_to_none=True)
        for column in [b for b, other in enumerate(tasks) if other == task]:
            (losses.policy_gradient[column] + losses.baseline[column] + losses.entropy[column]).backward(retain_graph=True)
        grads = [g if (g := named[name].grad) is not None else torch.zeros_like(named[name]) for name in shared]
        rows.append(np.concatenate([g.double().numpy().ravel() for g in grads]))
    network.zero_grad(set_to_none=True)
    return np.stack(rows)


@pytest.mark.parametrize("seed", range(5))
def test_norms_and_cosines_are_those_of_each_tasks_part_of_the_gradient(seed: int) -> None:
    network, batch, tasks = scene(seed, [2, 0, 1, 0, 2, 2, 1])
    truth = slow_truth(network, batch, tasks)
    found = task_gradients(network, batch, tasks, [0, 1, 2], LOSS)
    norms = np.sqrt((truth**2).sum(1))
    np.testing.assert_allclose(found.norms, norms, rtol=1e-4)
    np.testing.assert_allclose(found.cosines, truth @ truth.T / np.outer(norms, norms), atol=1e-4)
    assert norms.min() > 0 and np.abs(found.cosines[np.triu_indices(3, 1)]).max() < 0.999


def test_all_tasks_together_are_the_learners_gradient() -> None:
    """|sum of the tasks' gradients|^2 = sum of norms and cosines, against the .grad that an update leaves."""
    network, batch, tasks = scene(7, [2, 0, 1, 0, 2, 2, 1])
    found = task_gradients(network, batch, tasks, [0, 1, 2], LOSS)
    Learner(network, LOSS, OptimiserSettings(max_gradient_norm=0), 10**9).update(batch, tasks)
    whole = sum(float((p.grad.double() ** 2).sum()) for p in network.shared_parameters() if p.grad is not None)
    assert found.norms @ found.cosines @ found.norms == pytest.approx(whole, rel=1e-4)


def test_two_tasks_that_want_opposite_things_have_a_negative_cosine() -> None:
    """The same rows for both, with rewards of opposite sign, and heads alike: what helps one harms the other."""
    network, batch, tasks = scene(1, [0, 1], spec=reference.small_spec({"a": 2, "b": 2}, instruction_length=3))
    batch = {**take_columns(batch, torch.tensor([0, 0])), "task": batch["task"]}
    with torch.no_grad():
        for heads in (network.policy_heads, network.value_heads):
            heads["task_b"].load_state_dict(heads["task_a"].state_dict())
    loss = LossSettings(reward_transform="none", entropy_cost=0)
    batch["first"][1:], batch["terminated"][:] = False, False
    batch["reward"][:] = 0
    batch["reward"][-1] = 100  # on the last row, which no output that is trained has read: rewards are an input, too
    alike = task_gradients(network, batch, tasks, [0, 1], loss)
    assert alike.cosines[0, 1] == pytest.approx(1, abs=1e-5)
    batch["reward"][-1, 1] = -100
    opposed = task_gradients(network, batch, tasks, [0, 1], loss)
    assert opposed.cosines[0, 1] < -0.9
    one = Conflict(["a", "b"], 1, 100, 0)
    one.measure(network, batch, tasks, loss, 1)
    assert one.record()["share_negative"] == 1.0


def state_of(learner: Learner) -> dict[str, Any]:
    tensors = {**learner.network.state_dict(), **{f"square {k}": v for k, v in learner.optimiser_state().items()}}
    return {name: value.clone() for name, value in tensors.items()}


def test_training_is_bit_equal_with_and_without_measurements() -> None:
    learners = []
    for measured in (False, True):
        torch.manual_seed(0)
        np.random.seed(0)
        random.seed(0)
        network, batch, tasks = scene(3, [2, 0, 1, 0, 2, 2, 1])
        learner = Learner(network, LOSS, OptimiserSettings(), 10**9)
        meter = Conflict(list(SPEC.legal_actions), 1, 100, 0)
        for update in range(4):
            grads = {name: p.grad for name, p in network.named_parameters()}
            values = {name: None if g is None else g.clone() for name, g in grads.items()}
            before = state_of(learner)
            if measured:
                meter.measure(network, batch, tasks, LOSS, update)
            for name, parameter in network.named_parameters():
                assert parameter.grad is grads[name] and (
                    parameter.grad is None or torch.equal(parameter.grad, values[name])
                ), name
            assert all(torch.equal(value, before[name]) for name, value in state_of(learner).items())
            learner.update(batch, tasks)
        learners.append((state_of(learner), torch.rand(1).item(), np.random.random(), random.random()))
    plain, watched = learners
    assert plain[1:] == watched[1:], "a generator was touched"
    assert all(torch.equal(value, watched[0][name]) for name, value in plain[0].items())


def test_a_task_without_a_gradient_has_no_cosine() -> None:
    network, batch, tasks = scene(0, [0, 1, 1])
    batch["first"][:, 0] = True  # nothing but resets: no transition
    meter = Conflict(["a", "b", "c"], 1, 100, 0)
    meter.measure(network, batch, tasks, LOSS, 1)
    record = meter.record()
    assert record["tasks"] == ["a", "b"]
    assert record["matrix"] == [[None, None], [None, pytest.approx(1)]]
    assert record["share_negative"] is None
    assert (meter.norm(0), meter.norm(2)) == (0.0, None)
    json.dumps(record, allow_nan=False)


def test_a_gradient_that_is_not_finite_is_left_out() -> None:
    network, batch, tasks = scene(0, [0, 1, 2])
    batch["first"][2, 0] = False
    batch["reward"][2, 0] = torch.nan
    meter = Conflict(["a", "b", "c"], 1, 100, 0)
    meter.measure(network, batch, tasks, LOSS, 1)
    record = meter.record()
    assert record["tasks"] == ["b", "c"] and meter.norm(0) is None
    json.dumps(record, allow_nan=False)


def found(tasks: list[int], norms: list[float], cosine: float) -> Gradients:
    return Gradients(tasks, np.array(norms), np.array([[1.0, cosine], [cosine, 1.0]]))


def test_means_of_pairs_by_hand() -> None:
    meter = Conflict(["a", "b", "c"], 1, 100, 0)
    meter.add(found([0, 2], [1.0, 4.0], 0.5), 1, 0.0)
    meter.add(found([0, 2], [3.0, 4.0], -0.9), 1, 0.0)
    meter.add(found([1, 2], [7.0, 1.0], 0.25), 1, 0.0)
    record = meter.record()
    assert record["tasks"] == ["a", "b", "c"]
    assert record["matrix"] == [
        [1, None, pytest.approx(-0.2)],
        [None, 1, 0.25],
        [pytest.approx(-0.2), 0.25, 1],
    ]
    assert record["share_negative"] == 0.5, "of two pairs that were measured, by their means"
    assert [meter.norm(i) for i in range(3)] == [2, 7, 3]


def test_means_forget_what_is_long_ago() -> None:
    meter = Conflict(["a", "b"], 1, 100, 0)
    for _ in range(SPAN):
        meter.add(found([0, 1], [1.0, 1.0], -1.0), 1, 0.0)
    expected = -1.0
    for _ in range(3 * SPAN):
        meter.add(found([0, 1], [1.0, 1.0], 1.0), 1, 0.0)
        expected += (1.0 - expected) / SPAN
    assert meter.record()["matrix"][0][1] == pytest.approx(expected) and expected > 0.85


@settings(deadline=None, max_examples=60)
@given(
    every=st.integers(1, 60),
    percent=st.floats(0, 100),
    price=st.floats(0.01, 30),
    seed=st.integers(0, 100),
)
@example(every=3, percent=9.0, price=0.25, seed=0)
@example(every=25, percent=1.0, price=0.25, seed=0)
def test_the_cost_stays_below_its_bound(every: int, percent: float, price: float, seed: int) -> None:
    """Whatever a measurement costs: after the first, whose price nobody can know, not one is made that would not fit."""
    rng = np.random.default_rng(seed)
    meter = Conflict(["a", "b"], every, percent, 0)
    spent = work = 0.0
    last = count = 0
    for update in range(1, 1500):
        cost = 0.0
        if meter.due(update - 1):
            assert update - 1 - last >= every
            last = update - 1
            cost = price
            meter.add(found([0, 1], [1.0, 1.0], 0.0), update - 1, cost)
            spent, count = spent + cost, count + 1
            if count > 1:
                assert spent <= percent / 100 * (work + cost) * (1 + 1e-9)
        seconds = rng.uniform(0.5, 1.5) + cost
        work += seconds
        meter.worked(seconds)
    assert count or percent < 1
    if count:
        assert meter.record()["cost_percent"] == pytest.approx(100 * spent / work)
        # Not idle either: another one waits only for the number of updates or for the bound; near both, for either in turn.
        assert spent + price >= percent / 100 * work * 0.8 or count >= 0.8 * (1499 // every) - 1


def test_never() -> None:
    for meter in (Conflict(["a", "b"], 0, 100, 0), Conflict(["a", "b"], 1, 0, 0)):
        for update in range(2000):
            assert not meter.due(update)
            meter.worked(1.0)
        assert meter.record() == {} and meter.norm(0) is None


def test_many_tasks_are_measured_a_few_at_a_time_and_all_in_the_end() -> None:
    names = {f"t{i}": 2 for i in range(20)}
    network, batch, tasks = scene(0, list(range(20)), length=2, spec=reference.small_spec(names))
    meters = [Conflict(list(names), 1, 100, seed) for seed in (5, 5, 6)]
    for meter in meters:
        meter.measure(network, batch, tasks, LOSS, 1)
        assert len(meter.record()["tasks"]) == MAX_TASKS
    assert meters[0].record()["tasks"] == meters[1].record()["tasks"] != meters[2].record()["tasks"]
    for update in range(2, 40):
        meters[0].measure(network, batch, tasks, LOSS, update)
    record = meters[0].record()
    assert record["tasks"] == list(names)
    pairs = [value for row in record["matrix"] for value in row if value is not None]
    assert len(pairs) > 0.9 * 400


def test_the_time_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    network, batch, tasks = scene(0, [0, 1, 2])
    meter = Conflict(["a", "b", "c"], 1, 100, 0)
    clock = iter([10.0, 13.0])
    monkeypatch.setattr(conflict.time, "monotonic", lambda: next(clock))
    meter.measure(network, batch, tasks, LOSS, 1)
    meter.worked(12.0)
    assert meter.record()["cost_percent"] == 25


def test_state_goes_through_a_checkpoint_by_name() -> None:
    meter = Conflict(["a", "b", "c"], 10, 50, 0)
    meter.worked(100.0)
    meter.add(found([0, 2], [1.0, 4.0], 0.5), 20, 1.0)
    meter.add(found([1, 2], [7.0, 1.0], -0.25), 30, 2.0)
    state = json.loads(json.dumps(meter.state()))
    same = Conflict(["a", "b", "c"], 10, 50, 0)
    same.restore(state)
    assert same.state() == meter.state() and same.record() == meter.record()
    assert not same.due(39) and same.due(40)
    cut = Conflict(["c", "a"], 10, 50, 0)
    cut.restore(state)
    assert cut.record()["matrix"] == [[1, 0.5], [0.5, 1]]
    assert cut.record()["tasks"] == ["c", "a"]
    assert (cut.norm(0), cut.norm(1)) == (2.5, 1)


def test_columns_are_cut_out_of_every_field() -> None:
    _, batch, _ = scene(0, [0, 1, 2, 1])
    part = take_columns(batch, torch.tensor([3, 1]))
    for name, tensor in batch.items():
        wide = tensor.shape[0] == 4 if name in ("core_state", "task", "version", "acted_at", "actor", "environment") else False
        expected = tensor[[3, 1]] if wide else tensor[:, [3, 1]]
        assert torch.equal(torch.nan_to_num(part[name]), torch.nan_to_num(expected)), name
