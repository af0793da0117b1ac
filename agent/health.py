"""Does it learn at all? Live units, what the gradient is made of, and how long steps are, measured now and then on a batch."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from agent.learner import Learner
from agent.network import Network
from agent.unroll import Batch, take_columns

# A measurement looks at so many of a batch's unrolls at most.
MAX_UNROLLS = 8
# A run's first measurement counts as its start if it is so early: a run that is continued has no start to compare with.
EARLY_UPDATES = 2000
# A layer that has fewer of the units that it had at the start is dying.
LIVE_SHARE = 0.7


@torch.no_grad()
def live_units(network: Network, batch: Batch, tasks: Sequence[int]) -> dict[str, tuple[int, int]]:
    """Layer of the torso -> units (channels of a convolution) above 0 on some row of the batch, and how many it has."""
    found: dict[str, tuple[int, int]] = {}

    def look(name: str) -> Any:
        def hook(module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
            alive = (output > 0).flatten(2).any(2).any(0) if output.dim() == 4 else (output > 0).any(0)
            found[name] = int(alive.sum()), alive.numel()

        return hook

    torso = network.torso
    relus = [layer for layer in torso.layers if isinstance(layer, nn.ReLU)]
    hooks = [layer.register_forward_hook(look(f"convolution_{i}")) for i, layer in enumerate(relus, 1)]
    hooks.append(torso.output.register_forward_hook(look("hidden")))
    try:
        torso.forward(network.seen(batch["frame"], tasks).flatten(0, 1))  # as a function: a compiled torso runs no hooks
    finally:
        for handle in hooks:
            handle.remove()
    return found


def gradient_parts(learner: Learner, batch: Batch, tasks: list[int]) -> dict[str, float]:
    """Norms of the summed gradient on the shared parameters: of the policy's losses (`policy`) and of the value's (`value`)."""
    losses = learner.losses(batch, tasks)
    parts = {"policy": losses.policy_gradient.sum() + losses.entropy.sum(), "value": losses.baseline.sum()}
    norms = {}
    for name, part in parts.items():
        gradients = torch.autograd.grad(
            part, learner.network.shared_parameters(), retain_graph=name == "policy", allow_unused=True
        )
        norms[name] = torch.nn.utils.get_total_norm([g for g in gradients if g is not None]).item()
    return norms


class Health:
    """What a record says about the network, and whether units die.

    Args:
        learner: whose network it is.
    """

    def __init__(self, learner: Learner) -> None:
        self._learner, self._network = learner, learner.network
        self._at_start: dict[str, tuple[int, int]] | None = None
        self._weights: dict[str, torch.Tensor] = {}

    def before(self, batch: Batch, tasks: Sequence[int]) -> dict[str, Any]:
        """Measure on a batch before it is learned from.

        Returns:
            `live_units`, `units`: layer -> number; `policy_gradient_norm`, `value_gradient_norm`, `value_gradient_share` (of
            both norms); and `warning`, a sentence, where units die.
        """
        self._weights = {name: p.detach().clone() for name, p in self._network.named_parameters() if _is_weight(name, p)}
        count = min(MAX_UNROLLS, len(tasks))
        part = take_columns(batch, torch.arange(count, device=batch["first"].device))
        some = list(tasks[:count])
        found = live_units(self._network, part, some)
        normaliser = self._network.normaliser  # before it has statistics other units live
        is_ready = normaliser is None or any(float(normaliser.of(task).count) for task in tasks)
        if self._at_start is None and is_ready and self._learner.counters.updates < EARLY_UPDATES:
            self._at_start = found
        norms = gradient_parts(self._learner, part, some)
        norms = {name: norm for name, norm in norms.items() if math.isfinite(norm)}
        total = sum(norms.values())
        warning = dying(self._at_start or {}, found)
        return {
            "live_units": {name: alive for name, (alive, _) in found.items()},
            "units": {name: count for name, (_, count) in found.items()},
            **{f"{name}_gradient_norm": norm for name, norm in norms.items()},
            **({"value_gradient_share": norms["value"] / total} if total and len(norms) == 2 else {}),
            **({"warning": warning} if warning else {}),
        }

    def after(self) -> dict[str, float]:
        """Layer -> length of the step since `before`, over the length of its weights."""
        now = dict(self._network.named_parameters())
        steps = {
            name.removesuffix(".weight"): ((now[name] - before).norm() / before.norm().clamp(min=1e-12)).item()
            for name, before in self._weights.items()
        }
        self._weights = {}
        return steps


def dying(before: Mapping[str, tuple[int, int]], now: Mapping[str, tuple[int, int]]) -> str:
    """A sentence where a layer has clearly fewer live units than before, else nothing."""
    for name, (alive, count) in now.items():
        start = before.get(name, (0, 0))[0]
        if alive < LIVE_SHARE * start:
            return (
                f"units die: {start} of {count} of layer {name} were alive at the start, now {alive}; try --preset fast, or "
                "network.input_normalisation=pixel, network.initialisation=orthogonal and a lower optimiser.learning_rate"
            )
    return ""


def _is_weight(name: str, parameter: nn.Parameter) -> bool:
    return parameter.dim() > 1 and "heads" not in name
