"""The core's two ways, step by step and packed, give the same numbers and gradients for any pattern of resets."""

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis.extra.numpy import array_shapes, arrays

import agent_reference as reference
from agent.core import Core, cut
from agent.network import Network

resets = arrays(np.bool_, array_shapes(min_dims=2, max_dims=2, max_side=6))


def run(core: Core, way: str, first: np.ndarray, dtype: torch.dtype) -> list[torch.Tensor]:
    """Outputs, state, and gradients of features, state and parameters; the weights of the sum make every row count."""
    rng = torch.Generator().manual_seed(0)
    rows, columns = first.shape
    features = torch.randn(rows, columns, core.input.in_features, generator=rng, dtype=dtype, requires_grad=True)
    state = torch.randn(columns, 2, core.recurrent.in_features, generator=rng, dtype=dtype, requires_grad=True)
    if way == "packed":
        outputs, after = core.packed(features, first, state)
    else:
        outputs, after = core.loop(features, torch.from_numpy(first), state)
    weights = torch.randn(outputs.shape, generator=rng, dtype=dtype)
    total = (outputs * weights).sum() + (after * after).sum()
    return [outputs, after, *torch.autograd.grad(total, [features, state, *core.parameters()])]


def make_core(dtype: torch.dtype) -> Core:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Core(5, 4).to(dtype)


@settings(deadline=None, max_examples=25)
@given(first=resets)
@example(first=np.array([[True, False], [False, False], [False, True]]))
@example(first=np.ones((3, 2), bool))
def test_packed_equals_the_loop(first: np.ndarray) -> None:
    """The stored state goes into a column whose row 0 is no first; also resets on row 0, on the last row, and everywhere."""
    for found, expected in zip(
        *(run(make_core(torch.float64), way, first, torch.float64) for way in ("packed", "loop")), strict=True
    ):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


def test_packed_equals_the_loop_in_float32() -> None:
    first = np.random.default_rng(0).random((50, 16)) < 0.05
    core = make_core(torch.float32)
    for found, expected in zip(*(run(core, way, first, torch.float32) for way in ("packed", "loop")), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5 * float(expected.detach().abs().max()))


@settings(deadline=None, max_examples=50)
@given(first=resets)
def test_pieces_cover_every_row_once(first: np.ndarray) -> None:
    pieces = cut(first)
    assert sorted(pieces.order.tolist()) == list(range(first.size))
    assert pieces.sizes.sum() == first.size and (np.diff(pieces.sizes) <= 0).all()
    assert pieces.columns[pieces.last].tolist() == list(range(first.shape[1]))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no GPU, on which the packed way runs")
def test_on_a_gpu_the_network_gives_the_numbers_of_the_cpu() -> None:
    spec = reference.small_spec({"a": 2, "b": 3})
    arrays_ = reference.random_batch(np.random.default_rng(0), spec, 20, 8)
    batch, tasks = reference.tensors(arrays_), arrays_["task"].tolist()
    network: Network = reference.make_network(spec)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    results = []
    for device in ("cpu", "cuda"):
        network.to(device)
        there = {name: tensor.to(device) for name, tensor in batch.items()}
        output = network(there, there["core_state"], tasks, arrays_["first"])
        gradients = torch.autograd.grad(
            output.logits.square().mean() + output.values.square().mean(), list(network.core.parameters())
        )
        results.append([each.cpu() for each in (*output, *gradients)])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
