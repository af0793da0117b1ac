"""A policy is a callable: rows in, actions out. LocalPolicy runs the network in this process, in training and in evaluation;
BatchedPolicy asks a process that runs it for many."""

from collections.abc import Callable, Sequence

import numpy as np
import torch

from agent.network import Network
from agent.transport.mailbox import Mailbox
from agent.unroll import NO_ACTION, Arrays


def sample_actions(log_probs: np.ndarray, uniforms: np.ndarray) -> np.ndarray:
    """Draw actions by inversion: log_probs [E, A], uniforms [E] in [0, 1) -> int32 [E]. An illegal action is never drawn."""
    cumulative = np.exp(log_probs.astype(np.float64)).cumsum(1)
    return (cumulative <= (uniforms * cumulative[:, -1])[:, None]).sum(1).astype(np.int32)


class LocalPolicy:
    """Acts in E environments and carries what the network needs from one row to the next: core state and last action.

    Args:
        network: shared by all policies of a process; float32 or float64.
        tasks: task index of each environment within `network.task_names`.

    Attributes:
        version: of the network's parameters; whoever loads them says so.
    """

    def __init__(self, network: Network, tasks: Sequence[int]) -> None:
        self.network = network
        self.tasks = [int(task) for task in tasks]
        self.core_state = network.initial_state(len(self.tasks))  # [E, 2, K]
        self.last_action = np.full(len(self.tasks), NO_ACTION, np.int32)
        self.version = 0

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
        rows = _rows(frame, instruction, reward, first, self.last_action)
        log_probs, self.core_state = _forward(self.network, rows, self.core_state, self.tasks)
        self.last_action = sample_actions(log_probs, uniforms)
        return self.last_action, log_probs

    def state(self) -> np.ndarray:
        """The core state before the next row, [E, 2, K]."""
        return self.core_state.cpu().numpy()


class BatchedPolicy:
    """As LocalPolicy, but an inference process evaluates the network. What is carried from row to row stays here, and goes
    with every request: that process may die and be replaced at any time.

    Args:
        mailbox: of these environments.
        tasks: task index of each environment.
        timeout_seconds: for an answer.
        beat: called while waiting: "I live".

    Attributes:
        version: of the parameters behind the last action.
    """

    def __init__(self, mailbox: Mailbox, tasks: Sequence[int], timeout_seconds: float, beat: Callable[[], None]) -> None:
        self.tasks = [int(task) for task in tasks]
        self.core_state = np.zeros_like(mailbox.request["core_state"])
        self.last_action = np.full(len(self.tasks), NO_ACTION, np.int32)
        self.version = 0
        self._mailbox, self._timeout, self._beat = mailbox, timeout_seconds, beat

    def act(
        self,
        frame: np.ndarray,
        instruction: np.ndarray | None,
        reward: np.ndarray,
        first: np.ndarray,
        uniforms: np.ndarray,
    ) -> tuple[np.ndarray, np.ndarray]:
        """As LocalPolicy.

        Raises:
            TimeoutError: no answer within the time.
        """
        rows = _rows(frame, instruction, reward, first, self.last_action)
        request = {**rows, "core_state": self.core_state, "task": np.array(self.tasks)}
        answer = self._mailbox.ask(request, self._timeout, self._beat)
        log_probs, self.core_state = answer["log_probs"].copy(), answer["core_state"].copy()
        self.version = int(answer["version"][0])
        self.last_action = sample_actions(log_probs, uniforms)
        return self.last_action, log_probs

    def state(self) -> np.ndarray:
        """The core state before the next row, [E, 2, K]."""
        return self.core_state


@torch.inference_mode()
def answer(network: Network, version: int, mailboxes: Sequence[Mailbox]) -> None:
    """One forward, of parameters `version`, over the requests that wait in all these mailboxes."""
    requests = [mailbox.request for mailbox in mailboxes]
    joined = {name: np.concatenate([request[name] for request in requests]) for name in requests[0]}
    state = torch.from_numpy(joined.pop("core_state")).to(network.legal.device)
    tasks = joined.pop("task").tolist()
    log_probs, after = _forward(network, joined, state, tasks)
    core_state, start = after.cpu().numpy(), 0
    for mailbox in mailboxes:
        part = slice(start, start + mailbox.num_envs)
        mailbox.reply(log_probs[part], core_state[part], version)
        start = part.stop


def _rows(
    frame: np.ndarray, instruction: np.ndarray | None, reward: np.ndarray, first: np.ndarray, last_action: np.ndarray
) -> Arrays:
    """What the network reads, [E, ...]."""
    rows = {
        "frame": frame,
        "reward": np.where(first, 0, reward),
        "first": first,
        "last_action": np.where(first, NO_ACTION, last_action).astype(np.int32),
    }
    return rows if instruction is None else {**rows, "instruction": instruction}


def _forward(network: Network, rows: Arrays, core_state: torch.Tensor, tasks: Sequence[int]) -> tuple[np.ndarray, torch.Tensor]:
    """log_probs [E, A] and the core state after the row, on the network's device."""
    tensors = {name: torch.from_numpy(array)[None].to(core_state.device) for name, array in rows.items()}
    output = network(tensors, core_state, tasks)
    return torch.log_softmax(output.logits[0], -1).cpu().numpy(), output.core_state
