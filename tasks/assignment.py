"""Which actor plays which tasks: a pure function of task names, actor count and weights."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from itertools import pairwise


def assign(
    task_names: Sequence[str], num_actors: int, envs_per_actor: int, weights: Mapping[str, float] | None = None
) -> tuple[tuple[int, ...], ...]:
    """Task indices of each actor: `result[actor]` is a tuple of indices into `task_names`.

    With at least as many actors as tasks every actor plays one task: equal numbers (they differ by at most one), or
    numbers in proportion to `weights` (task -> weight, 1 where absent) by largest remainder, at least one for each.
    With fewer actors an actor holds several neighbouring tasks, at most `envs_per_actor`, and weights are refused.
    ValueError names what is wrong and, where actors are lacking, the number needed.
    """
    num_tasks = len(task_names)
    if num_tasks == 0:
        raise ValueError("tasks: there is none to assign, name at least one")
    if num_actors < 1 or envs_per_actor < 1:
        raise ValueError(f"actors: {num_actors} actors of {envs_per_actor} environments play nothing, use at least 1")
    values = _check_weights(task_names, weights or {})
    if num_actors < num_tasks:
        if weights:
            raise ValueError(
                f"weights: {num_tasks} tasks with weights need at least {num_tasks} actors, there are {num_actors}: "
                f"raise the number of actors to {num_tasks} or leave out the weights"
            )
        return _share_actors(num_tasks, num_actors, envs_per_actor)
    return _deal(_counts(values, num_actors))


def _check_weights(task_names: Sequence[str], weights: Mapping[str, float]) -> list[float]:
    """One finite weight >= 0 per task, in task order; not all 0."""
    for name, weight in weights.items():
        if name not in task_names:
            near = ", ".join(get_close_matches(name, task_names)) or ", ".join(task_names)
            raise ValueError(f"weights: {name!r} is no task of the suite, did you mean one of: {near}?")
        if not (math.isfinite(weight) and weight >= 0):
            raise ValueError(f"weights: {name} has {weight}, use a finite number of at least 0")
    values = [float(weights.get(name, 1.0)) for name in task_names]
    if sum(values) <= 0:
        raise ValueError("weights: all tasks have weight 0, give at least one a weight above 0")
    # Only ratios matter: scaled, so that neither huge nor tiny weights leave the range of floats.
    return [value / max(values) for value in values]


def _share_actors(num_tasks: int, num_actors: int, envs_per_actor: int) -> tuple[tuple[int, ...], ...]:
    """Neighbouring tasks per actor, as equal in number as possible."""
    if math.ceil(num_tasks / num_actors) > envs_per_actor:
        needed = math.ceil(num_tasks / envs_per_actor)
        raise ValueError(
            f"actors: {num_actors} actors with {envs_per_actor} environments each cannot hold {num_tasks} tasks, "
            f"use at least {needed} actors or more environments per actor"
        )
    bounds = [num_tasks * i // num_actors for i in range(num_actors + 1)]
    return tuple(tuple(range(low, high)) for low, high in pairwise(bounds))


def _counts(weights: Sequence[float], num_actors: int) -> list[int]:
    """Actors per task: largest remainder, where a share below one actor becomes one and the others divide the rest."""
    counts = [1] * len(weights)
    free = list(range(len(weights)))
    while True:
        left = num_actors - (len(weights) - len(free))
        total = sum(weights[i] for i in free)
        quotas = {i: left * weights[i] / total for i in free}  # the largest weight stays in: total > 0
        small = [i for i in quotas if quotas[i] < 1 - 1e-9]
        if not small:
            break
        free = [i for i in free if i not in small]
    for i in quotas:
        counts[i] = math.floor(quotas[i] + 1e-8)
    by_remainder = sorted(quotas, key=lambda i: (counts[i] - quotas[i], i))
    for i in by_remainder[: num_actors - sum(counts)]:
        counts[i] += 1
    return counts


def _deal(counts: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Tasks dealt to actors in turn, so that any first few actors already cover different tasks."""
    rounds = range(max(counts))
    return tuple((task,) for turn in rounds for task, count in enumerate(counts) if count > turn)
