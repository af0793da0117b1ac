"""PopArt: each task's value error in its own unit, while what the network says about values stays as it was.

Multi-task Deep Reinforcement Learning with PopArt (arXiv:1809.04474). A value head's output n stands for the value
sigma * n + mu, with statistics mu and sigma of its task's V-trace targets. When they move, the head's last layer is moved
against them, so that values are unchanged (Pop), and errors are counted in units of sigma (Art).
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from agent.unroll import Batch, transition_mask

HIGHEST_DEVIATION = 1e6


class ValueScale(NamedTuple):
    """mean and deviation float32 [B]: the value of column b is deviation[b] * n + mean[b]."""

    mean: torch.Tensor
    deviation: torch.Tensor


def target_sums(targets: torch.Tensor, batch: Batch, num_tasks: int) -> torch.Tensor:
    """Count, sum and sum of squares of the targets [T, B] of each task's transitions: float64 [N, 3], and they add up."""
    weight = transition_mask(batch["first"]).double()
    values = weight * targets.double()
    columns = torch.stack([weight.sum(0), values.sum(0), (values * targets.double()).sum(0)], 1)
    return torch.zeros(num_tasks, 3, dtype=torch.float64, device=targets.device).index_add_(0, batch["task"].long(), columns)


@torch.no_grad()
def rescale(head: nn.Linear, old: tuple[float, float], new: tuple[float, float]) -> None:
    """Make `head` say the same values after its (mean, deviation) went from `old` to `new`."""
    (old_mean, old_deviation), (new_mean, new_deviation) = old, new
    weight, bias = head.weight.double(), head.bias.double()
    head.weight.copy_(weight * (old_deviation / new_deviation))
    head.bias.copy_((old_deviation * bias + old_mean - new_mean) / new_deviation)


class PopArt:
    """Statistics of all tasks.

    Args:
        task_names: N names.
        step: beta, by which the statistics of a task go towards its batch's means; one step per update, however many targets.
            The k-th step of a task is 1 / k while that is longer: a start value of sigma = 1 would make the advantages of a
            task with large rewards drown all others for 1 / beta updates.
        lowest_deviation: sigma is never less.
        device: of the network.
    """

    def __init__(self, task_names: Sequence[str], step: float, lowest_deviation: float, device: torch.device) -> None:
        self._names, self._step, self._lowest, self._device = tuple(task_names), step, lowest_deviation, device
        self.counts = [0] * len(self._names)
        self.means = [0.0] * len(self._names)
        self.mean_squares = [1.0] * len(self._names)

    def deviation(self, task: int) -> float:
        """sigma of a task."""
        variance = max(0.0, self.mean_squares[task] - self.means[task] ** 2)
        return min(max(variance**0.5, self._lowest), HIGHEST_DEVIATION)

    def scale(self, tasks: Sequence[int]) -> ValueScale:
        """For a batch of these tasks, B ints."""
        both = torch.tensor([[self.means[task] for task in tasks], [self.deviation(task) for task in tasks]])
        return ValueScale(*both.to(self._device, non_blocking=True))

    def update(self, sums: torch.Tensor, heads: Sequence[nn.Linear]) -> None:
        """One step with `sums` of `target_sums`; `heads` are the N value heads. A task without a target stays untouched."""
        for task, (count, total, squares) in enumerate(sums.tolist()):
            if count == 0:
                continue
            old = self.means[task], self.deviation(task)
            self.counts[task] += 1
            step = max(self._step, 1 / self.counts[task])
            self.means[task] += step * (total / count - self.means[task])
            self.mean_squares[task] += step * (squares / count - self.mean_squares[task])
            rescale(heads[task], old, (self.means[task], self.deviation(task)))

    def state(self) -> dict[str, Any]:
        """Plain types, for a checkpoint."""
        rows = zip(self.counts, self.means, self.mean_squares, strict=True)
        return {name: list(row) for name, row in zip(self._names, rows, strict=True)}

    def restore(self, state: Mapping[str, Sequence[float]]) -> None:
        """Inverse of `state`, by name: tasks may have been reordered or cut.

        Raises:
            ValueError: a task without statistics; names it.
        """
        for task, name in enumerate(self._names):
            if name not in state:
                raise ValueError(f"the checkpoint has no value statistics of task {name}")
            count, self.means[task], self.mean_squares[task] = state[name]
            self.counts[task] = int(count)
