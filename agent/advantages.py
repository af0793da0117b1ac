"""How large a task's advantages are: a running deviation, by which they are divided before they weigh the policy gradient."""

from collections.abc import Mapping, Sequence

import torch

from agent.unroll import Batch, transition_mask

# By which a task's mean square goes towards an update's; the k-th update's step is 1 / k while that is longer. Over hundreds of
# updates: in the few samples of one, the spread of noise would be blown up to that of a reward.
STEP = 0.005


def advantage_sums(advantages: torch.Tensor, batch: Batch, num_tasks: int) -> torch.Tensor:
    """Count and sum of squares of the advantages [T, B] of each task's transitions: float64 [N, 2], and they add up."""
    weight = transition_mask(batch["first"]).double()
    columns = torch.stack([weight.sum(0), (weight * advantages.double().square()).sum(0)], 1)
    return torch.zeros(num_tasks, 2, dtype=torch.float64, device=weight.device).index_add_(0, batch["task"].long(), columns)


class AdvantageScale:
    """Mean squares of all tasks.

    Args:
        task_names: N names.
        device: of the network.
    """

    def __init__(self, task_names: Sequence[str], device: torch.device) -> None:
        self._names, self._device = tuple(task_names), device
        self.counts = [0] * len(self._names)
        self.mean_squares = [1.0] * len(self._names)

    def deviations(self, tasks: Sequence[int]) -> torch.Tensor:
        """float32 [B] for a batch of these tasks, B ints."""
        values = torch.tensor([self.mean_squares[task] ** 0.5 + 1e-8 for task in tasks])
        return values.to(self._device, non_blocking=True)

    def update(self, sums: torch.Tensor) -> None:
        """One step with `advantage_sums`; a task without a transition stays as it is."""
        for task, (count, squares) in enumerate(sums.tolist()):
            if count:
                self.counts[task] += 1
                step = max(STEP, 1 / self.counts[task])
                self.mean_squares[task] += step * (squares / count - self.mean_squares[task])

    def state(self) -> dict[str, list[float]]:
        """Plain types, for a checkpoint."""
        return {name: [self.counts[i], self.mean_squares[i]] for i, name in enumerate(self._names)}

    def restore(self, state: Mapping[str, Sequence[float]]) -> None:
        """Inverse of `state`, by name: tasks may have been reordered or cut."""
        for i, name in enumerate(self._names):
            if name in state:
                count, self.mean_squares[i] = state[name]
                self.counts[i] = int(count)
