"""Parameters go up: a board in a mapped file on which the learner pins the newest version; whoever reads gets the newest.

Two buffers: the learner writes the older one and then points to it. Each carries its version before and after its numbers,
so that a reader who was overtaken while copying notices, and copies again.
"""

import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from agent.transport import mapped

_HEADER = 64
_NOTHING = -1


def posted_tensors(network: nn.Module) -> list[torch.Tensor]:
    """What a checkpoint holds, in order: parameters, and the buffers that belong to them, such as BatchNorm's statistics.

    Raises:
        ValueError: one is not float32: actors would play with another network than the learner's.
    """
    tensors = network.state_dict()
    for name, tensor in tensors.items():
        if tensor.dtype != torch.float32:
            raise ValueError(
                f"the network's {name} is {tensor.dtype}, actors are sent float32 only: make it float32, or register it with "
                "persistent=False if actors do not need it"
            )
    return list(tensors.values())


class Posted(NamedTuple):
    """version: learner updates behind the parameters; frames: trained on by then."""

    version: int
    frames: int


def num_parameters(network: nn.Module) -> int:
    """Numbers on the board."""
    return sum(tensor.numel() for tensor in posted_tensors(network))


def board_bytes(count: int) -> int:
    """Bytes of the mapped file for `count` float32 numbers."""
    return _HEADER + 2 * (_HEADER + 4 * count)


class Board:
    """The newest float32 parameters and buffers of a network, in the order of its `state_dict`.

    Args:
        path: of the mapped file.
        count: numbers, see `num_parameters`.
        create: make the file (the supervisor does), or open it.
    """

    def __init__(self, path: Path, count: int, create: bool = False) -> None:
        buffer = (mapped.create if create else mapped.attach)(path, board_bytes(count))
        self._newest = buffer[:8].view(np.int64)  # buffer index + 1; 0 = nothing yet
        self._heads, self._numbers = [], []
        for index in range(2):
            start = _HEADER + index * (_HEADER + 4 * count)
            self._heads.append(buffer[start : start + 24].view(np.int64))  # version before, version after, frames
            self._numbers.append(buffer[start + _HEADER : start + _HEADER + 4 * count].view(np.float32))
        self._copy = np.empty(count, np.float32)
        self._next = 0

    def publish(self, network: nn.Module, version: int, frames: int) -> None:
        """Post a network's parameters. One writer only."""
        # One copy from the device, not one per parameter.
        flat = torch.cat([tensor.reshape(-1) for tensor in posted_tensors(network)])
        torch.from_numpy(self._open(version)).copy_(flat)
        self._commit(version, frames)

    def post(self, numbers: np.ndarray, version: int, frames: int) -> None:
        """As `publish`, of float32 [count]."""
        self._open(version)[...] = numbers
        self._commit(version, frames)

    def version(self) -> int:
        """Of the newest parameters, -1 while there are none."""
        return int(self._heads[int(self._newest[0]) - 1][0]) if self._newest[0] else _NOTHING

    def copy(self, timeout_seconds: float = 60.0) -> tuple[Posted, np.ndarray]:
        """The newest parameters, float32 [count], valid until the next call.

        Raises:
            TimeoutError: nothing whole was posted within the time.
        """
        deadline = time.monotonic() + timeout_seconds
        while True:
            if self._newest[0]:
                index = int(self._newest[0]) - 1
                head = self._heads[index]
                posted = Posted(int(head[1]), int(head[2]))
                np.copyto(self._copy, self._numbers[index])
                if posted.version != _NOTHING and head[0] == posted.version == head[1]:
                    return posted, self._copy
            if time.monotonic() > deadline:
                raise TimeoutError(f"waited {timeout_seconds:.0f} s for the learner to post parameters")
            time.sleep(0.001)

    def read(self, network: nn.Module, timeout_seconds: float = 60.0) -> Posted:
        """Copy the newest parameters into a network; errors as `copy`."""
        posted, numbers = self.copy(timeout_seconds)
        start = 0
        with torch.no_grad():
            for tensor in posted_tensors(network):
                part = numbers[start : start + tensor.numel()]
                tensor.copy_(torch.from_numpy(part).view(tensor.shape))
                start += tensor.numel()
        return posted

    def _open(self, version: int) -> np.ndarray:
        """The older buffer's numbers, to be written."""
        self._next = 0 if self._newest[0] == 2 else 1
        head = self._heads[self._next]
        head[0], head[1] = version, _NOTHING
        return self._numbers[self._next]

    def _commit(self, version: int, frames: int) -> None:
        head = self._heads[self._next]
        head[2] = frames
        head[1] = version
        self._newest[0] = self._next + 1
