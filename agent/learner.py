"""One learner: a batch of unrolls in, one V-trace update out."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch

from agent.diagnostics import task_sums
from agent.distributed import Ranks
from agent.losses import LossSettings, compute_losses
from agent.network import Network
from agent.popart import PopArt, target_sums
from agent.rmsprop import RMSProp
from agent.unroll import Batch


@dataclass(frozen=True)
class LearnerSettings:
    """The learner's process.

    Attributes:
        batch_size: B, unrolls per update (IMPALA: 32).
        device: auto = the first GPU if there is one; or cpu, cuda, cuda:1, ...
        threads: compute threads of torch on the CPU.
        balance: actors = unrolls are taken in turn as they come, so tasks whose actors are faster feed more; frames = the task
            with the fewest frames first, and none may lead the last by more than two batches.
        wait_seconds: the run ends with an error when no batch comes for so long.
        precision: fp32, or bf16: the torso computes in bfloat16, all else and the parameters stay float32.
        tf32: on a GPU, float32 products may round their factors to 10 bits (TF32), which is several times as fast.
        compile: the torso goes through torch.compile, which takes a minute at the start.
        conflict_every: updates between two measurements of the tasks' gradients on the shared parameters, their norms and
            the cosines between them, at least; 0 = never.
        conflict_cost_percent: of the learner's time at work that these measurements may take; they wait until they fit.
        ranks: learner processes in step, each with its own share of the actors and its own B unrolls; their gradients are
            summed, so an update is that of one rank with ranks * B unrolls.
    """

    batch_size: int = field(default=32, metadata={"min": 1})
    device: str = "auto"
    threads: int = field(default=1, metadata={"min": 1})
    balance: Literal["actors", "frames"] = "actors"
    wait_seconds: float = field(default=900.0, metadata={"min": 1})
    precision: Literal["fp32", "bf16"] = "fp32"
    tf32: bool = True
    compile: bool = False
    conflict_every: int = field(default=50, metadata={"min": 0})
    conflict_cost_percent: float = field(default=2.0, metadata={"min": 0, "max": 100})
    ranks: int = field(default=1, metadata={"min": 1})


@dataclass(frozen=True)
class OptimiserSettings:
    """Optimiser and schedule. Default: IMPALA on Atari (arXiv:1802.01561, table G.1).

    Attributes:
        learning_rate: falls linearly with frames, to 0 at total_frames (`schedule: linear`), or stays (`constant`).
        decay: of the mean square of gradients.
        epsilon: added under the root (`epsilon_placement: inside`, as published) or to the root (`outside`, as PyTorch).
        initial_square: at which the mean squares start. 1, as TensorFlow, warms up over some hundred updates; with 0,
            as PyTorch, the first steps are up to 1 / sqrt(1 - decay) times as long as later ones.
        max_gradient_norm: the gradient is scaled down to this norm; 0 = never (IMPALA on DMLab).
        max_skipped_updates: the run ends after so many non-finite updates in a row.
    """

    learning_rate: float = field(default=6e-4, metadata={"min": 0})
    schedule: Literal["linear", "constant"] = "linear"
    decay: float = field(default=0.99, metadata={"min": 0, "max": 1})
    epsilon: float = field(default=0.01, metadata={"min": 0})
    epsilon_placement: Literal["inside", "outside"] = "inside"
    initial_square: float = field(default=1.0, metadata={"min": 0})
    max_gradient_norm: float = field(default=40.0, metadata={"min": 0})
    max_skipped_updates: int = field(default=20, metadata={"min": 1})


@dataclass
class Counters:
    """What a run has done so far; exact Python ints, kept in every checkpoint.

    frames: environment frames trained on (action repeat counted). steps: agent steps. updates: learner updates that changed
    the parameters, which is also the version of the parameters. seconds: wall time of training, all starts together.
    """

    frames: int = 0
    steps: int = 0
    updates: int = 0
    skipped_updates: int = 0
    skipped_in_a_row: int = 0
    episodes: int = 0
    seconds: float = 0.0


class NonFiniteError(RuntimeError):
    """Updates were non-finite again and again."""


class Learner:
    """Network, optimiser, value statistics and counters of one learner.

    Args:
        network: on its device.
        loss, optimiser: settings.
        total_frames: at which the linear schedule reaches 0.
        ranks: this learner's place among others in step.
    """

    def __init__(
        self,
        network: Network,
        loss: LossSettings,
        optimiser: OptimiserSettings,
        total_frames: int,
        ranks: Ranks | None = None,
    ) -> None:
        self.network = network
        self.ranks = ranks or Ranks()
        self.loss_settings = loss
        self.settings = optimiser
        self.total_frames = total_frames
        self.counters = Counters()
        self.popart: PopArt | None = None
        if loss.value_normalisation == "popart":
            device = next(network.parameters()).device
            self.popart = PopArt(network.task_names, loss.popart_step, loss.popart_lowest_deviation, device)
        self.optimiser = RMSProp(
            network.parameters(),
            optimiser.learning_rate,
            optimiser.decay,
            optimiser.epsilon,
            optimiser.epsilon_placement == "inside",
            optimiser.initial_square,
        )

    def learning_rate(self) -> float:
        """Of the next update, from the frames so far."""
        if self.settings.schedule == "constant":
            return self.settings.learning_rate
        return self.settings.learning_rate * max(0.0, 1 - self.counters.frames / self.total_frames)

    def update(self, batch: Batch, tasks: list[int], first: np.ndarray | None = None) -> dict[str, Any]:
        """One update from B unrolls on the network's device; `tasks` is `batch["task"]` as Python ints.

        Counts frames and steps also of a skipped update: they were consumed. With several ranks the update is that of one
        rank with all their unrolls, and so is what is counted and returned. `first` is `batch["first"]` in host memory; without
        it a GPU is waited for.

        Returns:
            `loss`, `gradient_norm` (before clipping), `skipped` (bool), `task_sums` [N, len(SUMS)] (see diagnostics).

        Raises:
            NonFiniteError: after `max_skipped_updates` non-finite updates in a row.
            LostRankError: another rank is gone; nothing has changed.
        """
        num_tasks = len(self.network.task_names)
        output = self.network(batch, batch["core_state"], tasks, first)
        losses = compute_losses(output, batch, self.loss_settings, self.popart.scale(tasks) if self.popart else None)
        loss = losses.total()
        self.optimiser.zero_grad()
        loss.backward()
        frames = batch["frames"][1:]
        numbers = {
            "loss": loss.detach(),
            "frames": frames.sum(dtype=torch.int64),
            "steps": (frames > 0).sum(),
            "task_sums": task_sums(losses, batch, self.loss_settings, num_tasks),
            "targets": target_sums(losses.targets, batch, num_tasks),
        }
        summed = self.ranks.add_up(numbers, self.network.parameters())
        gradients = [p.grad for p in self.network.parameters() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients, foreach=True)
        loss_value, norm_value = torch.stack([summed["loss"].to(norm), norm]).tolist()
        rate = self.learning_rate()
        self.counters.frames += int(summed["frames"])
        self.counters.steps += int(summed["steps"])
        skipped = not (np.isfinite(loss_value) and np.isfinite(norm_value))
        if skipped:
            self._skip(loss_value, norm_value)
        else:
            self._apply(gradients, norm_value, rate)
            if self.popart is not None:
                self.popart.update(summed["targets"], self.network.task_value_heads())
        sums = summed["task_sums"].cpu().numpy()
        return {"loss": loss_value, "gradient_norm": norm_value, "skipped": skipped, "task_sums": sums}

    def _apply(self, gradients: list[torch.Tensor], norm: float, rate: float) -> None:
        limit = self.settings.max_gradient_norm
        if limit and norm > limit:
            torch._foreach_mul_(gradients, limit / norm)
        for group in self.optimiser.param_groups:
            group["lr"] = rate
        self.optimiser.step()
        self.counters.updates += 1
        self.counters.skipped_in_a_row = 0

    def _skip(self, loss: float, norm: float) -> None:
        self.counters.skipped_updates += 1
        self.counters.skipped_in_a_row += 1
        if self.counters.skipped_in_a_row >= self.settings.max_skipped_updates:
            raise NonFiniteError(
                f"the loss or its gradient was not finite {self.counters.skipped_in_a_row} times in a row "
                f"(last: loss {loss}, gradient norm {norm}): lower optimiser.learning_rate={self.settings.learning_rate}, "
                "or look at the rewards of the tasks"
            )

    def optimiser_state(self) -> dict[str, torch.Tensor]:
        """Mean squares by parameter name; absent where a parameter never had a gradient."""
        state = self.optimiser.state
        return {name: state[p]["square"] for name, p in self.network.named_parameters() if p in state}

    def load_optimiser_state(self, squares: Mapping[str, torch.Tensor]) -> None:
        """Inverse of `optimiser_state`.

        Raises:
            ValueError: a name that the network does not have.
        """
        parameters = dict(self.network.named_parameters())
        unknown = sorted(set(squares) - set(parameters))
        if unknown:
            raise ValueError(f"the optimiser state holds parameters that the network lacks: {', '.join(unknown)}")
        for name, square in squares.items():
            self.optimiser.state[parameters[name]] = {"square": square.to(parameters[name].device).clone()}
