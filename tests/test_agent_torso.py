"""Torsos: shapes and parameters as published, channels-last frames against a plain NCHW reference."""

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from agent.torso import Residual, Torso, make_torso


def frames(shape: tuple[int, int, int], dtype: str, count: int = 3) -> torch.Tensor:
    rng = np.random.default_rng(0)
    if dtype == "uint8":
        return torch.from_numpy(rng.integers(256, size=(count, *shape), dtype=np.uint8))
    return torch.from_numpy(rng.normal(size=(count, *shape)).astype(np.float32))


def plain(torso: Torso, kind: str, x: torch.Tensor) -> torch.Tensor:
    """The published architecture, written again in NCHW with functional calls, over the torso's parameters in order."""
    parameters = iter(dict(torso.named_parameters()).values())

    def conv(x: torch.Tensor, stride: int, padding: int) -> torch.Tensor:
        weight, bias = next(parameters), next(parameters)
        return F.conv2d(x, weight.contiguous(), bias, stride, padding)

    if kind == "shallow":
        x = F.relu(conv(F.relu(conv(x, 4, 0)), 2, 0))
    elif kind == "small":
        x = F.relu(conv(F.relu(conv(x, 2, 0)), 2, 0))
    elif kind == "deep":
        for _ in range(3):
            x = F.max_pool2d(conv(x, 1, 1), 3, 2, 1)
            for _ in range(2):
                x = x + conv(F.relu(conv(F.relu(x), 1, 1)), 1, 1)
        x = F.relu(x)
    weight, bias = next(parameters), next(parameters)
    assert next(parameters, None) is None
    return F.relu(F.linear(x.flatten(1), weight, bias))


@pytest.mark.parametrize("dtype", ["uint8", "float32"])
@pytest.mark.parametrize(
    ("kind", "shape"),
    [("shallow", (84, 84, 4)), ("shallow", (72, 96, 3)), ("deep", (72, 96, 3)), ("small", (20, 20, 1)), ("mlp", (5, 3, 2))],
)
def test_equals_a_plain_reference(kind: str, shape: tuple[int, int, int], dtype: str) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        torso = make_torso(kind, shape, dtype, 16)
    x = frames(shape, dtype)
    scaled = x.permute(0, 3, 1, 2).contiguous().float() / (255 if dtype == "uint8" else 1)
    found = torso(x)
    assert found.shape == (3, 16) and (found > 0).any()
    torch.testing.assert_close(found, plain(torso, kind, scaled), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "weights"),
    [
        ("shallow", [(16, 4, 8, 8), (32, 16, 4, 4)]),
        ("deep", [(16, 4, 3, 3), *[(16, 16, 3, 3)] * 4, (32, 16, 3, 3), *[(32, 32, 3, 3)] * 9]),
        ("small", [(16, 4, 4, 4), (32, 16, 3, 3)]),
        ("mlp", []),
    ],
)
def test_convolutions_as_published(kind: str, weights: list[Any]) -> None:
    """Figure 3 of arXiv:1802.01561. Flat features of 84 x 84: shallow 32 * 9 * 9, deep 32 * 11 * 11."""
    torso = make_torso(kind, (84, 84, 4), "uint8", 256)
    assert [tuple(m.weight.shape) for m in torso.modules() if isinstance(m, nn.Conv2d)] == weights
    flat = {"shallow": 32 * 9 * 9, "deep": 32 * 11 * 11, "small": 32 * 20 * 20, "mlp": 84 * 84 * 4}
    assert tuple(torso.output.weight.shape) == (256, flat[kind])


@pytest.mark.parametrize(
    ("shape", "same_as"), [((84, 84, 4), "shallow"), ((36, 90, 1), "shallow"), ((20, 20, 1), "small"), ((5, 1, 1), "mlp")]
)
def test_auto_chooses_by_size(shape: tuple[int, int, int], same_as: str) -> None:
    chosen, expected = (make_torso(kind, shape, "uint8", 4).state_dict() for kind in ("auto", same_as))
    assert {k: v.shape for k, v in chosen.items()} == {k: v.shape for k, v in expected.items()}


def test_residual_keeps_the_identity() -> None:
    block = Residual(4)
    with torch.no_grad():
        block.second.weight.zero_()
        assert block.second.bias is not None
        block.second.bias.zero_()
    x = torch.randn(2, 4, 5, 5, generator=torch.Generator().manual_seed(0))
    assert torch.equal(block(x), x)


def test_what_does_not_fit_is_named() -> None:
    with pytest.raises(ValueError, match=r"network\.torso=big is unknown: use one of auto, shallow"):
        make_torso("big", (84, 84, 4), "uint8", 16)
    with pytest.raises(ValueError, match=r"network\.torso=shallow cannot read frames of 5x5"):
        make_torso("shallow", (5, 5, 1), "uint8", 16)


@pytest.mark.parametrize("kind", ["shallow", "deep"])
def test_weights_start_as_in_the_published_code(kind: str) -> None:
    """A normal of deviation 1 / sqrt(fan-in) cut at two deviations has 0.8796 of it; torch's own default has 0.577."""
    torch.manual_seed(0)
    for name, parameter in make_torso(kind, (84, 84, 4), "uint8", 256).named_parameters():
        if name.endswith("bias"):
            assert (parameter == 0).all()
        elif parameter.numel() > 2000:
            deviation = parameter[0].numel() ** -0.5
            assert parameter.std().item() == pytest.approx(0.8796 * deviation, rel=0.05), name
            assert parameter.abs().max() <= 2 * deviation
