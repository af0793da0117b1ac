"""V-trace (Espeholt et al. 2018, arXiv:1802.01561, section 4.1): off-policy corrected value targets and advantages."""

from typing import NamedTuple

import torch

# exp(80) is finite in float32 and far beyond every clipping threshold in use.
MAX_LOG_RHO = 80.0


class VTraceReturns(NamedTuple):
    """`vs` and `pg_advantages`, both [T, B], without gradient."""

    vs: torch.Tensor
    pg_advantages: torch.Tensor


@torch.no_grad()
def from_importance_weights(
    log_rhos: torch.Tensor,
    discounts: torch.Tensor,
    rewards: torch.Tensor,
    values: torch.Tensor,
    bootstrap_value: torch.Tensor,
    clip_rho_threshold: float | None = 1.0,
    clip_c_threshold: float | None = 1.0,
    clip_pg_rho_threshold: float | None = 1.0,
    lambda_: float = 1.0,
) -> VTraceReturns:
    """V-trace targets by the backward recursion of remark 1.

    Args:
        log_rhos: [T, B] log of target over behaviour probability of the action taken. -inf makes a pair that is no transition:
            its residual and its trace are 0. +inf is allowed.
        discounts: [T, B] discount of transition t; 0 where it terminated.
        rewards: [T, B] reward of transition t.
        values: [T, B] value of row t.
        bootstrap_value: [B] value of row T.
        clip_rho_threshold: rho-bar; None = not clipped.
        clip_c_threshold: c-bar; None = not clipped.
        clip_pg_rho_threshold: threshold of the ratio in the policy gradient; None = not clipped.
        lambda_: c_t = lambda * min(c-bar, ratio).

    Returns:
        VTraceReturns in the widest float dtype given; half precision is computed, and returned, in float32.

    Raises:
        ValueError: a wrong rank, shape or dtype.
    """
    _check(log_rhos, discounts, rewards, values, bootstrap_value)
    dtype = torch.float32
    for tensor in (log_rhos, discounts, rewards, values, bootstrap_value):
        dtype = torch.promote_types(dtype, tensor.dtype)
    log_rhos, discounts, rewards, values, bootstrap_value = (
        tensor.to(dtype) for tensor in (log_rhos, discounts, rewards, values, bootstrap_value)
    )
    rhos = log_rhos.clamp(max=MAX_LOG_RHO).exp()
    clipped_rhos = _clip(rhos, clip_rho_threshold)
    traces = discounts * lambda_ * _clip(rhos, clip_c_threshold)
    next_values = torch.cat([values[1:], bootstrap_value[None]])
    deltas = _finite(clipped_rhos * (rewards + discounts * next_values - values))
    corrections = []
    correction = torch.zeros_like(bootstrap_value)
    for delta, trace in zip(reversed(deltas.unbind()), reversed(traces.unbind()), strict=True):
        correction = _finite(delta + _finite(trace * correction))
        corrections.append(correction)
    vs = _finite(values + torch.stack(corrections[::-1]))
    next_vs = torch.cat([vs[1:], bootstrap_value[None]])
    advantages = _clip(rhos, clip_pg_rho_threshold) * _finite(rewards + discounts * next_vs - values)
    return VTraceReturns(vs, _finite(advantages))


def _finite(tensor: torch.Tensor) -> torch.Tensor:
    # Without clipping, products of ratios may overflow. The root of the largest number leaves room for the square of a value
    # error and for sums of those. NaN passes, to be noticed by the learner.
    largest = torch.finfo(tensor.dtype).max ** 0.5 / 1e3
    return tensor.clamp(-largest, largest)


def _clip(rhos: torch.Tensor, threshold: float | None) -> torch.Tensor:
    return rhos if threshold is None else rhos.clamp(max=threshold)


def _check(
    log_rhos: torch.Tensor,
    discounts: torch.Tensor,
    rewards: torch.Tensor,
    values: torch.Tensor,
    bootstrap_value: torch.Tensor,
) -> None:
    named = {"log_rhos": log_rhos, "discounts": discounts, "rewards": rewards, "values": values}
    for name, tensor in named.items():
        if tensor.dim() != 2 or tensor.shape != log_rhos.shape:
            raise ValueError(f"{name} must be [T, B] like log_rhos {list(log_rhos.shape)}, got {list(tensor.shape)}")
    if len(log_rhos) == 0:
        raise ValueError("log_rhos has no time steps: T must be at least 1")
    if bootstrap_value.shape != log_rhos.shape[1:]:
        raise ValueError(f"bootstrap_value must be [B] = [{log_rhos.shape[1]}], got {list(bootstrap_value.shape)}")
    for name, tensor in {**named, "bootstrap_value": bootstrap_value}.items():
        if not tensor.is_floating_point():
            raise ValueError(f"{name} must be a float tensor, got {tensor.dtype}")
