"""The shared network: torso, instruction LSTM, core LSTM with resets, and policy and value heads bound to task names."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from agent.core import Core, NoCore
from agent.normaliser import Normaliser
from agent.torso import initialise, make_torso

# Stands for log(0): finite, so that entropies and gradients of masked actions are exactly 0 and never NaN.
ILLEGAL_LOGIT = -1e9
SHARED = "shared"


@dataclass(frozen=True)
class NetworkSettings:
    """What the agent is made of. Default: the shallow model of IMPALA (arXiv:1802.01561, figure 3).

    Attributes:
        torso: shallow and deep are IMPALA's two; small is for frames of a few pixels; mlp for observations that are
            no image; auto chooses by the size of the frames.
        hidden_size: width of the torso's last layer.
        core: lstm, or none: heads read the torso's features, last action and reward.
        core_size: K, width of the core LSTM.
        input_normalisation: none = uint8 frames over 255; pixel = every pixel about its running mean in this task, in units of
            how much it moves (agent/normaliser.py).
        initialisation: fan_in = as IMPALA's code; orthogonal = torso with gain sqrt(2), policy heads 0.01, value heads 1, as
            PPO's.
        policy_head, value_head: one per task (bound by name), or one shared by all.
        instruction_embedding, instruction_size: word embedding and width of the instruction LSTM.
    """

    torso: Literal["auto", "shallow", "deep", "small", "mlp"] = "shallow"
    hidden_size: int = field(default=256, metadata={"min": 1})
    core: Literal["lstm", "none"] = "lstm"
    core_size: int = field(default=256, metadata={"min": 1})
    input_normalisation: Literal["none", "pixel"] = "none"
    initialisation: Literal["fan_in", "orthogonal"] = "fan_in"
    policy_head: Literal["per_task", "shared"] = "per_task"
    value_head: Literal["per_task", "shared"] = "per_task"
    instruction_embedding: int = field(default=20, metadata={"min": 1})
    instruction_size: int = field(default=64, metadata={"min": 1})

    @property
    def state_size(self) -> int:
        """K of the recurrent state [2, K]; 0 without a core."""
        return self.core_size if self.core == "lstm" else 0


@dataclass(frozen=True)
class NetworkSpec:
    """Everything that fixes a network's parameters; plain types, so that a checkpoint carries it.

    Attributes:
        settings: NetworkSettings.
        frame_shape, frame_dtype: H, W, C and "uint8" or "float32".
        instruction_length: L words, 0 = none.
        num_actions: A, width of the policy heads and of the one-hot last action.
        legal_actions: task name -> n: actions 0 to n - 1 are legal in this task.
    """

    settings: NetworkSettings
    frame_shape: tuple[int, int, int]
    frame_dtype: str
    instruction_length: int
    num_actions: int
    legal_actions: Mapping[str, int]

    def to_dict(self) -> dict[str, Any]:
        """Plain types only."""
        plain = dataclasses.asdict(self)
        return {**plain, "frame_shape": list(self.frame_shape), "legal_actions": dict(self.legal_actions)}

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> "NetworkSpec":
        """Inverse of `to_dict`."""
        settings = NetworkSettings(**plain["settings"])
        return cls(**{**plain, "settings": settings, "frame_shape": tuple(plain["frame_shape"])})


class Output(NamedTuple):
    """logits [T, B, A] (illegal actions at ILLEGAL_LOGIT), values [T, B], core_state [B, 2, K] after the last row."""

    logits: torch.Tensor
    values: torch.Tensor
    core_state: torch.Tensor


class Network(nn.Module):
    """Policy and value for rows of several tasks at once.

    Args:
        spec: what it is made of.
        bf16: the torso computes in bfloat16; its parameters, LSTMs and heads stay float32. Nearly all arithmetic is the
            torso's, log-probabilities need more than 8 bits, and a recurrence adds its rounding up.

    Raises:
        ValueError: no tasks, or a task without a legal action.
    """

    legal: torch.Tensor

    def __init__(self, spec: NetworkSpec, bf16: bool = False) -> None:
        super().__init__()
        self.spec, self.bf16 = spec, bf16
        self.task_names = tuple(spec.legal_actions)
        _check_actions(spec)
        settings = spec.settings
        keys = [_head_key(name) for name in self.task_names]
        is_normalised, start = settings.input_normalisation == "pixel", settings.initialisation
        self.normaliser = Normaliser(keys, spec.frame_shape, spec.frame_dtype) if is_normalised else None
        seen = "float32" if is_normalised else spec.frame_dtype
        self.seen_dtype: torch.dtype = getattr(torch, seen)
        self.torso = make_torso(settings.torso, spec.frame_shape, seen, settings.hidden_size, start)
        self.instruction = (
            InstructionEncoder(settings.instruction_embedding, settings.instruction_size) if spec.instruction_length else None
        )
        features = settings.hidden_size + 1 + spec.num_actions + (settings.instruction_size if self.instruction else 0)
        self.core = Core(features, settings.core_size) if settings.core == "lstm" else NoCore()
        width = settings.core_size if settings.core == "lstm" else features
        self.policy_heads = _heads(keys, settings.policy_head, width, spec.num_actions, start, 0.01)
        self.value_heads = _heads(keys, settings.value_head, width, 1, start, 1.0)
        counts = torch.tensor([spec.legal_actions[name] for name in self.task_names])
        self.register_buffer("legal", torch.arange(spec.num_actions) < counts[:, None], persistent=False)

    def task_value_heads(self) -> list[nn.Linear]:
        """The value head of each task, in the order of `task_names`; without a shared one."""
        return [cast(nn.Linear, self.value_heads[_head_key(name)]) for name in self.task_names]

    def initial_state(self, num_columns: int) -> torch.Tensor:
        """Zeros [B, 2, K]: h and c."""
        return next(self.parameters()).new_zeros(num_columns, 2, self.spec.settings.state_size)

    def forward(
        self,
        rows: Mapping[str, torch.Tensor],
        core_state: torch.Tensor,
        tasks: Sequence[int],
        first: np.ndarray | None = None,
    ) -> Output:
        """Evaluate T rows of B columns.

        Args:
            rows: of the row contract, `frame` [T, B, H, W, C], `reward` [T, B], `last_action` [T, B] (-1 = none),
                `first` [T, B], and `instruction` [T, B, L] if the spec has instructions.
            core_state: [B, 2, K] before row 0.
            tasks: B task indices into `task_names`, as Python ints.
            first: `rows["first"]` in host memory, for the core on a GPU.
        """
        num_rows, num_columns = rows["first"].shape
        frames = rows["frame"]
        if frames.shape[2:] != self.spec.frame_shape or len(tasks) != num_columns:
            raise ValueError(
                f"rows must hold frames {list(self.spec.frame_shape)} and one task per column, "
                f"got frames {list(frames.shape[2:])}, {num_columns} columns and {len(tasks)} tasks"
            )
        dtype = core_state.dtype
        # One extra class for "none yet", dropped again: its one-hot row is all zeros.
        last_action = F.one_hot(rows["last_action"].long() + 1, self.spec.num_actions + 1)[..., 1:].to(dtype)
        with torch.autocast(frames.device.type, torch.bfloat16, enabled=self.bf16):
            seen = self.torso(self.seen(frames, tasks).flatten(0, 1)).to(dtype)
        features = [
            seen.view(num_rows, num_columns, -1),
            rows["reward"].to(dtype).clamp(-1, 1)[..., None],
            last_action,
        ]
        if self.instruction is not None:
            words = rows["instruction"].flatten(0, 1)
            features.append(self.instruction(words).view(num_rows, num_columns, -1))
        core, core_state = self.core(torch.cat(features, -1), rows["first"], core_state, first)
        logits = self._apply_heads(self.policy_heads, core, tasks)
        # An index by a list would wait for the device.
        legal = self.legal.index_select(0, torch.tensor(tasks).to(self.legal.device, non_blocking=True))
        logits = logits.masked_fill(~legal, ILLEGAL_LOGIT)
        values = self._apply_heads(self.value_heads, core, tasks).squeeze(-1)
        return Output(logits, values, core_state)

    def seen(self, frames: torch.Tensor, tasks: Sequence[int]) -> torch.Tensor:
        """What the torso gets of frames [T, B, H, W, C]: the same, or normalised float32."""
        return frames if self.normaliser is None else self.normaliser(frames, tasks)

    def shared_parameters(self) -> list[nn.Parameter]:
        """Torso, instruction encoder and core: what all tasks share. Heads are left out, also where all tasks share one."""
        modules = [self.torso, self.core, *([self.instruction] if self.instruction is not None else [])]
        return [parameter for module in modules for parameter in module.parameters()]

    def _apply_heads(self, heads: nn.ModuleDict, core: torch.Tensor, tasks: Sequence[int]) -> torch.Tensor:
        """[T, B, K] -> [T, B, out], column b through the head of task b. Heads of absent tasks get no gradient at all."""
        names = [SHARED] if SHARED in heads else [_head_key(self.task_names[task]) for task in tasks]
        if len(set(names)) == 1:
            return heads[names[0]](core)
        weight = torch.stack([cast(nn.Linear, heads[name]).weight for name in names])
        bias = torch.stack([cast(nn.Linear, heads[name]).bias for name in names])
        return torch.baddbmm(bias[:, None], core.transpose(0, 1), weight.transpose(1, 2)).transpose(0, 1)


class InstructionEncoder(nn.Module):
    """Word ids -> the LSTM's output at the last word; zeros for an empty instruction (IMPALA: embedding 20, LSTM 64)."""

    def __init__(self, embedding_size: int, size: int, num_buckets: int = 1000) -> None:
        super().__init__()
        self.embedding = nn.Embedding(num_buckets + 1, embedding_size, padding_idx=0)
        self.lstm = nn.LSTM(embedding_size, size, batch_first=True)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """words int [N, L], 0 = no word -> [N, size]. Equal rows are encoded once: a text stays for a whole episode."""
        texts, inverse = torch.unique(words, dim=0, return_inverse=True)
        lengths = (texts != 0).sum(1)
        outputs, _ = self.lstm(self.embedding(texts))
        last = outputs[torch.arange(len(texts), device=words.device), (lengths - 1).clamp(min=0)]
        return (last * (lengths > 0).to(last.dtype)[:, None])[inverse]


def _heads(keys: Sequence[str], mode: str, size: int, width: int, initialisation: str, gain: float) -> nn.ModuleDict:
    heads = nn.ModuleDict({key: nn.Linear(size, width) for key in ([SHARED] if mode == "shared" else keys)})
    initialise(heads, initialisation, gain)
    return heads


def _head_key(task_name: str) -> str:
    # The prefix keeps names such as "keys" from hiding methods of ModuleDict, and "shared" from meaning the shared head.
    return f"task_{task_name}"


def _check_actions(spec: NetworkSpec) -> None:
    if not spec.legal_actions:
        raise ValueError("the network has no tasks: name at least one")
    for name, count in spec.legal_actions.items():
        if not 1 <= count <= spec.num_actions:
            raise ValueError(f"task {name} has {count} legal actions: it needs 1 to {spec.num_actions}")
