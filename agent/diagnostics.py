"""What a batch tells about learning, per task: entropy, clipped ratios, effective sample size, KL, losses, sample age."""

import numpy as np
import torch

from agent.losses import Losses, entropy
from agent.unroll import Batch, transition_mask

SUMS = (
    "transitions",
    "unrolls",
    "entropy",
    "off_policy",
    "rho",
    "rho_squared",
    "kl",
    "policy_gradient_loss",
    "baseline_loss",
    "entropy_loss",
    "target",
    "target_squared",
    "error",
    "error_squared",
)
# A ratio outside of this is an action that has become clearly more or less probable since it was taken.
OFF_POLICY = (0.8, 1.25)


@torch.no_grad()
def task_sums(losses: Losses, batch: Batch, num_tasks: int) -> torch.Tensor:
    """Sums over a batch's transitions per task, [N, len(SUMS)] float32, columns named by SUMS; they add up over batches.

    `off_policy` counts ratios outside OFF_POLICY; `kl` is KL(behaviour || target) in nats.
    """
    weight = transition_mask(batch["first"]).to(torch.float32)
    # Ratios of 1e10 and more would overflow their own square; they count as 1e10.
    rhos = losses.log_rhos.float().clamp(max=23.0).exp()
    behaviour = batch["log_probs"][:-1]
    kl = (behaviour.exp() * (behaviour - losses.log_probs)).sum(-1)
    columns = [
        weight.sum(0),
        torch.ones_like(weight[0]),
        (weight * entropy(losses.log_probs)).sum(0),
        (weight * ((rhos < OFF_POLICY[0]) | (rhos > OFF_POLICY[1]))).sum(0),
        (weight * rhos).sum(0),
        (weight * rhos.square()).sum(0),
        (weight * kl).sum(0),
        losses.policy_gradient.detach(),
        losses.baseline.detach(),
        losses.entropy.detach(),
        (weight * losses.targets).sum(0),
        (weight * losses.targets.square()).sum(0),
        (weight * losses.errors).sum(0),
        (weight * losses.errors.square()).sum(0),
    ]
    sums = torch.zeros(num_tasks, len(SUMS), device=weight.device)
    return sums.index_add_(0, batch["task"].long(), torch.stack(columns, 1).float())


def summarise(sums: np.ndarray) -> dict[str, float]:
    """Means per transition from summed columns [len(SUMS)] of one task, or of all; nothing without transitions.

    `effective_sample_size` is (sum rho)^2 / (n sum rho^2), in (0, 1]: 1 = on-policy. `off_policy_share` is of ratios outside
    OFF_POLICY: 0 = on-policy. `explained_variance` of the value targets by the values is 1 at best, 0 for a constant;
    left out where the targets are all alike.
    """
    total = dict(zip(SUMS, sums.astype(float).tolist(), strict=True))
    n = total["transitions"]
    if n == 0:
        return {}
    spread = _variance(total, "target", n)
    return {
        "entropy": total["entropy"] / n,
        "off_policy_share": total["off_policy"] / n,
        "effective_sample_size": total["rho"] ** 2 / (n * total["rho_squared"]) if total["rho_squared"] else 0.0,
        "kl_behaviour_target": total["kl"] / n,
        "policy_gradient_loss": total["policy_gradient_loss"] / n,
        "baseline_loss": total["baseline_loss"] / n,
        "entropy_loss": total["entropy_loss"] / n,
        **({"explained_variance": 1 - _variance(total, "error", n) / spread} if spread > 1e-12 else {}),
    }


def _variance(total: dict[str, float], name: str, n: float) -> float:
    return max(0.0, total[f"{name}_squared"] / n - (total[name] / n) ** 2)
