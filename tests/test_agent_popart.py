"""PopArt: values survive every update of the statistics, statistics are right, and each task keeps to itself."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import agent_reference as reference
from agent.conflict import task_gradients
from agent.diagnostics import SUMS
from agent.learner import Learner
from agent.losses import LossSettings, compute_losses
from agent.network import Output
from agent.optimisers import OptimiserSettings
from agent.popart import HIGHEST_DEVIATION, PopArt, ValueScale, rescale, target_sums
from agent.unroll import Batch

SPEC = reference.small_spec({"a": 2, "b": 3, "absent": 3})
LOSS = LossSettings(reward_transform="none", value_normalisation="popart", popart_step=0.1)


def statistics(step: float = 0.1, lowest: float = 1e-4, names: tuple[str, ...] = ("a", "b")) -> PopArt:
    return PopArt(names, step, lowest, torch.device("cpu"))


def make_heads(count: int, size: int = 5) -> list[nn.Linear]:
    return [nn.Linear(size, 1) for _ in range(count)]


def sums_of(*targets: list[float]) -> torch.Tensor:
    return torch.tensor([[len(one), sum(one), sum(x * x for x in one)] for one in targets], dtype=torch.float64)


def make_batch(seed: int, columns: int = 5, length: int = 6, scale: float = 1.0) -> tuple[Batch, list[int]]:
    """Tasks a and b; rewards of b are `scale` times as large."""
    batch = reference.random_batch(np.random.default_rng(seed), SPEC, length, columns)
    batch["task"][:] = np.arange(columns) % 2
    batch["action"] %= 2
    batch["last_action"] = np.minimum(batch["last_action"], 1)
    batch["reward"][:, batch["task"] == 1] *= scale
    return reference.tensors(batch), batch["task"].tolist()


# An offset much larger than the deviation leaves float32 no digits: beyond 1e4 deviations nothing could be preserved.
MOMENTS = st.tuples(st.floats(-100, 100), st.floats(0.1, 1000))


@settings(deadline=None, max_examples=100)
@given(old=MOMENTS, new=MOMENTS, seed=st.integers(0, 1000))
def test_rescaling_leaves_values_as_they_were(old: tuple[float, float], new: tuple[float, float], seed: int) -> None:
    torch.manual_seed(seed)
    head, inputs = nn.Linear(7, 1), torch.randn(20, 7)
    before = old[1] * head(inputs).double() + old[0]
    rescale(head, old, new)
    after = new[1] * head(inputs).double() + new[0]
    size = max(abs(old[0]), old[1], abs(new[0]), new[1])
    torch.testing.assert_close(after, before, rtol=1e-5, atol=1e-5 * size)


def test_the_mean_of_a_task_is_one_step_however_many_targets() -> None:
    one, many, heads = statistics(), statistics(), make_heads(2)
    for popart, repeats in ((one, 1), (many, 50)):
        for value in (3.0, -1.0, 5.0):
            popart.update(sums_of([value] * repeats, []), heads)
    assert one.means == pytest.approx(many.means)
    assert one.mean_squares == pytest.approx(many.mean_squares)


def test_the_first_steps_are_a_plain_mean_and_later_ones_the_published_step() -> None:
    popart, heads = statistics(step=0.25), make_heads(2)
    values = [4.0, -2.0, 6.0, 0.0, 8.0, 10.0]
    for value in values[:4]:
        popart.update(sums_of([value], []), heads)
    assert popart.means[0] == pytest.approx(np.mean(values[:4]))
    assert popart.mean_squares[0] == pytest.approx(np.mean(np.square(values[:4])))
    mean, square = popart.means[0], popart.mean_squares[0]
    for value in values[4:]:
        popart.update(sums_of([value], []), heads)
        mean, square = mean + 0.25 * (value - mean), square + 0.25 * (value * value - square)
    assert (popart.means[0], popart.mean_squares[0]) == (pytest.approx(mean), pytest.approx(square))
    assert popart.deviation(0) == pytest.approx((square - mean**2) ** 0.5)


def test_an_absent_task_is_untouched_to_the_bit() -> None:
    popart, heads = statistics(), make_heads(2)
    popart.update(sums_of([1.0, 2.0], [3.0]), heads)
    kept = popart.state()["b"]
    weight = heads[1].weight.clone()
    bias, other = heads[1].bias.clone(), heads[0].weight.clone()
    popart.update(sums_of([7.0], []), heads)
    assert popart.state()["b"] == kept
    assert torch.equal(heads[1].weight, weight) and torch.equal(heads[1].bias, bias)
    assert not torch.equal(heads[0].weight, other)


def test_the_deviation_stays_in_its_bounds() -> None:
    popart = statistics(lowest=1e-2)
    popart.update(sums_of([5.0, 5.0], [1e9, -1e9]), make_heads(2))
    assert (popart.deviation(0), popart.deviation(1)) == (1e-2, HIGHEST_DEVIATION)


def test_state_follows_names_and_a_missing_task_is_named() -> None:
    popart = statistics()
    popart.update(sums_of([1.0], [2.0, 4.0]), make_heads(2))
    restored = statistics(names=("b",))
    restored.restore(popart.state())
    assert (restored.counts, restored.means, restored.mean_squares) == ([1], [3.0], [10.0])
    with pytest.raises(ValueError, match="no value statistics of task new"):
        statistics(names=("b", "new")).restore(popart.state())


@settings(deadline=None, max_examples=20)
@given(seed=st.integers(0, 2**32 - 1))
def test_sums_are_those_of_the_transitions_and_add_up(seed: int) -> None:
    batch, tasks = make_batch(seed)
    targets = torch.from_numpy(np.random.default_rng(seed).normal(size=(6, 5)))
    expected = np.zeros((3, 3))
    for column, task in enumerate(tasks):
        for t in range(6):
            if not batch["first"][t + 1, column]:
                value = targets[t, column].item()
                expected[task] += [1, value, value**2]
    found = target_sums(targets, batch, 3)
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-12, atol=1e-12)
    parts = torch.zeros(3, 3, dtype=torch.float64)
    for columns in ([0, 1], [2, 3, 4]):
        own = {"first": batch["first"][:, columns], "task": batch["task"][columns]}
        parts += target_sums(targets[:, columns], own, 3)
    torch.testing.assert_close(parts, found)


def output(logits: np.ndarray, values: np.ndarray) -> Output:
    return Output(torch.from_numpy(logits.copy()), torch.from_numpy(values.copy()).requires_grad_(), torch.zeros(1, 2, 1))


@settings(deadline=None, max_examples=20)
@given(seed=st.integers(0, 2**32 - 1))
def test_losses_equal_the_reference_in_units_of_sigma(seed: int) -> None:
    """V-trace on sigma n + mu; then the value error and the advantage over sigma."""
    rng = np.random.default_rng(seed)
    batch = reference.random_batch(rng, SPEC, 6, 3)
    legal = np.array(list(SPEC.legal_actions.values()))[batch["task"]]
    logits = np.where(np.arange(3) < legal[:, None], rng.normal(size=(7, 3, 3)), -1e9)
    outputs, mean, deviation = rng.normal(size=(7, 3)), rng.normal(size=3) * 10, rng.uniform(0.5, 20, 3)
    scale = ValueScale(torch.from_numpy(mean), torch.from_numpy(deviation))
    found = compute_losses(output(logits, outputs), reference.tensors(batch), LOSS, scale)
    values = outputs * deviation + mean
    fixed = reference.targets(logits, values, batch, LOSS)
    for part in fixed:
        unit = deviation[part["column"]]
        np.testing.assert_allclose(found.targets[part["rows"], part["column"]].numpy(), part["vs"], rtol=1e-4, atol=1e-4)
        part["vs"], part["advantages"] = part["vs"] / unit, part["advantages"] / unit
    expected = reference.loss(logits, values / deviation, fixed, LOSS)
    for name, value in zip(("policy_gradient", "baseline", "entropy"), expected, strict=True):
        assert getattr(found, name).sum().item() == pytest.approx(value, rel=1e-3, abs=1e-3), name


def values_of(learner: Learner, batch: Batch, tasks: list[int]) -> torch.Tensor:
    with torch.no_grad():
        outputs = learner.network(batch, batch["core_state"], tasks).values.double()
    assert learner.popart is not None
    scale = learner.popart.scale(tasks)
    return outputs * scale.deviation.double() + scale.mean.double()


def test_an_update_moves_the_statistics_and_not_the_values() -> None:
    """With learning rate 0 only the statistics move: what the network says about values stays, to 1e-5."""
    learner = Learner(reference.make_network(SPEC), LOSS, OptimiserSettings(learning_rate=0.0), 1000)
    assert learner.popart is not None
    batch, tasks = make_batch(3, scale=100.0)
    for seed in range(3):
        before, deviation = values_of(learner, batch, tasks), learner.popart.deviation(1)
        learner.update(*make_batch(seed, scale=100.0))
        assert learner.popart.deviation(1) != deviation
        after = values_of(learner, batch, tasks)
        size = np.array([[max(abs(learner.popart.means[task]), learner.popart.deviation(task)) for task in tasks]])
        assert ((after - before).abs().numpy() <= 1e-5 * np.maximum(before.abs().numpy(), size)).all()
    assert learner.popart.deviation(1) > 20 * learner.popart.deviation(0)
    assert learner.popart.state()["absent"] == [0, 0.0, 1.0]


def test_the_first_step_is_in_the_unit_of_its_targets() -> None:
    """Rewards 1,000 times as large: with mean 0 and deviation 1 the value loss would be a million times as large."""
    learner = Learner(reference.make_network(SPEC), LOSS, OptimiserSettings(), 1000)
    batch, tasks = make_batch(0, columns=20, scale=1000.0)
    sums = learner.update(batch, tasks)["task_sums"]
    losses = sums[:2, SUMS.index("baseline_loss")] / sums[:2, SUMS.index("transitions")]
    assert (losses > 0).all() and (losses < 1).all()
    bad = Learner(reference.make_network(SPEC), LOSS, OptimiserSettings(), 1000)
    batch["reward"][1:] = float("nan")
    assert bad.update(batch, tasks)["skipped"] and bad.popart is not None
    assert bad.popart.state()["a"] == [0, 0.0, 1.0], "nothing of it is kept"


def test_a_skipped_update_leaves_the_statistics() -> None:
    learner = Learner(reference.make_network(SPEC), LOSS, OptimiserSettings(), 1000)
    assert learner.popart is not None
    learner.update(*make_batch(0))
    kept = learner.popart.state()
    batch, tasks = make_batch(1)
    batch["reward"][1:] = float("nan")
    assert learner.update(batch, tasks)["skipped"]
    assert learner.popart.state() == kept


def test_tasks_of_different_size_pull_alike() -> None:
    """The shared parameters' gradient of a task with rewards 100 times as large: 100 times as large without PopArt."""

    def ratio(**options: Any) -> float:
        loss = LossSettings(reward_transform="none", entropy_cost=0.0, popart_step=0.1, **options)
        learner = Learner(reference.make_network(SPEC), loss, OptimiserSettings(learning_rate=0.0), 1000)
        for seed in range(20):
            learner.update(*make_batch(seed, columns=20, scale=100.0))
        batch, tasks = make_batch(50, columns=60, scale=100.0)
        small, large = task_gradients(learner.network, batch, tasks, [0, 1], loss, learner.popart).norms
        return float(large / small)

    assert 1 / 3 < ratio(value_normalisation="popart") < 3
    assert ratio() > 30
