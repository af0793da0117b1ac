"""A policy is a callable: rows in, actions out. LocalPolicy runs the network in this process, in training and in evaluation."""

from collections.abc import Sequence

import numpy as np
import torch

from agent.network import Network
from agent.unroll import NO_ACTION


def sample_actions(log_probs: np.ndarray, uniforms: np.ndarray) -> np.ndarray:
    """Draw actions by inversion: log_probs [E, A], uniforms [E] in [0, 1) -> int32 [E]. An illegal action is never drawn."""
    cumulative = np.exp(log_probs.astype(np.float64)).cumsum(1)
    return (cumulative <= (uniforms * cumulative[:, -1])[:, None]).sum(1).astype(np.int32)


class LocalPolicy:
    """Acts in E environments and carries what the network needs from one row to the next: core state and last action.

    Args:
        network: shared by all policies of a process; float32 or float64.
        tasks: task index of each environment within `network.task_names`.
    """

    def __init__(self, network: Network, tasks: Sequence[int]) -> None:
        self.network = network
        self.tasks = [int(task) for task in tasks]
        self.core_state = network.initial_state(len(self.tasks))  # [E, 2, K]
        self.last_action = np.full(len(self.tasks), NO_ACTION, np.int32)

    @torch.inference_mode()
    def act(
        self,
        frame: np.ndarray,
        instruction: np.ndarray | None,
        reward: np.ndarray,
        first: np.ndarray,
        uniforms: np.ndarray,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Read one row per environment, act, and remember.

        Args:
            frame: [E, H, W, C]; instruction: int [E, L] or None; reward: float [E], raw, that came with the frame.
            first: bool [E], this row starts an episode: state, last action and reward of before are forgotten.
            uniforms: float64 [E] in [0, 1), one per environment.

        Returns:
            action int32 [E] and log_probs [E, A] of all actions.
        """
        device = self.core_state.device
        self.last_action = np.where(first, NO_ACTION, self.last_action).astype(np.int32)
        rows = {
            "frame": frame,
            "reward": np.where(first, 0, reward),
            "first": first,
            "last_action": self.last_action,
        }
        if instruction is not None:
            rows["instruction"] = instruction
        tensors = {name: torch.from_numpy(array)[None].to(device) for name, array in rows.items()}
        output = self.network(tensors, self.core_state, self.tasks)
        log_probs = torch.log_softmax(output.logits[0], -1).cpu().numpy()
        self.core_state = output.core_state
        self.last_action = sample_actions(log_probs, uniforms)
        return self.last_action, log_probs
