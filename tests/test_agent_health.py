"""Live units, parts of the gradient and lengths of steps, each against a network where they are known."""

import numpy as np
import pytest
import torch

import agent_reference as reference
from agent.health import Health, dying, gradient_parts, live_units
from agent.learner import Learner
from agent.losses import LossSettings
from agent.optimisers import OptimiserSettings

SPEC = reference.small_spec({"a": 3}, (12, 12, 1), "uint8", torso="small", hidden_size=10)
TASKS = [0] * 4


def scene(seed: int = 0):
    return reference.make_network(SPEC, seed), reference.tensors(
        reference.random_batch(np.random.default_rng(seed), SPEC, 5, 4)
    )


def make(network, **loss) -> Learner:
    return Learner(network, LossSettings(reward_transform="none", **loss), OptimiserSettings(learning_rate=0.1), 10**6)


def test_live_units_by_layer() -> None:
    """A bias so low that no frame lifts the unit above 0 kills it, one so high makes it live."""
    network, batch = scene()
    layers = network.torso.layers
    with torch.no_grad():
        layers[0].bias[:] = 1e3
        layers[0].bias[:5] = -1e6
        layers[2].bias[:] = 1e7
        layers[2].bias[3] = -1e9
        network.torso.output.bias[:] = 1e12
        network.torso.output.bias[:4] = -1e15
    assert live_units(network, batch, TASKS) == {"convolution_1": (11, 16), "convolution_2": (31, 32), "hidden": (6, 10)}


def test_a_unit_lives_if_any_row_of_any_unroll_moves_it() -> None:
    network, batch = scene()
    expected = (network.torso(batch["frame"].flatten(0, 1)) > 0).any(0).sum()
    assert live_units(network, batch, TASKS)["hidden"] == (int(expected), 10)


def test_parts_of_the_gradient_follow_their_costs() -> None:
    network, batch = scene()
    found = gradient_parts(make(network), batch, TASKS)
    assert found["policy"] > 0 and found["value"] > 0
    dear = gradient_parts(make(network, baseline_cost=5.0), batch, TASKS)
    assert dear["value"] == pytest.approx(10 * found["value"], rel=1e-4) and dear["policy"] == pytest.approx(found["policy"])
    none = gradient_parts(make(network, baseline_cost=0.0), batch, TASKS)
    assert none["value"] == 0


def test_measuring_changes_nothing_and_the_step_is_what_the_update_did() -> None:
    network, batch = scene()
    learner = make(network)
    health = Health(learner)
    before = {name: p.detach().clone() for name, p in network.named_parameters()}
    found = health.before(batch, TASKS)
    for name, parameter in network.named_parameters():
        assert torch.equal(parameter, before[name]) and parameter.grad is None
    assert found["value_gradient_share"] == pytest.approx(
        found["value_gradient_norm"] / (found["value_gradient_norm"] + found["policy_gradient_norm"])
    )
    learner.update(batch, TASKS)
    steps = health.after()
    assert set(steps) == {"torso.layers.0", "torso.layers.2", "torso.output", "core.input", "core.recurrent"}
    after = dict(network.named_parameters())
    for name, step in steps.items():
        old, new = before[f"{name}.weight"].double(), after[f"{name}.weight"].detach().double()
        assert step == pytest.approx(float((new - old).norm() / old.norm()), rel=1e-3) and step > 0


def test_it_warns_when_units_have_died_and_only_then() -> None:
    network, batch = scene()
    learner = make(network)
    health = Health(learner)
    with torch.no_grad():
        network.torso.output.bias[:] = 1e3
    assert "warning" not in health.before(batch, TASKS)
    learner.counters.updates = 1
    with torch.no_grad():
        network.torso.output.bias[:3] = -1e6
    assert "warning" not in health.before(batch, TASKS), "7 of 10"
    with torch.no_grad():
        network.torso.output.bias[3] = -1e6
    warning = health.before(batch, TASKS)["warning"]
    assert "10 of 10 of layer hidden were alive at the start, now 6" in warning


def test_nothing_is_dying_without_a_start_to_compare_with() -> None:
    assert dying({}, {"hidden": (1, 256)}) == ""
