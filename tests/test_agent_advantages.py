"""The running deviation of advantages: by hand, apart for each task, over what counts, kept, and used by the learner."""

import numpy as np
import pytest
import torch

import agent_reference as reference
from agent.advantages import STEP, AdvantageScale, advantage_sums
from agent.learner import Learner, LearnerSettings
from agent.losses import LossSettings
from agent.optimisers import OptimiserSettings

SPEC = reference.small_spec({"small": 3, "large": 3, "never": 3})
CPU = torch.device("cpu")
LOSS = LossSettings(reward_transform="none", advantage_normalisation="task")


def make_batch(seed: int, columns: int = 40):
    batch = reference.random_batch(np.random.default_rng(seed), SPEC, 5, columns)
    batch["task"][:] = np.arange(columns) % 2
    batch["reward"][:, batch["task"] == 1] *= 100
    return reference.tensors(batch), batch["task"].tolist()


def test_sums_are_over_transitions_of_each_task() -> None:
    batch, _ = make_batch(0)
    advantages = torch.from_numpy(np.random.default_rng(1).normal(size=(5, 40)))
    sums = advantage_sums(advantages, batch, 3).numpy()
    counted = ~batch["first"][1:].numpy()
    for task in range(2):
        own = counted & (batch["task"].numpy() == task)
        np.testing.assert_allclose(sums[task], [own.sum(), (advantages.numpy()[own] ** 2).sum()])
    assert (sums[2] == 0).all()


def test_plain_means_at_first_then_short_steps() -> None:
    scale = AdvantageScale(SPEC.legal_actions, CPU)
    for value in (4.0, 16.0):
        scale.update(torch.tensor([[10, 10 * value], [0, 0], [0, 0]]))
    assert scale.deviations([0, 1]).tolist() == pytest.approx([10**0.5, 1.0])
    scale.counts[0] = int(10 / STEP)
    scale.update(torch.tensor([[1, 110.0], [0, 0], [0, 0]]))
    assert scale.mean_squares[0] == pytest.approx(10 + STEP * 100)


def test_statistics_follow_their_task() -> None:
    scale = AdvantageScale(("a", "b", "c"), CPU)
    scale.update(torch.tensor([[1, 4.0], [1, 9.0], [1, 16.0]]))
    cut = AdvantageScale(("c", "a"), CPU)
    cut.restore(scale.state())
    assert cut.deviations([0, 1]).tolist() == pytest.approx([4, 2]) and cut.counts == [1, 1]


def learner() -> Learner:
    optimiser = OptimiserSettings(learning_rate=0.0)
    reuse = LearnerSettings(batch_size=40, epochs=2, minibatches=2)
    return Learner(reference.make_network(SPEC), LOSS, optimiser, 1000, None, reuse)


def test_the_very_first_update_is_in_units_of_its_advantages_already() -> None:
    """Task `large` is paid 100 times as much: both pull the policy alike, from the first update on."""
    made = learner()
    batch, tasks = make_batch(0)
    assert made.advantages is not None
    made._measure_scales(batch, tasks, None)
    small, large = made.advantages.deviations([0, 1]).tolist()
    assert 30 < large / small < 300
    losses = made.losses(batch, tasks)
    scaled = losses.advantages / made.advantages.deviations(tasks)
    counted = ~batch["first"][1:]
    for task in range(2):
        own = counted & (batch["task"] == task)
        assert float(scaled[own].square().mean()) == pytest.approx(1, rel=1e-3)


def test_every_update_is_a_step_and_a_bad_batch_is_none() -> None:
    made = learner()
    made.update(*make_batch(0))
    assert made.advantages is not None
    assert made.advantages.counts == [5, 5, 0], "the first batch, and four updates"
    kept = made.advantages.state()
    batch, tasks = make_batch(1)
    batch["reward"][1:] = float("nan")
    assert made.update(batch, tasks)["skipped"]
    assert made.advantages.state() == kept
