"""Diagnostics per task against sums by hand; sums add up; nothing without transitions."""

import numpy as np
import pytest
import torch

import agent_reference as reference
from agent.diagnostics import SUMS, summarise, task_sums
from agent.losses import LossSettings, compute_losses
from agent.network import ILLEGAL_LOGIT, Output
from agent.unroll import Arrays

SPEC = reference.small_spec({"a": 2, "b": 3, "never": 3})


def scene(seed: int) -> tuple[Arrays, np.ndarray, torch.Tensor]:
    rng = np.random.default_rng(seed)
    batch = reference.random_batch(rng, SPEC, 7, 6)
    batch["task"][:] = np.minimum(batch["task"], 1)  # nobody plays the third task
    legal = np.array(list(SPEC.legal_actions.values()))[batch["task"]]
    batch["action"] %= legal
    mask = np.arange(SPEC.num_actions) < legal[:, None]
    batch["log_probs"][:] = reference.log_softmax(np.where(mask, rng.normal(size=batch["log_probs"].shape), ILLEGAL_LOGIT))
    logits = np.where(mask, rng.normal(size=batch["log_probs"].shape), ILLEGAL_LOGIT)
    output = Output(torch.from_numpy(logits), torch.zeros(8, 6), torch.zeros(6, 2, 1))
    return (
        batch,
        logits,
        task_sums(compute_losses(output, reference.tensors(batch), LossSettings()), reference.tensors(batch), 3),
    )


def test_sums_per_task_by_hand() -> None:
    batch, logits, sums = scene(0)
    assert sums.shape == (3, len(SUMS))
    log_pi = reference.log_softmax(logits)
    for task in range(3):
        expected = dict.fromkeys(("transitions", "unrolls", "entropy", "off_policy", "rho", "rho_squared", "kl"), 0.0)
        for b in np.flatnonzero(batch["task"] == task):
            expected["unrolls"] += 1
            for t in range(7):
                if batch["first"][t + 1, b]:
                    continue
                legal = list(SPEC.legal_actions.values())[task]
                pi, mu = np.exp(log_pi[t, b, :legal]), np.exp(batch["log_probs"][t, b, :legal].astype(float))
                rho = pi[batch["action"][t, b]] / mu[batch["action"][t, b]]
                expected["transitions"] += 1
                expected["entropy"] -= (pi * np.log(pi)).sum()
                expected["off_policy"] += not 0.8 <= rho <= 1.25
                expected["rho"] += rho
                expected["rho_squared"] += rho**2
                expected["kl"] += (mu * np.log(mu / pi)).sum()
        for name, value in expected.items():
            assert sums[task, SUMS.index(name)].item() == pytest.approx(value, rel=1e-4, abs=1e-5), (task, name)


def test_losses_per_task_add_up_to_the_losses() -> None:
    batch, logits, sums = scene(1)
    fixed = reference.targets(logits, np.zeros((8, 6)), batch, LossSettings())
    for task in range(3):
        own = [part for part in fixed if batch["task"][part["column"]] == task]
        expected = reference.loss(logits, np.zeros((8, 6)), own, LossSettings())
        for name, value in zip(("policy_gradient_loss", "baseline_loss", "entropy_loss"), expected, strict=True):
            assert sums[task, SUMS.index(name)].item() == pytest.approx(value, rel=1e-4, abs=1e-5)


def test_means_per_transition() -> None:
    _, _, sums = scene(2)
    means = summarise(sums[0].numpy())
    total = dict(zip(SUMS, sums[0].tolist(), strict=True))
    assert means["entropy"] == pytest.approx(total["entropy"] / total["transitions"])
    assert means["off_policy_share"] == pytest.approx(total["off_policy"] / total["transitions"])
    assert means["kl_behaviour_target"] == pytest.approx(total["kl"] / total["transitions"])
    assert 0 < means["effective_sample_size"] <= 1
    assert means["effective_sample_size"] == pytest.approx(total["rho"] ** 2 / (total["transitions"] * total["rho_squared"]))
    assert 0 < means["off_policy_share"] <= 1 and means["kl_behaviour_target"] >= 0


def test_a_task_without_transitions_has_no_means() -> None:
    _, _, sums = scene(3)
    assert (sums[2] == 0).all() and summarise(sums[2].numpy()) == {}


def test_on_policy_the_effective_sample_size_is_one_and_the_divergence_zero() -> None:
    rng = np.random.default_rng(0)
    batch = reference.random_batch(rng, SPEC, 7, 6)
    output = Output(torch.from_numpy(batch["log_probs"].copy()), torch.zeros(8, 6), torch.zeros(6, 2, 1))
    data = reference.tensors(batch)
    means = summarise(task_sums(compute_losses(output, data, LossSettings()), data, 3).sum(0).numpy())
    assert means["effective_sample_size"] == pytest.approx(1, abs=1e-5)
    assert means["kl_behaviour_target"] == pytest.approx(0, abs=1e-5)
    assert means["off_policy_share"] == 0


@pytest.mark.parametrize("log_rho", [200.0, 1e30])
def test_extreme_ratios_stay_finite(log_rho: float) -> None:
    batch, logits, _ = scene(4)
    np.put_along_axis(batch["log_probs"], batch["action"][..., None], -log_rho, -1)
    data = reference.tensors(batch)
    output = Output(torch.from_numpy(logits), torch.zeros(8, 6), torch.zeros(6, 2, 1))
    sums = task_sums(compute_losses(output, data, LossSettings()), data, 3)
    assert sums.isfinite().all()
    assert all(np.isfinite(value) for value in summarise(sums[0].numpy()).values())


def test_explained_variance_is_one_for_the_targets_themselves_and_zero_for_a_constant() -> None:
    """Discount 0: the targets are the rewards, whatever the values are."""
    rng = np.random.default_rng(5)
    batch = reference.random_batch(rng, SPEC, 7, 6, end=0.0)
    batch["first"][0] = True
    logits, data = torch.from_numpy(batch["log_probs"].copy()), reference.tensors(batch)
    loss = LossSettings(discount=0.0, reward_transform="none")
    rewards = torch.cat([data["reward"][1:], torch.zeros(1, 6)])
    for values, expected in ((rewards, 1.0), (torch.full((8, 6), 3.0), 0.0), (rewards / 2, 0.75), (-rewards, -3.0)):
        found = compute_losses(Output(logits, values, torch.zeros(6, 2, 1)), data, loss)
        assert summarise(task_sums(found, data, 3).sum(0).numpy())["explained_variance"] == pytest.approx(expected, abs=1e-4)
    data["reward"].zero_()
    found = compute_losses(Output(logits, rewards, torch.zeros(6, 2, 1)), data, loss)
    assert "explained_variance" not in summarise(task_sums(found, data, 3).sum(0).numpy())
