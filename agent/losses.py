"""V-trace actor-critic losses on a batch, reward transforms and time limits: pure functions.

Losses are **summed** over time and batch, as IMPALA published them: two learners with B unrolls each, gradients added, give the
update of one with 2 B.
"""

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F

from agent import vtrace
from agent.network import Output
from agent.popart import ValueScale
from agent.unroll import Batch, transition_mask


@dataclass(frozen=True)
class LossSettings:
    """Losses of arXiv:1802.01561, section 4.2 and appendix D.

    Attributes:
        discount: gamma per agent step; 0 at a termination.
        baseline_cost: weight of 1/2 squared value error.
        entropy_cost: weight of the entropy bonus.
        reward_transform: what the learner sees of a reward (scores never see it). clip: to [-1, 1]. soft_asymmetric:
            5 tanh(r / 5), times 0.3 if negative. optimistic_paper: 0.3 min(tanh r, 0) + 5 max(tanh r, 0). none: raw.
        time_limit: bootstrap = a truncated episode bootstraps from its final observation; terminate = it ends there.
        clip_rho, clip_c, clip_pg_rho: thresholds of V-trace's ratios.
        lambda_: c_t = lambda * min(clip_c, ratio).
        value_normalisation: popart = values and advantages in units of each task's own targets (arXiv:1809.04474), for which
            rewards are best left as they are (reward_transform: none); none = raw.
        popart_step: by which a task's statistics go towards its batch's, per update.
        popart_lowest_deviation: the unit is never smaller; 1e-2 guards very sparse rewards.
        advantage_normalisation: task = advantages are divided by their task's running deviation (agent/advantages.py) before
            they weigh the policy gradient; none = as they are.
        ratio_clip: no policy gradient from an action whose ratio has already left 1 - r to 1 + r in the direction in which its
            advantage pushes (PPO's clip, arXiv:1707.06347); 0 = never. It bounds how far learning a batch several times goes.
    """

    discount: float = field(default=0.99, metadata={"min": 0, "max": 1})
    baseline_cost: float = field(default=0.5, metadata={"min": 0})
    entropy_cost: float = field(default=0.01, metadata={"min": 0})
    reward_transform: Literal["clip", "soft_asymmetric", "optimistic_paper", "none"] = "clip"
    time_limit: Literal["bootstrap", "terminate"] = "bootstrap"
    clip_rho: float = field(default=1.0, metadata={"min": 0})
    clip_c: float = field(default=1.0, metadata={"min": 0})
    clip_pg_rho: float = field(default=1.0, metadata={"min": 0})
    lambda_: float = field(default=1.0, metadata={"min": 0, "max": 1})
    value_normalisation: Literal["none", "popart"] = "none"
    popart_step: float = field(default=3e-4, metadata={"min": 0, "max": 1})
    popart_lowest_deviation: float = field(default=1e-4, metadata={"min": 1e-8, "max": 1e6})
    advantage_normalisation: Literal["none", "task"] = "none"
    ratio_clip: float = field(default=0.0, metadata={"min": 0})


class Losses(NamedTuple):
    """Sums over the batch's transitions, per column [B], each already weighted by its cost; and what diagnostics need."""

    policy_gradient: torch.Tensor
    baseline: torch.Tensor
    entropy: torch.Tensor
    log_probs: torch.Tensor  # [T, B, A] of the target policy, detached
    log_rhos: torch.Tensor  # [T, B] log of target over behaviour probability, detached
    targets: torch.Tensor  # [T, B] V-trace targets of the values, detached
    errors: torch.Tensor  # [T, B] targets minus values, detached
    advantages: torch.Tensor  # [T, B] before they are normalised and clipped, detached

    def total(self) -> torch.Tensor:
        """Scalar."""
        return (self.policy_gradient + self.baseline + self.entropy).sum()


def transform_rewards(rewards: torch.Tensor, name: str) -> torch.Tensor:
    """What the learner sees of raw rewards; same shape. Formulas in LossSettings."""
    if name == "none":
        return rewards
    if name == "clip":
        return rewards.clamp(-1, 1)
    if name == "soft_asymmetric":
        squeezed = torch.tanh(rewards / 5)
        return 5 * torch.where(rewards < 0, 0.3 * squeezed, squeezed)
    if name == "optimistic_paper":
        squeezed = torch.tanh(rewards)
        return 0.3 * squeezed.clamp(max=0) + 5 * squeezed.clamp(min=0)
    raise ValueError(f"loss.reward_transform={name} is unknown: use clip, soft_asymmetric, optimistic_paper or none")


def entropy(log_probs: torch.Tensor) -> torch.Tensor:
    """[..., A] -> [...] in nats. Illegal actions have probability exactly 0 and a finite log: they add exactly 0."""
    return -(log_probs.exp() * log_probs).sum(-1)


def compute_losses(
    output: Output,
    batch: Batch,
    settings: LossSettings,
    scale: ValueScale | None = None,
    advantage_deviation: torch.Tensor | None = None,
) -> Losses:
    """Losses of T transitions of B columns.

    Args:
        output: of the network on all T + 1 rows.
        batch: of the row contract, [T+1, B, ...].
        scale: with PopArt, what the network's values have to be multiplied with and added to. V-trace runs on the result;
            value errors and advantages are divided by the deviation again.
        advantage_deviation: [B], by which advantages are divided.
    """
    mask = transition_mask(batch["first"])
    ended = batch["terminated"][1:]
    if settings.time_limit == "terminate":
        ended = ended | batch["truncated"][1:]
    values, unit = output.values.float(), torch.ones((), device=output.values.device)
    if scale is not None:
        values, unit = values * scale.deviation + scale.mean, scale.deviation
    log_probs = F.log_softmax(output.logits.float()[:-1], -1)
    actions = batch["action"][:-1].long()[..., None]
    taken = log_probs.gather(-1, actions).squeeze(-1)
    behaviour = batch["log_probs"][:-1].gather(-1, actions).squeeze(-1)
    log_rhos = (taken - behaviour).detach()
    targets = vtrace.from_importance_weights(
        # A pair that is no transition gets ratio 0: no residual, no trace, target = its own value.
        log_rhos=log_rhos.masked_fill(~mask, float("-inf")),
        discounts=settings.discount * (mask & ~ended).to(values.dtype),
        rewards=transform_rewards(batch["reward"][1:], settings.reward_transform),
        values=values[:-1].detach(),
        bootstrap_value=values[-1].detach(),
        clip_rho_threshold=settings.clip_rho,
        clip_c_threshold=settings.clip_c,
        clip_pg_rho_threshold=settings.clip_pg_rho,
        lambda_=settings.lambda_,
    )
    weight = mask.to(values.dtype)
    advantages = targets.pg_advantages / unit
    raw_advantages = advantages
    if advantage_deviation is not None:
        advantages = advantages / advantage_deviation
    if settings.ratio_clip:
        advantages = advantages * within(log_rhos, advantages, settings.ratio_clip)
    errors = targets.vs - values[:-1]
    return Losses(
        policy_gradient=-(weight * taken * advantages).sum(0),
        baseline=settings.baseline_cost * 0.5 * (weight * (errors / unit).square()).sum(0),
        entropy=-settings.entropy_cost * (weight * entropy(log_probs)).sum(0),
        log_probs=log_probs.detach(),
        log_rhos=log_rhos,
        targets=targets.vs,
        errors=errors.detach(),
        advantages=raw_advantages,
    )


def within(log_rhos: torch.Tensor, advantages: torch.Tensor, clip: float) -> torch.Tensor:
    """1 where an action may be pushed on, 0 where its ratio has left [1 - clip, 1 + clip] in the advantage's direction."""
    rhos = log_rhos.exp()
    return torch.where(advantages > 0, rhos <= 1 + clip, rhos >= 1 - clip).to(advantages.dtype)
