"""Look at every number of an unroll from the network before the learner sees it: a bad one could end the run."""

from collections.abc import Sequence

import numpy as np

from agent.unroll import NO_ACTION, Arrays, UnrollSpec

_NOT_NEGATIVE = ("frames", "episode_frames", "episode_steps", "environment", "version")
_FINITE = ("frame", "reward", "log_probs", "core_state", "acted_at")


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
    if np.isinf(unroll["episode_return"]).any():
        return "episode_return is infinite"
    for name, field in spec.fields().items():
        if field.dtype == "bool" and not _within(unroll[name].view(np.uint8), 0, 1):
            return f"{name} is neither true nor false"
    return None


def _within(values: np.ndarray, low: int, high: int | None) -> bool:
    return bool(values.size == 0 or (values.min() >= low and (high is None or values.max() <= high)))
