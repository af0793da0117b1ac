"""One learner: a batch of unrolls in, one or several V-trace updates out."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch

from agent.advantages import AdvantageScale, advantage_sums
from agent.diagnostics import summarise, task_sums
from agent.distributed import Ranks
from agent.losses import Losses, LossSettings, compute_losses
from agent.network import Network
from agent.optimisers import OptimiserSettings, make_optimiser
from agent.popart import PopArt, target_sums
from agent.unroll import Batch, take_columns


@dataclass(frozen=True)
class LearnerSettings:
    """The learner's process.

    Attributes:
        batch_size: B, unrolls that are learned from together (IMPALA: 32).
        epochs: times that a batch is learned from; V-trace corrects each time with the stored behaviour, frames count once.
        minibatches: parts of B / minibatches unrolls, drawn anew in each epoch, with an update for each.
        max_kl: no further epoch on a batch once the policy's divergence from the one that acted, KL in nats, was more on
            average; 0 = no limit.
        prefetch: batches that are filled while the learner works: 1 hides the copy to a GPU, 0 makes samples one batch younger,
            which pays where the learner is what limits and unrolls of all actors that wait (actor.slots) fill a batch.
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
    epochs: int = field(default=1, metadata={"min": 1, "max": 64})
    minibatches: int = field(default=1, metadata={"min": 1})
    max_kl: float = field(default=0.0, metadata={"min": 0})
    prefetch: int = field(default=1, metadata={"min": 0, "max": 8})
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
        reuse: how often and in which parts a batch is learned from; default: once, whole.
        seed: of the choice of minibatches.
    """

    def __init__(
        self,
        network: Network,
        loss: LossSettings,
        optimiser: OptimiserSettings,
        total_frames: int,
        ranks: Ranks | None = None,
        reuse: LearnerSettings | None = None,
        seed: int = 0,
    ) -> None:
        self.network = network
        self.reuse, self.seed = reuse or LearnerSettings(), seed
        self.ranks = ranks or Ranks()
        self.loss_settings = loss
        self.settings = optimiser
        self.total_frames = total_frames
        self.counters = Counters()
        device = next(network.parameters()).device
        is_scaled = loss.advantage_normalisation == "task"
        self.advantages = AdvantageScale(network.task_names, device) if is_scaled else None
        self.popart: PopArt | None = None
        if loss.value_normalisation == "popart":
            self.popart = PopArt(network.task_names, loss.popart_step, loss.popart_lowest_deviation, device)
        self.optimiser = make_optimiser(network.parameters(), optimiser)

    def learning_rate(self) -> float:
        """Of the next update, from the frames and updates so far."""
        rate = self.settings.learning_rate
        if self.settings.warmup_updates:
            rate *= min(1.0, (self.counters.updates + 1) / self.settings.warmup_updates)
        if self.settings.schedule == "constant":
            return rate
        if self.settings.schedule == "inverse_sqrt":
            steps_per_task = self.counters.steps / len(self.network.task_names)
            return rate / (1 + steps_per_task / self.settings.hot_steps) ** 0.5
        return rate * max(0.0, 1 - self.counters.frames / self.total_frames)

    def update(self, batch: Batch, tasks: list[int], first: np.ndarray | None = None) -> dict[str, Any]:
        """Learn from B unrolls on the network's device, in epochs * minibatches updates.

        `tasks` is `batch["task"]` as Python ints. Counts frames and steps once, also of skipped updates: they were consumed.
        With several ranks an update is that of one rank with all their unrolls, and so is what is counted and returned. `first`
        is `batch["first"]` in host memory; without it a GPU is waited for.

        Returns:
            `loss`, `gradient_norm` (before clipping): means over updates, of those that were not skipped if there are some;
            `samples`, transitions learned from, each as often as it was; `skipped` (bool), any update; `task_sums` and
            `last_sums` [N, len(SUMS)] (see diagnostics) of the first and the last time that the batch was gone through.

        Raises:
            NonFiniteError: after `max_skipped_updates` non-finite updates in a row.
            LostRankError: another rank is gone; nothing has changed since the update before.
        """
        self._see(batch)
        if not self.counters.updates and not self.counters.skipped_updates:
            self._measure_scales(batch, tasks, first)
        passes: list[list[dict[str, Any]]] = []
        for epoch in range(self.reuse.epochs):
            parts = self._parts(batch, tasks, first)
            passes.append([self._update(*part, is_new=epoch == 0) for part in parts])
            if self.reuse.max_kl and _divergence(passes[-1]) > self.reuse.max_kl:
                break
        results = [result for each in passes for result in each]
        whole = [result for result in results if not result["skipped"]] or results
        means = {key: float(np.mean([result[key] for result in whole])) for key in ("loss", "gradient_norm")}
        return {
            **means,
            "samples": float(sum(result["task_sums"][:, 0].sum() for result in results)),
            "skipped": any(result["skipped"] for result in results),
            "task_sums": _sums(passes[0]),
            "last_sums": _sums(passes[-1]),
        }

    def _see(self, batch: Batch) -> None:
        """Newest rows into the statistics of pixels, before anything is learned from them."""
        if self.network.normaliser is not None:
            sums = self.network.normaliser.sums(batch["frame"][-1], batch["task"])
            self.ranks.sum(sums)
            self.network.normaliser.update(sums)

    def losses(self, batch: Batch, tasks: list[int], first: np.ndarray | None = None) -> Losses:
        """Of a batch, with the statistics of its tasks as they are now."""
        output = self.network(batch, batch["core_state"], tasks, first)
        scale = self.popart.scale(tasks) if self.popart else None
        return compute_losses(
            output, batch, self.loss_settings, scale, self.advantages.deviations(tasks) if self.advantages else None
        )

    @torch.no_grad()
    def _measure_scales(self, batch: Batch, tasks: list[int], first: np.ndarray | None) -> None:
        """The very first batch into the statistics of targets and advantages: the first step is in their units already."""
        if self.popart is None and self.advantages is None:
            return
        num_tasks = len(self.network.task_names)
        losses = self.losses(batch, tasks, first)
        targets, advantages = target_sums(losses.targets, batch, num_tasks), advantage_sums(losses.advantages, batch, num_tasks)
        self.ranks.sum(targets, advantages)
        if bool(targets.isfinite().all()):
            self._rescale(targets, advantages)

    def _rescale(self, targets: torch.Tensor, advantages: torch.Tensor) -> None:
        if self.popart is not None:
            self.popart.update(targets, self.network.task_value_heads())
        if self.advantages is not None:
            self.advantages.update(advantages)

    def _parts(
        self, batch: Batch, tasks: list[int], first: np.ndarray | None
    ) -> Iterator[tuple[Batch, list[int], np.ndarray | None]]:
        """The batch in `minibatches` parts of columns, drawn anew each time."""
        if self.reuse.minibatches == 1:
            yield batch, tasks, first
            return
        # From the number of updates: a run that is continued draws what it would have drawn.
        rng = np.random.default_rng([self.seed, self.counters.updates, self.counters.skipped_updates])
        for columns in rng.permutation(len(tasks)).reshape(self.reuse.minibatches, -1):
            part = take_columns(batch, torch.from_numpy(columns).to(batch["first"].device))
            yield part, [tasks[column] for column in columns], None if first is None else first[:, columns]

    def _update(self, batch: Batch, tasks: list[int], first: np.ndarray | None, is_new: bool) -> dict[str, Any]:
        """One update; a batch that is new is counted."""
        num_tasks = len(self.network.task_names)
        losses = self.losses(batch, tasks, first)
        loss = losses.total()
        self.optimiser.zero_grad()
        loss.backward()
        frames = batch["frames"][1:]
        numbers = {
            "loss": loss.detach(),
            "frames": frames.sum(dtype=torch.int64),
            "steps": (frames > 0).sum(),
            "task_sums": task_sums(losses, batch, num_tasks),
            "targets": target_sums(losses.targets, batch, num_tasks),
            "advantages": advantage_sums(losses.advantages, batch, num_tasks),
        }
        summed = self.ranks.add_up(numbers, self.network.parameters())
        gradients = [p.grad for p in self.network.parameters() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients, foreach=True)
        loss_value, norm_value = torch.stack([summed["loss"].to(norm), norm]).tolist()
        rate = self.learning_rate()
        if is_new:
            self.counters.frames += int(summed["frames"])
            self.counters.steps += int(summed["steps"])
        skipped = not (np.isfinite(loss_value) and np.isfinite(norm_value))
        if skipped:
            self._skip(loss_value, norm_value)
        else:
            self._apply(gradients, norm_value, rate)
            self._rescale(summed["targets"], summed["advantages"])
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
        """By parameter name: RMSProp's mean squares; Adam's means, mean squares and steps under `NAME.KEY`. Absent where a
        parameter never had a gradient."""
        state = self.optimiser.state
        return {
            name if key == "square" else f"{name}.{key}": value
            for name, p in self.network.named_parameters()
            for key, value in state.get(p, {}).items()
        }

    def load_optimiser_state(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Inverse of `optimiser_state`.

        Raises:
            ValueError: a name that the network does not have.
        """
        parameters = dict(self.network.named_parameters())
        places = {name: (name, "square") if name in parameters else name.rpartition(".")[::2] for name in tensors}
        unknown = sorted(name for name, (parameter, _) in places.items() if parameter not in parameters)
        if unknown:
            raise ValueError(f"the optimiser state holds parameters that the network lacks: {', '.join(unknown)}")
        for name, (parameter, key) in places.items():
            place = parameters[parameter]
            self.optimiser.state[place][key] = tensors[name].to(place.device).clone()


def _sums(results: list[dict[str, Any]]) -> np.ndarray:
    """Sums per task over some updates."""
    return np.sum([result["task_sums"] for result in results], 0)


def _divergence(results: list[dict[str, Any]]) -> float:
    """Mean KL of the behaviour from the policy over some updates, in nats."""
    return summarise(_sums(results).sum(0)).get("kl_behaviour_target", 0.0)
