"""Several learner ranks in step: one process group, sums over ranks, and a clear word when a rank is missing.

The rule: losses are summed over time and batch, so gradients are summed over ranks: N ranks with B unrolls each make the
update of one rank with N * B unrolls. Whatever the next update is made from (gradients, the loss, frames, value targets) is
summed over ranks before anything changes, so that all ranks decide the same from the same bits. Nothing here is pickled.
"""

import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

# When a rank fails, the others have so long to say that they live.
ROLL_CALL_SECONDS = 3.0


@dataclass(frozen=True)
class DistributedSettings:
    """Several learner ranks.

    Attributes:
        timeout_seconds: a rank that does not answer the others for so long ends the run. Longer than a checkpoint takes.
    """

    timeout_seconds: float = field(default=60.0, metadata={"min": 1})


class LostRankError(RuntimeError):
    """A rank did not answer; the message names it as far as it can be known."""


class UnequalRanksError(RuntimeError):
    """Ranks that must have the same parameters do not."""


class Ranks:
    """This process among the `size` learner ranks of a run; with size 1, everything returns at once what it was given.

    Args:
        rank, size: 0 <= rank < size.
        store: where ranks find each other: a FileStore on one machine, a TCPStore on several.
        timeout_seconds: of each collective.
        start_seconds: until all have come, at most.
        device: of the gradients; on CUDA they are summed by NCCL, everything else by gloo.

    Raises:
        LostRankError: not all ranks came.
    """

    def __init__(
        self,
        rank: int = 0,
        size: int = 1,
        store: dist.Store | None = None,
        timeout_seconds: float = 60.0,
        device: torch.device | None = None,
        start_seconds: float = 300.0,
    ) -> None:
        self.rank, self.size = rank, size
        self.seconds = 0.0  # spent in collectives: own transfers, and waiting for the others
        self._timeout, self._store = timeout_seconds, store
        if size == 1:
            return
        assert store is not None
        is_cuda = device is not None and device.type == "cuda"
        os.environ["TORCH_NCCL_BLOCKING_WAIT"] = "1"  # a time-out is an error to catch, not the end of the process
        self._wait_for_all(store, start_seconds)
        self._bounded(
            lambda: dist.init_process_group(
                "cpu:gloo,cuda:nccl" if is_cuda else "gloo",
                store=store,
                rank=rank,
                world_size=size,
                timeout=timedelta(seconds=timeout_seconds),
            )
        )

    def gather(self, data: np.ndarray) -> np.ndarray:
        """uint8 [n] of each rank, n the same on all -> uint8 [size, n] on all."""
        assert data.dtype == np.uint8 and data.ndim == 1
        if self.size == 1:
            return data[None]
        parts = [torch.empty(data.size, dtype=torch.uint8) for _ in range(self.size)]
        self._bounded(lambda: dist.all_gather(parts, torch.from_numpy(data)))
        return torch.stack(parts).numpy()

    def broadcast(self, data: bytes) -> bytes:
        """The bytes of rank 0; what other ranks give is not looked at."""
        if self.size == 1:
            return data
        count = torch.tensor([len(data)])
        self._bounded(lambda: dist.broadcast(count, 0))
        whole = torch.frombuffer(bytearray(data), dtype=torch.uint8) if self.rank == 0 and data else None
        if whole is None:
            whole = torch.empty(int(count), dtype=torch.uint8)
        if whole.numel():
            self._bounded(lambda: dist.broadcast(whole, 0))
        return whole.numpy().tobytes()

    def sum(self, *tensors: torch.Tensor) -> None:
        """Replace each contiguous tensor by its sum over ranks, the same bits on all ranks."""
        if self.size > 1:
            self._bounded(lambda: [work.wait() for work in [dist.all_reduce(one, async_op=True) for one in tensors]])

    def add_up(self, numbers: Mapping[str, torch.Tensor], parameters: Iterable[nn.Parameter]) -> Mapping[str, torch.Tensor]:
        """Sum named numbers (as float64, exact for counts) and all gradients over ranks.

        A parameter with a gradient on some rank gets the sum on all; one without on any rank keeps None. If a rank is lost,
        nothing has changed.
        """
        if self.size == 1:
            return numbers
        parameters = list(parameters)
        present = [float(p.grad is not None) for p in parameters]
        flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).detach().flatten() for p in parameters])
        values = [value.detach().cpu().double() for value in numbers.values()]
        vector = torch.cat([torch.tensor(present, dtype=torch.float64), *[value.flatten() for value in values]])
        self.sum(vector, flat)
        counts, rest = vector[: len(parameters)].tolist(), vector[len(parameters) :]
        parts = flat.split([p.numel() for p in parameters])
        for parameter, count, part in zip(parameters, counts, parts, strict=True):
            # In the parameter's own layout: torch's fused Adam walks through memory as it lies.
            parameter.grad = torch.empty_like(parameter, requires_grad=False).copy_(part.view_as(parameter)) if count else None
        summed = rest.split([value.numel() for value in values])
        return {name: part.view_as(value) for name, part, value in zip(numbers, summed, values, strict=True)}

    def check_equal(self, digest: bytes, what: str) -> None:
        """Raise UnequalRanksError if ranks have different digests (of the same length) of `what`."""
        rows = self.gather(np.frombuffer(digest, np.uint8).copy())
        different = [rank for rank, row in enumerate(rows) if row.tobytes() != rows[0].tobytes()]
        if different:
            raise UnequalRanksError(
                f"learner rank {', '.join(map(str, different))} has another {what} than rank 0: ranks need the same "
                "code, the same torch and the same kind of processor; continue from the checkpoint before with --resume"
            )

    def close(self) -> None:
        """Leave the group: whoever waits for this rank learns it at once."""
        if self.size > 1 and dist.is_initialized():
            dist.destroy_process_group()

    def _wait_for_all(self, store: dist.Store, seconds: float) -> None:
        """gloo itself gives up on whoever comes later than one collective may take."""
        keys = [f"here/{rank}" for rank in range(self.size)]
        store.set(keys[self.rank], "1")
        try:
            store.wait(keys, timedelta(seconds=seconds))
        except RuntimeError as error:
            late = ", ".join(str(rank) for rank, key in enumerate(keys) if not store.check([key]))
            raise LostRankError(f"learner rank {late} did not come within {seconds:.0f} s") from error

    def _bounded(self, call: Callable[[], Any]) -> None:
        began = time.monotonic()
        try:
            call()
        except RuntimeError as error:  # torch's DistBackendError is one, too
            self.close()
            missing = self._missing()
            who = f"learner rank {', '.join(map(str, missing))}" if missing else "a learner rank"
            raise LostRankError(f"{who} is gone or did not answer for {self._timeout:.0f} s: {error}") from error
        finally:
            self.seconds += time.monotonic() - began

    def _missing(self) -> list[int]:
        """Ranks that do not say in the store that they live; rank 0, which has the store, if that does not answer."""
        found: list[list[int]] = [[0]]
        thread = threading.Thread(target=self._call_roll, args=(found,), daemon=True)  # a cut network may never answer
        thread.start()
        thread.join(2 * ROLL_CALL_SECONDS)
        return found[-1]

    def _call_roll(self, found: list[list[int]]) -> None:
        assert self._store is not None
        try:
            self._store.set(f"lives/{self.rank}", "1")
            deadline = time.monotonic() + ROLL_CALL_SECONDS
            while found[-1] and time.monotonic() < deadline:
                found.append([rank for rank in range(self.size) if not self._store.check([f"lives/{rank}"])])
                time.sleep(0.05)
        except RuntimeError:
            return
