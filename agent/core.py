"""The core LSTM with resets: step by step in a loop, or as one call of the library's LSTM over the pieces between resets."""

from typing import NamedTuple

import numpy as np
import torch
from torch import nn


class Core(nn.Module):
    """LSTM whose state is zeroed before every row that is `first`. Gates as in torch.nn.LSTM: i, f, g, o.

    Two ways to the same numbers. A loop over rows costs a dozen small kernels per row, which on a GPU take longer to launch
    than to run: there, several rows are packed into one call. One row, and the CPU, take the loop.
    """

    def __init__(self, num_features: int, core_size: int) -> None:
        super().__init__()
        self.input = nn.Linear(num_features, 4 * core_size)
        self.recurrent = nn.Linear(core_size, 4 * core_size, bias=False)
        bound = core_size**-0.5
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -bound, bound)
        with torch.no_grad():  # the forget gate starts open
            self.input.bias[core_size : 2 * core_size].fill_(1.0)

    def forward(
        self, features: torch.Tensor, first: torch.Tensor, state: torch.Tensor, host_first: np.ndarray | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """features [T, B, F], first bool [T, B], state [B, 2, K] -> (outputs [T, B, K], state [B, 2, K]).

        host_first: `first` in host memory; without it a GPU is waited for.
        """
        if features.is_cuda and len(features) > 1:
            return self.packed(features, first.cpu().numpy() if host_first is None else host_first, state)
        return self.loop(features, first, state)

    def loop(self, features: torch.Tensor, first: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """As `forward`. The input projection is computed for all rows at once."""
        keep = (~first).to(features.dtype)[..., None].unbind()
        weight = self.recurrent.weight.t()
        h, c = state.unbind(1)
        outputs = []
        for projected, kept in zip(self.input(features).unbind(), keep, strict=True):
            gates = torch.addmm(projected, h * kept, weight)
            i, f, g, o = gates.chunk(4, 1)
            c = torch.addcmul(i.sigmoid() * g.tanh(), f.sigmoid(), c * kept)
            h = o.sigmoid() * c.tanh()
            outputs.append(h)
        return torch.stack(outputs), torch.stack([h, c], 1)

    def packed(self, features: torch.Tensor, first: np.ndarray, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """As `forward`, with `first` in host memory."""
        pieces = cut(first)
        device = features.device
        order, columns, last = (_to(index, device) for index in (pieces.order, pieces.columns, pieces.last))
        begin = state.index_select(0, columns) * _to(pieces.kept, device).to(state.dtype)[:, None, None]  # [n, 2, K]
        h, c = (part[None].contiguous() for part in begin.unbind(1))
        # A second bias, which the library wants; it is no parameter of ours.
        weights = [self.input.weight, self.recurrent.weight, self.input.bias, torch.zeros_like(self.input.bias)]
        rows = features.flatten(0, 1).index_select(0, order)
        sizes, train = torch.from_numpy(pieces.sizes), torch.is_grad_enabled()
        found, h, c = torch.lstm(rows, sizes, (h, c), weights, True, 1, 0.0, train, False)
        outputs = torch.empty_like(found).index_copy(0, order, found)
        return outputs.view(*first.shape, -1), torch.cat([h, c]).index_select(1, last).transpose(0, 1)


class NoCore(nn.Module):
    """A network without memory: features go to the heads as they are, and the state is empty, [B, 2, 0]."""

    def forward(
        self, features: torch.Tensor, first: torch.Tensor, state: torch.Tensor, host_first: np.ndarray | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As Core."""
        return features, state


class Pieces(NamedTuple):
    """How rows [T, B] fall into n pieces between resets, the longest first, as torch.nn.utils.rnn.PackedSequence wants them.

    order: int64 [T * B], flat indices t * B + b: the first rows of all pieces, then the second of those that have one, ...
    sizes: int64 [longest], pieces that have a k-th row. columns: int64 [n], b of each piece. kept: bool [n], begins with the
    state that its column came with, all others with zeros. last: int64 [B], the piece that ends a column.
    """

    order: np.ndarray
    sizes: np.ndarray
    columns: np.ndarray
    kept: np.ndarray
    last: np.ndarray


def cut(first: np.ndarray) -> Pieces:
    """bool [T, B]: rows before which the state is zeroed."""
    num_rows, num_columns = first.shape
    begins = first.copy()
    begins[0] = True
    columns, starts = np.nonzero(begins.T)  # column by column, in time
    ends = np.append(np.where(columns[1:] == columns[:-1], starts[1:], num_rows), num_rows)
    lengths = ends - starts
    longest_first = np.argsort(-lengths, kind="stable")
    columns, starts, lengths, ends = (each[longest_first] for each in (columns, starts, lengths, ends))
    steps = np.arange(lengths[0])[:, None]
    alive = steps < lengths
    last = np.empty(num_columns, np.int64)
    closing = np.flatnonzero(ends == num_rows)
    last[columns[closing]] = closing
    return Pieces(
        order=((starts + steps) * num_columns + columns)[alive],
        sizes=alive.sum(1),
        columns=columns,
        kept=(starts == 0) & ~first[0, columns],
        last=last,
    )


def _to(index: np.ndarray, device: torch.device) -> torch.Tensor:
    # From pageable memory the driver keeps a copy of its own before it returns: nothing to wait for.
    return torch.from_numpy(index).to(device, non_blocking=True)
