"""V-trace: the golden file, explicit summation, the n-step return, episodes apart, wrong arguments, extreme ratios."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import agent_reference as reference
from agent.vtrace import VTraceReturns, from_importance_weights

CASES = json.loads((Path(__file__).parent / "data" / "vtrace.json").read_text(encoding="utf-8"))["cases"]
INPUTS = ("log_rhos", "discounts", "rewards", "values", "bootstrap_value")
OPTIONS = ("clip_rho_threshold", "clip_c_threshold", "clip_pg_rho_threshold", "lambda_")
THRESHOLDS = st.sampled_from([None, 0.3, 1.0, 3.7])


def arguments(seed: int, length: int, columns: int, dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    shape = (length, columns)
    arrays = {
        "log_rhos": rng.normal(size=shape),
        "discounts": 0.9 * (rng.random(shape) > 0.25),
        "rewards": rng.normal(size=shape),
        "values": rng.normal(size=shape),
        "bootstrap_value": rng.normal(size=columns),
    }
    return {name: torch.from_numpy(array).to(dtype) for name, array in arrays.items()}


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-9)])
def test_golden_file(dtype: torch.dtype, tolerance: float) -> None:
    assert len(CASES) == 24
    for case in CASES:
        inputs: dict[str, Any] = {name: torch.tensor(case[name], dtype=dtype) for name in INPUTS}
        found = from_importance_weights(**inputs, **{name: case[name] for name in OPTIONS})
        for name in VTraceReturns._fields:
            expected = np.array(case[name])
            assert getattr(found, name).dtype == dtype
            # Relative to the largest number of the case: ratios of e^10 without clipping make targets of that size.
            scale = max(1.0, float(np.abs(expected).max()))
            np.testing.assert_allclose(getattr(found, name).numpy() / scale, expected / scale, rtol=0, atol=tolerance)


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 2**32 - 1),
    length=st.integers(1, 8),
    columns=st.integers(1, 3),
    clip_rho=THRESHOLDS,
    clip_c=THRESHOLDS,
    clip_pg=THRESHOLDS,
    lambda_=st.sampled_from([0.0, 0.5, 1.0]),
)
def test_equals_explicit_summation(
    seed: int, length: int, columns: int, clip_rho: float | None, clip_c: float | None, clip_pg: float | None, lambda_: float
) -> None:
    given_ = arguments(seed, length, columns)
    found = from_importance_weights(
        **given_, clip_rho_threshold=clip_rho, clip_c_threshold=clip_c, clip_pg_rho_threshold=clip_pg, lambda_=lambda_
    )
    arrays = {name: tensor.numpy() for name, tensor in given_.items()}
    vs, advantages = reference.vtrace(**arrays, clip_rho=clip_rho, clip_c=clip_c, clip_pg_rho=clip_pg, lambda_=lambda_)
    np.testing.assert_allclose(found.vs.numpy(), vs, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(found.pg_advantages.numpy(), advantages, rtol=1e-9, atol=1e-9)


@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 2**32 - 1), length=st.integers(1, 10))
def test_on_policy_is_the_n_step_return(seed: int, length: int) -> None:
    given_ = arguments(seed, length, 2)
    given_["log_rhos"].zero_()
    found = from_importance_weights(**given_)
    returns = given_["bootstrap_value"].clone()
    for t in reversed(range(length)):
        returns = given_["rewards"][t] + given_["discounts"][t] * returns
        torch.testing.assert_close(found.vs[t], returns)
        torch.testing.assert_close(found.pg_advantages[t], returns - given_["values"][t])


@pytest.mark.parametrize(("last_discount", "expected"), [(0.9, [5.23, 4.7]), (0.0, [2.8, 2.0])])
def test_the_example_of_the_recipe(last_discount: float, expected: list[float]) -> None:
    """Rewards 1, 2, then V = 3, gamma 0.9: 2 + 0.9 * 3 = 4.7 and 1 + 0.9 * 4.7 = 5.23; terminal: 2 and 1 + 0.9 * 2 = 2.8."""
    found = from_importance_weights(
        log_rhos=torch.zeros(2, 1),
        discounts=torch.tensor([[0.9], [last_discount]]),
        rewards=torch.tensor([[1.0], [2.0]]),
        values=torch.tensor([[7.0], [-4.0]]),  # on-policy, they cancel
        bootstrap_value=torch.tensor([3.0]),
    )
    np.testing.assert_allclose(found.vs[:, 0].numpy(), expected, rtol=1e-6)


def test_the_policy_that_rho_bar_evaluates() -> None:
    """mu (0.8, 0.2), pi (0.2, 0.8), rho-bar 1: values of the policy min(mu, pi), normalised = (0.5, 0.5), not of pi.

    One state, one step, rewards 0 and 1: the fixed point v is where the mean residual under mu is 0.
    """
    mu, pi, rewards = np.array([0.8, 0.2]), np.array([0.2, 0.8]), np.array([0.0, 1.0])
    for clip, expected in ((1.0, 0.5), (None, 0.8)):
        targets = from_importance_weights(
            log_rhos=torch.from_numpy(np.log(pi / mu)[None]),
            discounts=torch.zeros(1, 2, dtype=torch.float64),
            rewards=torch.from_numpy(rewards[None]),
            values=torch.full((1, 2), expected, dtype=torch.float64),
            bootstrap_value=torch.zeros(2, dtype=torch.float64),
            clip_rho_threshold=clip,
        )
        assert float((torch.from_numpy(mu) * targets.vs[0]).sum()) == pytest.approx(expected)


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 2**32 - 1), before=st.integers(1, 4), after=st.integers(1, 4), dtype=st.sampled_from([32, 64]))
def test_a_pair_that_is_no_transition_separates_two_episodes(seed: int, before: int, after: int, dtype: int) -> None:
    """log_rho -inf and discount 0 at row `before`: its target is its own value, and each side is as if it were alone."""
    torch_dtype = torch.float32 if dtype == 32 else torch.float64
    given_ = arguments(seed, before + 1 + after, 2, torch_dtype)
    given_["log_rhos"][before], given_["discounts"][before] = -torch.inf, 0
    given_["rewards"][before] = 1e6  # must not matter
    found = from_importance_weights(**given_)
    torch.testing.assert_close(found.vs[before], given_["values"][before], rtol=0, atol=0)
    assert (found.pg_advantages[before] == 0).all()
    left = {name: tensor[:before] for name, tensor in given_.items()} | {"bootstrap_value": given_["values"][before]}
    right = {name: tensor[before + 1 :] for name, tensor in given_.items() if name != "bootstrap_value"}
    for part, rows in (
        (from_importance_weights(**left), slice(None, before)),
        (from_importance_weights(**right, bootstrap_value=given_["bootstrap_value"]), slice(before + 1, None)),
    ):
        torch.testing.assert_close(found.vs[rows], part.vs, rtol=0, atol=0)
        torch.testing.assert_close(found.pg_advantages[rows], part.pg_advantages, rtol=0, atol=0)


@pytest.mark.parametrize("name", INPUTS)
@pytest.mark.parametrize(
    "wrong",
    [
        lambda t: t[None],
        lambda t: t[0],
        lambda t: t[..., :1],
        lambda t: torch.cat([t, t], -1),
        lambda t: torch.cat([t, t], 0),
        lambda t: t.sum(),
        lambda t: t.long(),
        lambda t: t > 0,
    ],
    ids=["rank up", "rank down", "fewer columns", "more columns", "more rows", "scalar", "int", "bool"],
)
def test_wrong_ranks_shapes_and_dtypes(name: str, wrong: Any) -> None:
    given_ = arguments(0, 3, 2)
    given_[name] = wrong(given_[name])
    with pytest.raises(ValueError, match=r"must be (\[T, B\]|\[B\]|a float)"):
        from_importance_weights(**given_)


@pytest.mark.parametrize("change", [lambda t: t[..., 0], lambda t: t[..., None]], ids=["no columns", "one axis more"])
def test_a_rank_that_is_wrong_everywhere(change: Any) -> None:
    """[T] or [T, B, 1] throughout would run, and mean something else."""
    with pytest.raises(ValueError, match=r"log_rhos must be \[T, B\]"):
        from_importance_weights(**{name: change(tensor) for name, tensor in arguments(0, 3, 2).items()})


def test_no_time_steps() -> None:
    given_ = {name: tensor[:0] for name, tensor in arguments(0, 1, 2).items()}
    with pytest.raises(ValueError, match="at least 1"):
        from_importance_weights(**given_ | {"bootstrap_value": torch.zeros(2)})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_float32(dtype: torch.dtype) -> None:
    """Exactly as if the rounded numbers had been float32: a sum in half precision would differ in the third digit."""
    given_ = arguments(1, 8, 3, dtype)
    found = from_importance_weights(**given_)
    wide = from_importance_weights(**{name: tensor.float() for name, tensor in given_.items()})
    assert found.vs.dtype == found.pg_advantages.dtype == torch.float32
    torch.testing.assert_close(found, wide, rtol=0, atol=0)


def test_the_widest_dtype_wins() -> None:
    given_ = arguments(1, 4, 2, torch.float32)
    given_["bootstrap_value"] = given_["bootstrap_value"].double()
    assert from_importance_weights(**given_).vs.dtype == torch.float64


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("threshold", [None, 1.0, 1e30])
@pytest.mark.parametrize("log_rho", [1e30, -1e30, np.inf, -np.inf, 88.0, 60.0])
def test_extreme_ratios_stay_finite(log_rho: float, threshold: float | None, dtype: torch.dtype) -> None:
    given_ = arguments(2, 30, 3, dtype)
    given_["log_rhos"].fill_(log_rho)
    given_["log_rhos"][::3] = -log_rho  # extreme in both directions
    given_["rewards"] *= 1e6
    found = from_importance_weights(
        **given_, clip_rho_threshold=threshold, clip_c_threshold=threshold, clip_pg_rho_threshold=threshold
    )
    assert found.vs.isfinite().all() and found.pg_advantages.isfinite().all()


def test_nan_is_not_hidden() -> None:
    """The learner has to notice it: a NaN reward that came out as a large number would be trained on."""
    given_ = arguments(2, 5, 2)
    given_["rewards"][3, 1] = torch.nan
    found = from_importance_weights(**given_)
    assert found.vs[3, 1].isnan() and found.pg_advantages[3, 1].isnan()
    assert found.vs[:, 0].isfinite().all()


def test_no_gradient_flows_through() -> None:
    given_ = {name: tensor.requires_grad_() for name, tensor in arguments(3, 4, 2).items()}
    found = from_importance_weights(**given_)
    assert not found.vs.requires_grad and not found.pg_advantages.requires_grad
