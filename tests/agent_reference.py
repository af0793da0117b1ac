"""Slow NumPy references in the paper's notation, and small specs and batches: what the tests of agent/ measure against."""

from __future__ import annotations

import itertools
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from agent.losses import LossSettings
from agent.network import Network, NetworkSettings, NetworkSpec
from agent.unroll import Arrays, Batch
from launch.plan import unroll_spec


@contextmanager
def full_disk(num_bytes: int) -> Iterator[None]:
    """No file may grow beyond this: the kernel refuses the write, as it does on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def vtrace(
    log_rhos: np.ndarray,
    discounts: np.ndarray,
    rewards: np.ndarray,
    values: np.ndarray,
    bootstrap_value: np.ndarray,
    clip_rho: float | None = 1.0,
    clip_c: float | None = 1.0,
    clip_pg_rho: float | None = 1.0,
    lambda_: float = 1.0,
) -> tuple[np.ndarray, np.ndarray]:
    """Equation 1 of arXiv:1802.01561, term by term: v_s = V_s + sum_t gamma^(t-s) (prod c_i) rho_t (r_t + gamma V_t+1 - V_t).

    All [T, B] but the last, [B]; float64. No recursion: every v_s sums all its terms anew.
    """
    num_steps, num_columns = rewards.shape
    ratios = np.exp(log_rhos)
    rho, c, pg = (np.minimum(np.inf if bar is None else bar, ratios) for bar in (clip_rho, clip_c, clip_pg_rho))
    v = np.concatenate([values, bootstrap_value[None]]).astype(np.float64)
    vs = v.copy()  # row T: the bootstrap value itself
    for b in range(num_columns):
        for s in range(num_steps):
            for t in range(s, num_steps):
                weight = np.prod([discounts[i, b] * lambda_ * c[i, b] for i in range(s, t)])
                vs[s, b] += weight * rho[t, b] * (rewards[t, b] + discounts[t, b] * v[t + 1, b] - v[t, b])
    advantages = pg * (rewards + discounts * vs[1:] - values)
    return vs[:-1], advantages


def transform(reward: float, name: str) -> float:
    """Reward transforms of the recipe, one number at a time."""
    if name == "clip":
        return max(-1.0, min(1.0, reward))
    if name == "soft_asymmetric":
        return 5.0 * np.tanh(reward / 5.0) * (0.3 if reward < 0 else 1.0)
    if name == "optimistic_paper":
        return 0.3 * min(np.tanh(reward), 0.0) + 5.0 * max(np.tanh(reward), 0.0)
    return reward


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Over the last axis, float64."""
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def segments(first: np.ndarray) -> list[tuple[int, int]]:
    """Rows [a, b] of one column that belong to one episode: transitions are a -> a + 1 ... b - 1 -> b."""
    starts = [0, *[t for t in range(1, len(first)) if first[t]], len(first)]
    return [(a, b - 1) for a, b in itertools.pairwise(starts)]


def targets(logits: np.ndarray, values: np.ndarray, batch: Arrays, settings: LossSettings) -> list[dict[str, Any]]:
    """V-trace targets, episode by episode: each is cut out of the unroll and treated as if there were nothing else."""
    log_pi = log_softmax(logits)
    found = []
    for column in range(values.shape[1]):
        for a, b in segments(batch["first"][:, column]):
            if a == b:
                continue
            rows = np.arange(a, b)
            actions = batch["action"][rows, column]
            ended = batch["terminated"][rows + 1, column].copy()
            if settings.time_limit == "terminate":
                ended |= batch["truncated"][rows + 1, column]
            rewards = np.array([transform(float(r), settings.reward_transform) for r in batch["reward"][rows + 1, column]])
            vs, advantages = vtrace(
                (log_pi[rows, column, actions] - batch["log_probs"][rows, column, actions])[:, None],
                np.where(ended, 0.0, settings.discount)[:, None],
                rewards[:, None],
                values[rows, column][:, None],
                values[[b], column],
                settings.clip_rho,
                settings.clip_c,
                settings.clip_pg_rho,
                settings.lambda_,
            )
            found.append({"rows": rows, "column": column, "actions": actions, "vs": vs[:, 0], "advantages": advantages[:, 0]})
    return found


def loss(logits: np.ndarray, values: np.ndarray, fixed: list[dict[str, Any]], settings: LossSettings) -> np.ndarray:
    """[3]: policy gradient, baseline and entropy losses, summed, for targets that do not move."""
    log_pi = log_softmax(logits)
    total = np.zeros(3)
    for part in fixed:
        rows, column = part["rows"], part["column"]
        total[0] -= (part["advantages"] * log_pi[rows, column, part["actions"]]).sum()
        total[1] += settings.baseline_cost * 0.5 * ((part["vs"] - values[rows, column]) ** 2).sum()
        total[2] += settings.entropy_cost * (np.exp(log_pi[rows, column]) * log_pi[rows, column]).sum()
    return total


def finite_differences(function: Callable[[np.ndarray], float], at: np.ndarray, step: float = 1e-5) -> np.ndarray:
    """Central differences of a scalar function, same shape as `at`."""
    gradient = np.zeros_like(at)
    for index in np.ndindex(at.shape):
        up, down = at.copy(), at.copy()
        up[index] += step
        down[index] -= step
        gradient[index] = (function(up) - function(down)) / (2 * step)
    return gradient


def small_spec(
    legal_actions: dict[str, int] | None = None,
    frame_shape: tuple[int, int, int] = (2, 1, 1),
    frame_dtype: str = "float32",
    instruction_length: int = 0,
    num_actions: int | None = None,
    **settings: Any,
) -> NetworkSpec:
    """A network of a few numbers."""
    legal = legal_actions or {"a": 2, "b": 3}
    sizes: dict[str, Any] = {
        "torso": "mlp",
        "hidden_size": 6,
        "core_size": 5,
        "instruction_embedding": 3,
        "instruction_size": 4,
    }
    width = num_actions or max([*legal.values(), 1])
    return NetworkSpec(NetworkSettings(**{**sizes, **settings}), frame_shape, frame_dtype, instruction_length, width, legal)


def make_network(spec: NetworkSpec, seed: int = 0) -> Network:
    """With parameters from a seed; torch's own generator is left alone."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Network(spec)


def random_batch(
    rng: np.random.Generator, network: NetworkSpec, length: int, columns: int, end: float = 0.3, garbage: bool = True
) -> Arrays:
    """Unrolls [T+1, B, ...] that keep the row contract; rows end an episode with probability `end`.

    garbage: what the contract calls meaningless (the last row's action, the reward of first rows) is filled at random.
    """
    spec = unroll_spec(network, length)
    batch = spec.empty(columns)
    counts = np.array(list(network.legal_actions.values()))
    batch["task"][:] = rng.integers(len(counts), size=columns)
    legal = counts[batch["task"]]
    shape = (length + 1, columns)
    if network.frame_dtype == "uint8":
        batch["frame"][:] = rng.integers(256, size=batch["frame"].shape)
    else:
        batch["frame"][:] = rng.normal(size=batch["frame"].shape)
    if network.instruction_length:
        lengths = rng.integers(network.instruction_length + 1, size=(*shape, 1))
        words = rng.integers(1, 1001, size=(*shape, network.instruction_length))
        batch["instruction"][:] = np.where(np.arange(network.instruction_length) < lengths, words, 0)
    ended = rng.random(shape) < end
    truncated = ended & (rng.random(shape) < 0.5)
    for t in range(1, length + 1):
        batch["first"][t] = batch["truncated"][t - 1] | batch["terminated"][t - 1]
        over = ended[t] & ~batch["first"][t]
        batch["truncated"][t], batch["terminated"][t] = over & truncated[t], over & ~truncated[t]
    batch["first"][0] = rng.random(columns) < 0.5
    batch["action"][:] = rng.integers(legal, size=shape)
    batch["reward"][:] = rng.normal(size=shape) * 2
    if not garbage:
        batch["reward"][batch["first"]] = 0
    batch["last_action"][1:] = batch["action"][:-1]
    batch["last_action"][batch["first"]] = -1
    logits = np.where(np.arange(network.num_actions) < legal[:, None], rng.normal(size=(*shape, network.num_actions)), -1e9)
    batch["log_probs"][:] = log_softmax(logits)
    batch["frames"][:] = np.where(batch["first"], 0, 4)
    batch["core_state"][:] = rng.normal(size=batch["core_state"].shape)
    batch["episode_return"][:] = np.nan
    return batch


def tensors(batch: Arrays) -> Batch:
    """The same memory as tensors."""
    return {name: torch.from_numpy(array) for name, array in batch.items()}
