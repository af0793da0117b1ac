"""Do tasks pull the shared parameters in different directions? Norms of each task's gradient and cosines between them."""

import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from agent.advantages import AdvantageScale
from agent.distributed import Ranks
from agent.losses import LossSettings, compute_losses
from agent.network import Network
from agent.popart import PopArt
from agent.unroll import Batch, take_columns

# Tasks of one measurement: each adds a gradient of all shared parameters to memory.
MAX_TASKS = 8
# Means are plain over the first so many measurements of a task or pair, and from then on exponential with this span.
SPAN = 100


class Gradients(NamedTuple):
    """Of k tasks: tasks [k] ints, norms float64 [k], cosines float64 [k, k]; a zero gradient has NaN for its cosines."""

    tasks: list[int]
    norms: np.ndarray
    cosines: np.ndarray


def task_gradients(
    network: Network,
    batch: Batch,
    tasks: Sequence[int],
    chosen: Sequence[int],
    loss: LossSettings,
    popart: PopArt | None = None,
    ranks: Ranks | None = None,
    advantages: AdvantageScale | None = None,
) -> Gradients:
    """Gradients of the learner's summed loss, unclipped, task by task. Parameters, `.grad` and generators stay as they are.

    Columns do not see each other, so a task's part of the gradient is that of its columns alone. All k passes over parts of
    the batch cost one or two updates; k backward passes over the whole batch cost about two thirds of one each.

    Args:
        batch: as of Learner.update.
        tasks: task of each column, B ints.
        chosen: k different tasks that are in the batch, or in that of another rank.
        ranks: over which a task's gradients are summed.
    """
    parameters = network.shared_parameters()
    rows = []
    for task in chosen:
        own = [column for column, other in enumerate(tasks) if other == task]
        if not own:
            rows.append([torch.zeros_like(parameter).flatten() for parameter in parameters])
            continue
        part = take_columns(batch, torch.tensor(own, device=batch["first"].device))
        columns = [task] * len(own)
        output = network(part, part["core_state"], columns)
        scale = popart.scale(columns) if popart else None
        deviation = advantages.deviations(columns) if advantages else None
        total = compute_losses(output, part, loss, scale, deviation).total()
        found = torch.autograd.grad(total, parameters, allow_unused=True, materialize_grads=True)
        rows.append([gradient.flatten() for gradient in found])
    if ranks is not None:
        for row in rows:
            ranks.sum(*row)
    products = torch.zeros(len(rows), len(rows), dtype=torch.float64, device=batch["first"].device)
    for same in zip(*rows, strict=True):  # parameter by parameter: sums over millions need more digits than float32 has
        stacked = torch.stack(same).double()
        products += stacked @ stacked.T
    products = (products + products.T) / 2  # a product of matrices is symmetric but for its last bit
    norms = products.diagonal().sqrt()
    cosines = (products / (norms * norms[:, None])).clamp(-1, 1)  # 0 / 0 is NaN
    return Gradients(list(chosen), norms.cpu().numpy(), cosines.cpu().numpy())


class Conflict:
    """When to measure, and means over the measurements.

    A measurement waits until it fits into `cost_percent` of the time that the learner has worked.

    Args:
        task_names: N names.
        every: updates between two measurements at least; 0 = never.
        cost_percent: bound of the time for measurements, as a share of the learner's time at work.
        seed: for the choice of tasks where there are more than MAX_TASKS; no other generator is touched.
    """

    def __init__(self, task_names: Sequence[str], every: int, cost_percent: float, seed: int) -> None:
        self._names, self._every, self._bound, self._seed = tuple(task_names), every, cost_percent / 100, seed
        count = len(self._names)
        self._norms, self._norm_counts = np.zeros(count), np.zeros(count, np.int64)
        self._cosines, self._counts = np.zeros((count, count)), np.zeros((count, count), np.int64)
        self._measurements, self._last_update = 0, 0
        self._seconds, self._work_seconds, self._steps = 0.0, 0.0, 0

    def due(self, updates: int) -> bool:
        """Whether to measure before the next update, after `updates` of them."""
        if not self._every or updates - self._last_update < self._every or not self._steps:
            return False
        # The first has no forerunner to tell its price: about that of two updates.
        price = self._seconds / self._measurements if self._measurements else 2 * self._work_seconds / self._steps
        return self._seconds + price <= self._bound * (self._work_seconds + price)

    def measure(
        self,
        network: Network,
        batch: Batch,
        tasks: Sequence[int],
        loss: LossSettings,
        updates: int,
        popart: PopArt | None = None,
        ranks: Ranks | None = None,
        present: Sequence[int] = (),
        advantages: AdvantageScale | None = None,
    ) -> None:
        """Measure on a batch, of at most MAX_TASKS of its tasks; `updates` as in `due`, `present` the tasks in the batches of
        all `ranks`."""
        began = time.monotonic()
        chosen = sorted({*tasks, *present})
        if len(chosen) > MAX_TASKS:
            rng = np.random.default_rng([self._seed, updates])
            chosen = sorted(rng.choice(chosen, MAX_TASKS, replace=False).tolist())
        found = task_gradients(network, batch, tasks, chosen, loss, popart, ranks, advantages)
        self.add(found, updates, time.monotonic() - began)

    def worked(self, seconds: float) -> None:
        """An update took so long, with its measurement if there was one."""
        self._work_seconds += seconds
        self._steps += 1

    def add(self, found: Gradients, updates: int, seconds: float) -> None:
        """One measurement, which took `seconds`, into the means; what is not finite is left out."""
        self._measurements += 1
        self._last_update = updates
        self._seconds += seconds
        pairs = np.ix_(found.tasks, found.tasks)
        for means, counts, where, values in (
            (self._norms, self._norm_counts, found.tasks, found.norms),
            (self._cosines, self._counts, pairs, found.cosines),
        ):
            finite = np.isfinite(values)
            counts[where] += finite
            step = np.where(finite, values, means[where]) - means[where]
            means[where] += step / np.clip(counts[where], 1, SPAN)

    def record(self) -> dict[str, Any]:
        """For metrics.jsonl: `tasks` measured so far, `matrix` of mean cosines (None where a pair was never measured),
        `share_negative` of the pairs (None without a pair), `measurements`, `cost_percent`; empty before the first."""
        if not self._measurements:
            return {}
        seen = np.flatnonzero(self._norm_counts)
        upper = np.triu(self._counts > 0, 1)
        matrix = [[float(self._cosines[i, j]) if self._counts[i, j] else None for j in seen] for i in seen]
        return {
            "tasks": [self._names[i] for i in seen],
            "matrix": matrix,
            "share_negative": float((self._cosines[upper] < 0).mean()) if upper.any() else None,
            "measurements": self._measurements,
            "cost_percent": 100 * self._seconds / max(self._work_seconds, self._seconds, 1e-9),
        }

    def norm(self, task: int) -> float | None:
        """Mean norm of a task's gradient; None if it was never measured."""
        return float(self._norms[task]) if self._norm_counts[task] else None

    def state(self) -> dict[str, Any]:
        """Plain types, for a checkpoint."""
        return {
            "tasks": list(self._names),
            "norms": self._norms.tolist(),
            "norm_counts": self._norm_counts.tolist(),
            "cosines": self._cosines.tolist(),
            "counts": self._counts.tolist(),
            "measurements": self._measurements,
            "last_update": self._last_update,
            "seconds": self._seconds,
            "work_seconds": self._work_seconds,
            "steps": self._steps,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Inverse of `state`, by name: tasks may have been reordered or cut."""
        here = [i for i, name in enumerate(self._names) if name in state["tasks"]]
        there = [state["tasks"].index(self._names[i]) for i in here]
        self._norms[here] = np.array(state["norms"])[there]
        self._norm_counts[here] = np.array(state["norm_counts"])[there]
        self._cosines[np.ix_(here, here)] = np.array(state["cosines"])[np.ix_(there, there)]
        self._counts[np.ix_(here, here)] = np.array(state["counts"])[np.ix_(there, there)]
        self._measurements, self._last_update = state["measurements"], state["last_update"]
        self._seconds, self._work_seconds, self._steps = state["seconds"], state["work_seconds"], state["steps"]
