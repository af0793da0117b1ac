"""RMSProp: epsilon inside and outside the root by value, torch's own optimiser as the oracle, absent gradients."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from agent.optimisers import RMSProp

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(("inside", "expected"), [(True, 0.03162), (False, 0.09901)])
def test_first_step_by_value(inside: bool, expected: float) -> None:
    """g = 0.01, decay 0.99, epsilon 0.1, lr 1: g / sqrt(0.01 g^2 + 0.1) inside, g / (sqrt(0.01 g^2) + 0.1) outside."""
    by_hand = 0.01 / np.sqrt(0.01 * 0.01**2 + 0.1) if inside else 0.01 / (np.sqrt(0.01 * 0.01**2) + 0.1)
    assert by_hand == pytest.approx(expected, abs=5e-6)
    parameter = torch.nn.Parameter(torch.zeros(3))
    parameter.grad = torch.tensor([0.01, -0.01, 0.0])
    RMSProp([parameter], lr=1.0, decay=0.99, epsilon=0.1, epsilon_inside=inside).step()
    np.testing.assert_allclose(parameter.detach().numpy(), [-by_hand, by_hand, 0.0], rtol=1e-5)


def test_inside_is_the_default() -> None:
    parameter = torch.nn.Parameter(torch.zeros(1))
    parameter.grad = torch.tensor([0.01])
    RMSProp([parameter], lr=1.0, decay=0.99, epsilon=0.1).step()
    assert parameter.item() == pytest.approx(-0.03162, abs=1e-5)


@pytest.mark.parametrize("initial_square", [0.0, 1.0])
def test_inside_equals_the_formula_over_several_steps(initial_square: float) -> None:
    rng = np.random.default_rng(0)
    value, square = rng.normal(size=4), np.full(4, initial_square)
    parameter = torch.nn.Parameter(torch.from_numpy(value.copy()))
    optimiser = RMSProp([parameter], lr=0.1, decay=0.9, epsilon=0.01, initial_square=initial_square)
    for step in range(6):
        gradient = rng.normal(size=4)
        parameter.grad = torch.from_numpy(gradient.copy())
        optimiser.param_groups[0]["lr"] = rate = 0.1 / (step + 1)
        optimiser.step()
        square = 0.9 * square + 0.1 * gradient**2
        value = value - rate * gradient / np.sqrt(square + 0.01)
        np.testing.assert_allclose(parameter.detach().numpy(), value, rtol=1e-12)


def test_outside_equals_torch() -> None:
    rng = np.random.default_rng(1)
    start = torch.from_numpy(rng.normal(size=(3, 2)))
    ours, theirs = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.clone())
    mine = RMSProp([ours], lr=0.05, decay=0.95, epsilon=0.1, epsilon_inside=False)
    oracle = torch.optim.RMSprop([theirs], lr=0.05, alpha=0.95, eps=0.1)
    for _ in range(8):
        ours.grad = torch.from_numpy(rng.normal(size=(3, 2)))
        theirs.grad = ours.grad.clone()
        mine.step()
        oracle.step()
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_an_absent_gradient_leaves_parameter_and_state_as_they_are() -> None:
    """The head of a task that is not in the batch: a zero gradient would shrink its mean square, and later enlarge its step."""
    present, absent = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2))
    optimiser = RMSProp([present, absent], lr=0.1, decay=0.9, epsilon=0.01)
    for parameter in (present, absent):
        parameter.grad = torch.ones(2)
    optimiser.step()
    square, value = optimiser.state[absent]["square"].clone(), absent.detach().clone()
    absent.grad, present.grad = None, torch.ones(2)
    moved = present.detach().clone()
    optimiser.step()
    assert torch.equal(absent, value) and torch.equal(optimiser.state[absent]["square"], square)
    assert not torch.equal(present, moved)


def test_no_state_before_the_first_gradient() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    optimiser = RMSProp([parameter], lr=0.1, decay=0.9, epsilon=0.01)
    optimiser.step()
    assert parameter not in optimiser.state and torch.equal(parameter.detach(), torch.ones(2))


def test_torchs_compiler_is_not_loaded() -> None:
    """It would cost every start of a learner more than a second."""
    code = (
        "import sys, torch; from agent.optimisers import RMSProp; p = torch.nn.Parameter(torch.ones(2)); p.sum().backward(); "
        "o = RMSProp([p], lr=0.1, decay=0.9, epsilon=0.1); o.step(); o.zero_grad(); print('torch._dynamo' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout == "False\n"
