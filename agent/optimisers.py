"""Optimisers by name: RMSProp with epsilon inside the root (IMPALA) or outside (PyTorch), and Adam."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch


@dataclass(frozen=True)
class OptimiserSettings:
    """Optimiser and schedule. Default: IMPALA on Atari (arXiv:1802.01561, table G.1).

    Attributes:
        name: rmsprop, or adam (torch's).
        learning_rate: falls linearly with frames, to 0 at total_frames (`schedule: linear`), stays (`constant`), or is divided
            by sqrt(1 + steps / hot_steps), steps per task of now (`inverse_sqrt`): hot at first, and no end has to be known.
        warmup_updates: the rate rises linearly from 0 over so many first updates; 0 = at once.
        momentum: of Adam, its first beta; RMSProp has none.
        decay: of the mean square of gradients; Adam's second beta.
        epsilon: RMSProp: added under the root (`epsilon_placement: inside`, as published) or to the root (`outside`, as
            PyTorch). Adam: added to the root. Gradients are sums over a batch, so 1e-5 of code that takes means is 1e-5 times
            the steps of an update here.
        initial_square: at which RMSProp's mean squares start. 1, as TensorFlow, warms up over some hundred updates; with 0,
            as PyTorch, the first steps are up to 1 / sqrt(1 - decay) times as long as later ones.
        max_gradient_norm: the gradient is scaled down to this norm; 0 = never (IMPALA on DMLab).
        max_skipped_updates: the run ends after so many non-finite updates in a row.
    """

    name: Literal["rmsprop", "adam"] = "rmsprop"
    learning_rate: float = field(default=6e-4, metadata={"min": 0})
    schedule: Literal["linear", "constant", "inverse_sqrt"] = "linear"
    hot_steps: int = field(default=100_000, metadata={"min": 1})
    warmup_updates: int = field(default=0, metadata={"min": 0})
    momentum: float = field(default=0.9, metadata={"min": 0, "max": 0.9999})
    decay: float = field(default=0.99, metadata={"min": 0, "max": 1})
    epsilon: float = field(default=0.01, metadata={"min": 0})
    epsilon_placement: Literal["inside", "outside"] = "inside"
    initial_square: float = field(default=1.0, metadata={"min": 0})
    max_gradient_norm: float = field(default=40.0, metadata={"min": 0})
    max_skipped_updates: int = field(default=20, metadata={"min": 1})


def make_optimiser(parameters: Iterable[torch.Tensor], settings: OptimiserSettings) -> Any:
    """An object with `param_groups`, `state`, `zero_grad` and `step`, as torch's optimisers have."""
    if settings.name == "rmsprop":
        inside = settings.epsilon_placement == "inside"
        return RMSProp(parameters, settings.learning_rate, settings.decay, settings.epsilon, inside, settings.initial_square)
    from torch.optim import Adam  # here, because it loads torch's compiler: more than a second

    betas = (settings.momentum, settings.decay)
    return Adam(parameters, settings.learning_rate, betas, settings.epsilon, fused=True)


class RMSProp:
    """square <- decay * square + (1 - decay) * g^2;  p <- p - lr * g / sqrt(square + epsilon)  (inside the root).

    A parameter without a gradient (the head of an absent task) is left as it is, its state included. What is used of
    torch.optim.Optimizer, `param_groups`, `state` and `zero_grad`, is as there; to inherit from it would load torch's compiler
    into every learner, more than a second of its start.

    Args:
        params: the parameters.
        lr: step size.
        decay: of the mean square.
        epsilon: added under the root, or to the root if `epsilon_inside` is False (as torch.optim.RMSprop).
        initial_square: where the mean square starts. 0 (as torch) makes the first steps 1 / sqrt(1 - decay) times as long as
            later ones; 1 (as TensorFlow, with which IMPALA's results were made) makes them short.
    """

    def __init__(
        self,
        params: Iterable[torch.Tensor],
        lr: float,
        decay: float,
        epsilon: float,
        epsilon_inside: bool = True,
        initial_square: float = 0.0,
    ) -> None:
        group = {"params": list(params), "lr": lr, "decay": decay, "epsilon": epsilon, "epsilon_inside": epsilon_inside}
        self.param_groups: list[dict[str, Any]] = [group]
        self.state: defaultdict[torch.Tensor, dict[str, Any]] = defaultdict(dict)
        self._initial_square = initial_square

    def zero_grad(self) -> None:
        """Forget the gradients."""
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    @torch.no_grad()
    def step(self) -> None:
        """One update from the gradients that are there."""
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            if not parameters:
                continue
            gradients = [p.grad for p in parameters]
            squares = [self._square(p) for p in parameters]
            torch._foreach_mul_(squares, group["decay"])
            torch._foreach_addcmul_(squares, gradients, gradients, value=1 - group["decay"])
            if group["epsilon_inside"]:
                roots = torch._foreach_add(squares, group["epsilon"])
                torch._foreach_sqrt_(roots)
            else:
                roots = torch._foreach_sqrt(squares)
                torch._foreach_add_(roots, group["epsilon"])
            torch._foreach_addcdiv_(parameters, gradients, roots, value=-group["lr"])

    def _square(self, parameter: torch.Tensor) -> torch.Tensor:
        state: dict[str, Any] = self.state[parameter]
        if "square" not in state:
            state["square"] = torch.full_like(parameter, self._initial_square)
        return state["square"]
