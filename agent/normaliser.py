"""What the torso sees of a frame: each pixel about its mean in this task, in units of how much it moves.

A game's background is most of a frame's energy and says nothing: the first gradients push all features the same way, and half
of the units die. Every game has another background, so it is measured, task by task, and travels with the parameters.
"""

from collections.abc import Sequence
from typing import cast

import torch
from torch import nn

# A task's statistics are plain means over its first updates, and from then on exponential with this step.
LOWEST_STEP = 1e-4
# A pixel that hardly ever moves would be all noise in units of its own deviation; beyond this many units it is cut.
LIMIT = 10.0


class PixelStatistics(nn.Module):
    """Mean and mean square of each pixel of one task, float32 [H, W, C], and the number of updates.

    Before the first one they leave frames as they are, over `unit`.
    """

    mean: torch.Tensor
    mean_square: torch.Tensor
    count: torch.Tensor

    def __init__(self, shape: tuple[int, int, int], unit: float) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(shape))
        self.register_buffer("mean_square", torch.full(shape, unit**2))
        self.register_buffer("count", torch.zeros(()))

    def inverse_deviation(self) -> torch.Tensor:
        """[H, W, C]: 1 / sqrt(variance + mean variance of all pixels): what moves less than others is not blown up to match."""
        variance = (self.mean_square - self.mean.square()).clamp(min=0)
        floor = torch.where(self.count > 0, variance.mean(), 0.0)
        return (variance + floor + 1e-12).rsqrt()

    def update(self, mean: torch.Tensor, mean_square: torch.Tensor) -> None:
        """One step towards those of new frames."""
        self.count += 1
        step = (1 / self.count).clamp(min=LOWEST_STEP)
        self.mean.lerp_(mean, step)
        self.mean_square.lerp_(mean_square, step)


class Normaliser(nn.Module):
    """Statistics of all tasks, by name.

    Args:
        keys: a name for each task, as its heads have.
        shape: H, W, C.
        frame_dtype: uint8 frames are over 255 before there are statistics.
    """

    def __init__(self, keys: Sequence[str], shape: tuple[int, int, int], frame_dtype: str) -> None:
        super().__init__()
        unit = 255.0 if frame_dtype == "uint8" else 1.0
        self.tasks = nn.ModuleDict({key: PixelStatistics(shape, unit) for key in keys})
        self._keys = tuple(keys)

    def of(self, task: int) -> PixelStatistics:
        """Of one task, by its index."""
        return cast(PixelStatistics, self.tasks[self._keys[task]])

    @torch.no_grad()
    def forward(self, frames: torch.Tensor, tasks: Sequence[int]) -> torch.Tensor:
        """frames [T, B, H, W, C], column b of task b -> float32 of the same shape."""
        chosen = sorted(set(tasks))
        means = torch.stack([self.of(task).mean for task in chosen])
        scales = torch.stack([self.of(task).inverse_deviation() for task in chosen])
        if len(chosen) > 1:
            index = torch.tensor([chosen.index(task) for task in tasks]).to(means.device, non_blocking=True)
            means, scales = means.index_select(0, index), scales.index_select(0, index)
        # A copy even of float32; mixed types in one call would take four times as long.
        seen = frames.to(torch.float32, copy=True)
        return seen.sub_(means).mul_(scales).clamp_(-LIMIT, LIMIT)

    @torch.no_grad()
    def sums(self, frames: torch.Tensor, task: torch.Tensor) -> torch.Tensor:
        """frames [B, H, W, C], task int [B] -> float32 [N, 2, H, W, C] and, flattened behind it, counts [N]; they add up."""
        frames, task = frames.float(), task.long()
        both = torch.stack([frames, frames.square()], 1)
        totals = both.new_zeros(len(self._keys), *both.shape[1:]).index_add_(0, task, both)
        counts = totals.new_zeros(len(self._keys)).index_add_(0, task, torch.ones_like(task, dtype=totals.dtype))
        return torch.cat([totals.flatten(), counts])

    @torch.no_grad()
    def update(self, sums: torch.Tensor) -> None:
        """One step with `sums` of `sums`, perhaps added up over ranks; a task without a frame stays as it is."""
        num_tasks = len(self._keys)
        totals, counts = sums[:-num_tasks], sums[-num_tasks:].tolist()
        for task, (both, count) in enumerate(zip(totals.view(num_tasks, 2, *self.of(0).mean.shape), counts, strict=True)):
            if count:
                self.of(task).update(*(both / count))
