"""Losses against a slow reference, values and gradients; what must not leak; reward transforms; illegal actions; extremes."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import agent_reference as reference
from agent.losses import LossSettings, compute_losses, entropy, transform_rewards, within
from agent.network import ILLEGAL_LOGIT, Output
from agent.unroll import Arrays, transition_mask

SPEC = reference.small_spec({"a": 2, "b": 3, "c": 4})


def scene(seed: int, length: int = 6, columns: int = 3, **options: Any) -> tuple[Arrays, np.ndarray, np.ndarray]:
    """A batch, and logits and values [T+1, B, ...] of a target policy that differs from the behaviour's."""
    rng = np.random.default_rng(seed)
    batch = reference.random_batch(rng, SPEC, length, columns, **options)
    legal = np.array(list(SPEC.legal_actions.values()))[batch["task"]]
    logits = rng.normal(size=(length + 1, columns, SPEC.num_actions))
    logits = np.where(np.arange(SPEC.num_actions) < legal[:, None], logits, ILLEGAL_LOGIT)
    return batch, logits, rng.normal(size=(length + 1, columns))


def output(logits: np.ndarray, values: np.ndarray) -> Output:
    return Output(
        torch.from_numpy(logits.copy()).requires_grad_(),
        torch.from_numpy(values.copy()).requires_grad_(),
        torch.zeros(values.shape[1], 2, 1),
    )


def gradients(batch: Arrays, logits: np.ndarray, values: np.ndarray, loss: LossSettings) -> tuple[np.ndarray, np.ndarray]:
    out = output(logits, values)
    compute_losses(out, reference.tensors(batch), loss).total().backward()
    assert out.logits.grad is not None and out.values.grad is not None
    return out.logits.grad.numpy(), out.values.grad.numpy()


LOSS_SETTINGS = st.builds(
    LossSettings,
    discount=st.sampled_from([0.0, 0.9, 1.0]),
    baseline_cost=st.sampled_from([0.5, 1.0]),
    entropy_cost=st.sampled_from([0.0, 0.01, 1.0]),
    reward_transform=st.sampled_from(["clip", "soft_asymmetric", "optimistic_paper", "none"]),
    time_limit=st.sampled_from(["bootstrap", "terminate"]),
    clip_rho=st.sampled_from([0.5, 1.0, 2.0]),
    clip_c=st.sampled_from([0.5, 1.0, 2.0]),
    clip_pg_rho=st.sampled_from([0.5, 1.0, 2.0]),
    lambda_=st.sampled_from([0.5, 1.0]),
)


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 2**32 - 1), loss=LOSS_SETTINGS)
def test_values_and_gradients_equal_the_reference(seed: int, loss: LossSettings) -> None:
    """The reference cuts unrolls into episodes and sums each alone; gradients by finite differences at fixed targets."""
    batch, logits, values = scene(seed)
    found = compute_losses(output(logits, values), reference.tensors(batch), loss)
    fixed = reference.targets(logits, values, batch, loss)
    expected = reference.loss(logits, values, fixed, loss)
    for name, value in zip(("policy_gradient", "baseline", "entropy"), expected, strict=True):
        assert getattr(found, name).shape == (values.shape[1],)
        assert getattr(found, name).sum().item() == pytest.approx(value, rel=1e-4, abs=1e-4)
    assert found.total().item() == pytest.approx(expected.sum(), rel=1e-4, abs=1e-4)
    of_logits, of_values = gradients(batch, logits, values, loss)
    slow_logits = reference.finite_differences(lambda x: reference.loss(x, values, fixed, loss).sum(), logits)
    slow_values = reference.finite_differences(lambda x: reference.loss(logits, x, fixed, loss).sum(), values)
    np.testing.assert_allclose(of_logits, slow_logits, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(of_values, slow_values, rtol=1e-3, atol=1e-4)


def test_published_weights_are_the_defaults() -> None:
    """Recipe: policy gradient + 0.5 * (1/2 squared error) + entropy cost; discount 0.99; Atari clips rewards, entropy 0.01."""
    loss = LossSettings()
    assert (loss.discount, loss.baseline_cost, loss.entropy_cost, loss.reward_transform) == (0.99, 0.5, 0.01, "clip")
    assert (loss.clip_rho, loss.clip_c, loss.clip_pg_rho, loss.lambda_, loss.time_limit) == (1, 1, 1, 1, "bootstrap")


@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 2**32 - 1), time_limit=st.sampled_from(["bootstrap", "terminate"]))
def test_nothing_leaks_across_an_end(seed: int, time_limit: Any) -> None:
    """Change everything after one episode's end: losses' gradients of that episode's rows stay the same to the bit."""
    rng = np.random.default_rng(seed)
    batch, logits, values = scene(seed, length=8, columns=1, end=0.0)
    batch["first"][:] = False
    end = int(rng.integers(1, 7))
    kind = "truncated" if rng.random() < 0.5 else "terminated"
    batch[kind][end], batch["first"][end + 1] = True, True
    loss = LossSettings(time_limit=time_limit, reward_transform="none")
    before = gradients(batch, logits, values, loss)
    batch["reward"][end + 1 :] += 1000
    batch["action"][end] = 1 - batch["action"][end] if batch["action"][end] < 2 else 0
    logits[end + 1 :, :, :2] += rng.normal(size=2) * 5
    values[end + 1 :] += 1000
    if kind == "terminated" or time_limit == "terminate":
        values[end] += 1000  # the value of the last observation is used by nobody
    after = gradients(batch, logits, values, loss)
    for old, new in zip(before, after, strict=True):
        np.testing.assert_array_equal(old[: end + 1], new[: end + 1])
        assert (new[end] == 0).all(), "the pair (last, first) trains nothing"
    # And the other direction: what happened before the end does not touch the next episode.
    batch["reward"][: end + 1] -= 1000
    values[:end] -= 1000
    last = gradients(batch, logits, values, loss)
    for old, new in zip(after, last, strict=True):
        np.testing.assert_array_equal(old[end + 1 :], new[end + 1 :])


def test_a_reward_on_every_t_th_step_is_in_the_last_target() -> None:
    """Reward 1 arrives with row T only: transition T - 1 must train on it (value gradient: cost * (V - target) by hand)."""
    batch, logits, values = scene(0, length=5, columns=2, end=0.0)
    batch["first"][:] = False
    batch["reward"][:] = 0
    batch["reward"][-1] = 1
    values[:] = 0
    batch["log_probs"][:] = reference.log_softmax(logits)  # on-policy
    loss = LossSettings(discount=0.9, baseline_cost=1.0)
    _, of_values = gradients(batch, logits, values, loss)
    expected = [-(0.9 ** (4 - t)) for t in range(5)] + [0.0]
    np.testing.assert_allclose(of_values, np.array(expected)[:, None] * np.ones(2), rtol=1e-5)


@pytest.mark.parametrize(
    ("kind", "time_limit", "target"),
    [
        ("truncated", "bootstrap", 1 + 0.5 * 10),
        ("truncated", "terminate", 1),
        ("terminated", "bootstrap", 1),
        ("terminated", "terminate", 1),
    ],
)
def test_only_truncation_bootstraps_from_the_final_observation(kind: str, time_limit: Any, target: float) -> None:
    """Row 1 is the last of an episode with value 10 and reward 1; row 2 starts the next with value 77; discount 0.5."""
    batch, logits, values = scene(0, length=3, columns=1, end=0.0)
    batch["first"][:, 0] = [True, False, True, False]
    batch[kind][1] = True
    batch["reward"][:, 0] = [0, 1, 0, 0]
    values[:, 0] = [0, 10, 77, 0]
    batch["log_probs"][:] = reference.log_softmax(logits)
    _, of_values = gradients(
        batch, logits, values, LossSettings(discount=0.5, baseline_cost=1.0, reward_transform="none", time_limit=time_limit)
    )
    assert of_values[0, 0] == pytest.approx(-target)
    assert of_values[1, 0] == 0


def test_truncation_at_the_end_of_an_unroll_bootstraps_too() -> None:
    batch, logits, values = scene(0, length=1, columns=1, end=0.0)
    batch["first"][:] = False
    batch["truncated"][1] = True
    batch["reward"][1], values[:, 0] = 1, [0, 10]
    batch["log_probs"][:] = reference.log_softmax(logits)
    _, of_values = gradients(batch, logits, values, LossSettings(discount=0.5, baseline_cost=1.0))
    assert of_values[0, 0] == pytest.approx(-(1 + 0.5 * 10))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("none", [-20.0, -0.5, 0.0, 0.5, 20.0]),
        ("clip", [-1.0, -0.5, 0.0, 0.5, 1.0]),
        # tanh 4 = 0.99933, tanh 0.1 = 0.0996680
        ("soft_asymmetric", [-1.498994, -0.149502, 0.0, 0.498340, 4.996647]),
        # tanh 20 = 1, tanh 0.5 = 0.4621172
        ("optimistic_paper", [-0.3, -0.138635, 0.0, 2.310586, 5.0]),
    ],
)
def test_reward_transforms_by_value(name: str, expected: list[float]) -> None:
    rewards = torch.tensor([-20.0, -0.5, 0.0, 0.5, 20.0])
    np.testing.assert_allclose(transform_rewards(rewards, name).numpy(), expected, rtol=2e-6)


def test_an_unknown_transform_names_the_key() -> None:
    with pytest.raises(ValueError, match=r"loss\.reward_transform=tanh is unknown: use clip"):
        transform_rewards(torch.zeros(1), "tanh")


@settings(deadline=None, max_examples=15)
@given(seed=st.integers(0, 2**32 - 1), cut=st.integers(1, 4))
def test_losses_are_sums_over_the_batch(seed: int, cut: int) -> None:
    """Two learners with a part of the columns each: losses and gradients add up to those of the whole."""
    batch, logits, values = scene(seed, columns=5)
    loss = LossSettings()
    whole = compute_losses(output(logits, values), reference.tensors(batch), loss).total().item()
    of_logits, of_values = gradients(batch, logits, values, loss)
    total, rows = 0.0, [name for name, field in reference.unroll_spec(SPEC, 6).fields().items() if field.per_row]
    for part in (slice(None, cut), slice(cut, None)):
        columns = {name: array[:, part] if name in rows else array[part] for name, array in batch.items()}
        total += compute_losses(output(logits[:, part], values[:, part]), reference.tensors(columns), loss).total().item()
        part_logits, part_values = gradients(columns, logits[:, part], values[:, part], loss)
        np.testing.assert_allclose(part_logits, of_logits[:, part], rtol=1e-5, atol=1e-7)
        np.testing.assert_allclose(part_values, of_values[:, part], rtol=1e-5, atol=1e-7)
    assert total == pytest.approx(whole, rel=1e-5)


def test_longer_unrolls_weigh_more() -> None:
    """A sum over time, not a mean: n equal one-step episodes have n times the loss of one."""
    batch, logits, values = scene(4, length=1, columns=1, end=0.0)
    losses = []
    for repeats in (1, 3):
        rows = np.tile([0, 1], repeats)
        long = {name: array[rows] if len(array) == 2 else array for name, array in batch.items()}
        long["first"] = np.tile([[True], [False]], (repeats, 1))
        long["terminated"] = np.tile([[False], [True]], (repeats, 1))
        long["truncated"] = np.zeros((2 * repeats, 1), bool)
        losses.append(compute_losses(output(logits[rows], values[rows]), reference.tensors(long), LossSettings()))
    for name in ("policy_gradient", "baseline", "entropy"):
        assert getattr(losses[1], name).item() == pytest.approx(3 * getattr(losses[0], name).item(), rel=1e-6)


def test_no_gradient_flows_into_targets() -> None:
    """The bootstrap value, row T's logits and the ratios have no gradient: only row t's own value and policy move."""
    batch, logits, values = scene(5, length=1, columns=1, end=0.0)
    batch["first"][:] = False
    of_logits, of_values = gradients(batch, logits, values, LossSettings(entropy_cost=0.0))
    assert of_values[1, 0] == 0 and (of_logits[1] == 0).all()
    fixed = reference.targets(logits, values, batch, LossSettings())[0]
    probabilities = np.exp(reference.log_softmax(logits[0, 0]))
    chosen = np.eye(SPEC.num_actions)[batch["action"][0, 0]]
    np.testing.assert_allclose(of_logits[0, 0], -fixed["advantages"][0] * (chosen - probabilities), rtol=1e-4, atol=1e-6)
    assert of_values[0, 0] == pytest.approx(0.5 * (values[0, 0] - fixed["vs"][0]), rel=1e-4)


@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 2**32 - 1), legal=st.integers(1, 18), scale=st.sampled_from([0.0, 1.0, 100.0]))
def test_entropy_of_n_legal_actions(seed: int, legal: int, scale: float) -> None:
    """In [0, ln n], with ln n at equal logits; gradients of illegal actions are exactly 0, all others finite."""
    logits = torch.full((5, 18), ILLEGAL_LOGIT)
    logits[:, :legal] = torch.from_numpy(np.random.default_rng(seed).normal(size=(5, legal)) * scale).float()
    logits.requires_grad_()
    found = entropy(torch.log_softmax(logits, -1))
    assert (found >= -1e-6).all() and (found <= np.log(legal) + 1e-5).all()
    if scale == 0:
        np.testing.assert_allclose(found.detach().numpy(), np.log(legal), rtol=1e-5, atol=1e-6)
    found.sum().backward()
    assert logits.grad is not None
    assert (logits.grad[:, legal:] == 0).all() and logits.grad.isfinite().all()


def test_illegal_actions_have_no_gradient_in_the_whole_loss() -> None:
    batch, logits, values = scene(6, length=20, columns=8)
    of_logits, _ = gradients(batch, logits, values, LossSettings(entropy_cost=1.0))
    legal = np.array(list(SPEC.legal_actions.values()))[batch["task"]]
    illegal = np.broadcast_to(np.arange(SPEC.num_actions) >= legal[:, None], of_logits.shape)
    assert illegal.any() and (of_logits[illegal] == 0).all()
    assert (of_logits[~illegal] != 0).any()


@pytest.mark.parametrize("direction", [1, -1])
@pytest.mark.parametrize("size", [50.0, 1e4, 1e30, np.inf])
def test_extremely_off_policy_data_gives_finite_gradients(size: float, direction: int) -> None:
    """The behaviour policy found its action all but impossible, or the target policy does."""
    batch, logits, values = scene(7, length=100, columns=4)
    batch["first"][1:], batch["terminated"][1:], batch["truncated"][1:] = False, False, False
    taken = batch["action"][..., None]
    if direction == 1:
        np.put_along_axis(batch["log_probs"], taken, -size, -1)
    else:
        np.put_along_axis(logits, taken, np.take_along_axis(logits, taken, -1) - min(size, 1e30), -1)
    batch["reward"] *= 1e3
    for clip in (1, 10, 100):  # the recipe's search; products of 100 ratios of 100 have no float32
        loss = LossSettings(reward_transform="none", clip_rho=clip, clip_c=clip, clip_pg_rho=clip)
        for part in gradients(batch, logits, values, loss):
            assert np.isfinite(part).all()


def test_transition_mask() -> None:
    first = torch.tensor([[True, False], [False, True], [True, False]])
    assert transition_mask(first).tolist() == [[True, False], [False, True]]


def test_advantages_in_units_of_their_deviation_reach_the_policy_gradient_and_nothing_else() -> None:
    batch = reference.random_batch(np.random.default_rng(3), SPEC, 6, 5)
    logits, values = torch.zeros(7, 5, SPEC.num_actions), torch.zeros(7, 5)
    out, data = Output(logits, values, torch.zeros(5, 2, 1)), reference.tensors(batch)
    plain = compute_losses(out, data, LossSettings())
    deviations = torch.tensor([1.0, 2.0, 0.5, 4.0, 10.0])
    scaled = compute_losses(out, data, LossSettings(), None, deviations)
    torch.testing.assert_close(scaled.policy_gradient * deviations, plain.policy_gradient)
    assert torch.equal(scaled.baseline, plain.baseline) and torch.equal(scaled.entropy, plain.entropy)
    assert torch.equal(scaled.advantages, plain.advantages), "statistics are of advantages as they are"


def test_the_ratio_clip_stops_what_has_gone_far_enough() -> None:
    """clip 0.2: ratios 0.7, 0.9, 1.1, 1.3, pushed up (advantage > 0) and down."""
    log_rhos = torch.tensor([0.7, 0.9, 1.1, 1.3]).log()[:, None].expand(4, 2)
    advantages = torch.tensor([[2.0, -2.0]]).expand(4, 2)
    assert within(log_rhos, advantages, 0.2).tolist() == [[1, 0], [1, 1], [1, 1], [0, 1]]


def test_the_ratio_clip_takes_the_policy_gradient_away_and_leaves_values_and_entropy() -> None:
    batch = reference.random_batch(np.random.default_rng(4), SPEC, 6, 5)
    gradients = []
    for clip in (0.0, 0.1, 1e9):
        logits = torch.from_numpy(np.random.default_rng(5).normal(size=(7, 5, SPEC.num_actions))).requires_grad_()
        values = torch.zeros(7, 5, requires_grad=True)
        losses = compute_losses(
            Output(logits, values, torch.zeros(5, 2, 1)), reference.tensors(batch), LossSettings(ratio_clip=clip)
        )
        losses.policy_gradient.sum().backward()
        assert logits.grad is not None
        gradients.append((logits.grad.clone(), losses.baseline.detach(), losses.entropy.detach()))
    (free, *rest), (cut, *same), (wide, *_) = gradients
    assert torch.equal(wide, free), "no ratio is so far away"
    changed = ~torch.isclose(cut, free).all(-1)
    assert 0 < int(changed.sum()) and (cut[changed] == 0).all()
    assert all(torch.equal(a, b) for a, b in zip(rest, same, strict=True))
