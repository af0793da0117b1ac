"""Look at every number of an unroll from the network before the learner sees it: a bad one could end the run."""

from collections.abc import Sequence

import numpy as np

from agent.unroll import NO_ACTION, Arrays, UnrollSpec

_NOT_NEGATIVE = ("environment", "version")
_FINITE = ("frame", "log_probs")
# Far beyond what is true of any game, and far below where sums, squares or means of them overflow: a record with an infinite
# number ends the learner, and one unroll of 2**31 frames in each row ends nearly every run.
_RANGES: tuple[tuple[str, float, float], ...] = (
    ("frames", 0, 2**20),
    ("episode_frames", 0, 2**53),
    ("episode_steps", 0, 2**53),
    ("acted_at", 0, 2**40),
    ("reward", -1e15, 1e15),
    ("core_state", -1e15, 1e15),
)
_LARGEST_RETURN = 1e30
# Probabilities are at most 1, but for rounding.
_LARGEST_LOG_PROB = 1e-3


def fault_of(unroll: Arrays, spec: UnrollSpec, legal_actions: Sequence[int], num_words: int, actor: int) -> str | None:
    """What is wrong with an unroll, if anything is.

    Args:
        unroll: views over the bytes received.
        spec: sizes.
        legal_actions: number of actions of each task [N].
        num_words: largest word id of an instruction.
        actor: number that it must carry.
    """
    task = int(unroll["task"])
    if not 0 <= task < len(legal_actions):
        return f"task {task} of {len(legal_actions)}"
    if int(unroll["actor"]) != actor:
        return f"actor {int(unroll['actor'])} instead of {actor}"
    for name, low, high in (
        ("action", 0, legal_actions[task] - 1),
        ("last_action", NO_ACTION, legal_actions[task] - 1),
        ("instruction", 0, num_words),
    ):
        if name in unroll and not _within(unroll[name], low, high):
            return f"{name} out of {low} to {high}"
    for name in _NOT_NEGATIVE:
        if not _within(unroll[name], 0, None):
            return f"{name} is negative"
    for name in _FINITE:
        if unroll[name].dtype.kind == "f" and not np.isfinite(unroll[name]).all():
            return f"{name} is not finite"
    for name, least, most in _RANGES:
        if not _within(unroll[name], least, most):
            return f"{name} out of {least:g} to {most:g}"
    if unroll["log_probs"].max() > _LARGEST_LOG_PROB:
        return "log_probs are above 0"
    if (np.abs(unroll["episode_return"]) > _LARGEST_RETURN).any():
        return f"episode_return beyond {_LARGEST_RETURN:g}"
    for name, field in spec.fields().items():
        if field.dtype == "bool" and not _within(unroll[name].view(np.uint8), 0, 1):
            return f"{name} is neither true nor false"
    return None


def _within(values: np.ndarray, low: float, high: float | None) -> bool:
    return bool(values.size == 0 or (values.min() >= low and (high is None or values.max() <= high)))
