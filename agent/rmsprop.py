"""RMSProp with epsilon inside or outside the root: IMPALA's results need it inside, PyTorch has it outside."""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch


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
