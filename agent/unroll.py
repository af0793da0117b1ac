"""The row contract and the table of fields: what an unroll is, here and on every path that it travels.

An unroll is T agent steps of one environment: T + 1 rows. Row t holds what the agent *saw* and what it *did on seeing it*.

Seen: the observation, the reward that arrived with it, `terminated`, `truncated`, `first`, and `last_action`.
Done: the action and the behaviour policy's log-probabilities.

- Row 0 repeats the last row of the unroll before; `core_state` is the recurrent state *before* row 0.
- Transition t goes from row t to row t + 1: action[t], reward[t + 1], discount gamma * (1 - terminated[t + 1]).
- The last observation of an episode has a row of its own. Its action has no consequence, and the row after it is `first`: the
  pair (last, first) is no transition. It has weight 0 in every loss and discount 0 in V-trace.
- On a `first` row the recurrent state is zeroed before the row is read, the reward is 0 and `last_action` is -1 ("none yet").
- A life lost in Atari ends the episode for the learner only: the next row is `first` with frames > 0, and the game goes on.
- A game lost in its middle, as its engine died, has no last row: the next row is `first`, with no statistics.
- `version` belongs to the oldest parameters that acted on rows 0 to T - 1; `log_probs` are those of the parameters that acted.
- Game statistics (`episode_*`) stand on the row on which the *next* game starts; everywhere else `episode_return` is NaN.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

Arrays = dict[str, np.ndarray]
Batch = dict[str, torch.Tensor]
NO_ACTION = -1


@dataclass(frozen=True)
class Field:
    """Shape and dtype of one field, without the leading T + 1 if it has one value per row."""

    shape: tuple[int, ...]
    dtype: str
    per_row: bool = True


@dataclass(frozen=True)
class UnrollSpec:
    """The sizes that fix every field of an unroll.

    Attributes:
        unroll_length: T, agent steps.
        frame_shape: H, W, C.
        frame_dtype: "uint8" (0 to 255) or "float32".
        instruction_length: L words; 0 = no instructions, and then no such field.
        num_actions: A, the largest action set of the run's tasks.
        core_size: K.
    """

    unroll_length: int
    frame_shape: tuple[int, int, int]
    frame_dtype: str
    instruction_length: int
    num_actions: int
    core_size: int

    def fields(self) -> dict[str, Field]:
        """Name -> field, in the order in which they lie in a slot."""
        table = {
            "frame": Field(self.frame_shape, self.frame_dtype),
            "instruction": Field((self.instruction_length,), "int32"),
            "reward": Field((), "float32"),  # raw, as the environment gave it; 0 on first rows
            "terminated": Field((), "bool"),
            "truncated": Field((), "bool"),
            "first": Field((), "bool"),
            "last_action": Field((), "int32"),  # -1 on first rows
            "action": Field((), "int32"),
            "log_probs": Field((self.num_actions,), "float32"),  # of the behaviour policy, all actions
            "frames": Field((), "int32"),  # environment frames played to reach this row; 0 where a game was reset
            "episode_return": Field((), "float64"),  # raw return of the game that ended just before this row, else NaN
            "episode_frames": Field((), "int64"),
            "episode_steps": Field((), "int64"),
            "core_state": Field((2, self.core_size), "float32", per_row=False),  # h and c before row 0
            "task": Field((), "int32", per_row=False),  # index in the run's task list
            "version": Field((), "int64", per_row=False),  # learner updates behind the oldest parameters that acted
            "acted_at": Field((), "float64", per_row=False),  # seconds since the epoch when row T was seen
            "actor": Field((), "int32", per_row=False),
            "environment": Field((), "int32", per_row=False),  # index within the actor
        }
        if self.instruction_length == 0:
            del table["instruction"]
        return table

    def array_shape(self, field: Field) -> tuple[int, ...]:
        """Shape of one unroll's array of this field."""
        return (self.unroll_length + 1, *field.shape) if field.per_row else field.shape

    def unroll_bytes(self) -> int:
        """Bytes of one unroll, each field aligned to 64 bytes."""
        return sum(_aligned(self._field_bytes(field)) for field in self.fields().values())

    def views(self, buffer: np.ndarray) -> Arrays:
        """Name -> array over a flat uint8 `buffer` of `unroll_bytes()` bytes: no copy."""
        if buffer.dtype != np.uint8 or buffer.size != self.unroll_bytes():
            raise ValueError(f"an unroll needs {self.unroll_bytes()} bytes, the buffer has {buffer.size}")
        arrays, start = {}, 0
        for name, field in self.fields().items():
            size = self._field_bytes(field)
            arrays[name] = buffer[start : start + size].view(field.dtype).reshape(self.array_shape(field))
            start += _aligned(size)
        return arrays

    def empty(self, num_unrolls: int) -> Arrays:
        """Arrays for `num_unrolls` side by side: rows [T+1, B, ...], others [B, ...]."""
        arrays = {}
        for name, field in self.fields().items():
            lead = (self.unroll_length + 1, num_unrolls) if field.per_row else (num_unrolls,)
            arrays[name] = np.zeros((*lead, *field.shape), field.dtype)
        return arrays

    def copy_in(self, batch: Arrays, column: int, unroll: Mapping[str, np.ndarray]) -> None:
        """Write one unroll into column `column` of arrays made by `empty`."""
        for name, field in self.fields().items():
            if field.per_row:
                batch[name][:, column] = unroll[name]
            else:
                batch[name][column] = unroll[name]

    def copy_out(self, unroll: Arrays, batch: Mapping[str, np.ndarray], column: int) -> None:
        """Write column `column` of arrays made by `empty` into one unroll."""
        for name, field in self.fields().items():
            unroll[name][...] = batch[name][:, column] if field.per_row else batch[name][column]

    def _field_bytes(self, field: Field) -> int:
        return int(np.prod(self.array_shape(field), dtype=np.int64)) * np.dtype(field.dtype).itemsize


def transition_mask(first: torch.Tensor) -> torch.Tensor:
    """Which of the T pairs of rows are transitions: bool [T, B] from `first` bool [T+1, B]."""
    return ~first[1:]


def take_columns(batch: Batch, columns: torch.Tensor) -> Batch:
    """The batch cut to some of its B columns, int64 [n]; a copy."""
    return {name: tensor.index_select(0 if name in PER_UNROLL else 1, columns) for name, tensor in batch.items()}


def _aligned(size: int) -> int:
    return -(-size // 64) * 64


# Fields with one value per unroll, [B, ...]; all others have one per row, [T+1, B, ...].
PER_UNROLL = frozenset(name for name, field in UnrollSpec(1, (1, 1, 1), "uint8", 1, 1, 1).fields().items() if not field.per_row)
