"""Actor and learner compute the same policy: over resets and unroll joins, for all toy tasks at once, at every version."""

import itertools
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

import agent_reference as reference
from agent.actor import Actor, HalfGroup, Member
from agent.inference import LocalPolicy
from agent.network import Network, NetworkSettings, NetworkSpec
from agent.unroll import UnrollSpec
from tasks.environment import EnvironmentSettings, make_vector_env, suite_spaces
from tasks.registry import load_suite

SUITE, SETTINGS, LENGTH = load_suite("toy"), EnvironmentSettings(instruction_length=3), 7


def make(network: Network, spec: UnrollSpec) -> list[HalfGroup]:
    """Both halves play all four tasks, one and two environments each."""
    halves, offset = [], 0
    for half, count in enumerate((1, 2)):
        members = [
            Member(index, make_vector_env(SUITE, task, count, SETTINGS, [10 * half + 3 * index + e for e in range(count)]))
            for index, task in enumerate(SUITE.tasks)
        ]
        halves.append(
            HalfGroup(members, partial(LocalPolicy, network), network.task_names, spec, 0, offset, np.random.default_rng(half))
        )
        offset += halves[-1].num_envs
    return halves


def toy_network() -> tuple[Network, UnrollSpec]:
    spaces = suite_spaces(SUITE, SETTINGS)
    settings = NetworkSettings(torso="small", hidden_size=16, core_size=12, instruction_embedding=4, instruction_size=5)
    legal = dict(zip(SUITE.task_names, spaces.num_actions, strict=True))
    words = spaces.instruction_length
    spec = NetworkSpec(settings, spaces.frame_shape, spaces.frame_dtype, words, max(legal.values()), legal)
    network = reference.make_network(spec, 3)
    with torch.no_grad():  # far from uniform, or a wrong head would hardly show
        for name, parameter in network.named_parameters():
            if "heads" in name or name.startswith("core"):
                parameter.mul_(4)
    return network, reference.unroll_spec(spec, LENGTH)


@pytest.mark.parametrize("learning", [False, True], ids=["fixed parameters", "new parameters every round"])
def test_log_probabilities_agree_at_every_row(learning: bool) -> None:
    network, spec = toy_network()
    versions: list[dict[str, torch.Tensor]] = []
    generator = torch.Generator().manual_seed(0)

    def pull() -> int:
        if learning and versions:
            with torch.no_grad():
                for parameter in network.parameters():
                    parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
        versions.append({name: value.clone() for name, value in network.state_dict().items()})
        return len(versions) - 1

    actor = Actor(make(network, spec), pull, lambda n: None, lambda: None)
    learner, _ = toy_network()
    ends = joins_with_state = 0
    carried: dict[int, Any] = {}
    for rows, column in itertools.islice(actor.unrolls(), 12 * 8):
        unroll = spec.empty(1)
        flat = spec.views(np.zeros(spec.unroll_bytes(), np.uint8))
        spec.copy_out(flat, rows, column)
        spec.copy_in(unroll, 0, flat)
        learner.load_state_dict(versions[int(unroll["version"][0])])
        batch = reference.tensors(unroll)
        with torch.no_grad():
            output = learner(batch, batch["core_state"], [int(unroll["task"][0])])
            before_last = learner({name: batch[name][:LENGTH] for name in batch}, batch["core_state"], [int(unroll["task"][0])])
        log_probs = torch.log_softmax(output.logits, -1).numpy()
        # Row T was acted on with the parameters of the next version: it is row 0 of the next unroll.
        last = LENGTH if learning else LENGTH + 1
        np.testing.assert_allclose(log_probs[:last], unroll["log_probs"][:last], atol=1e-5)
        environment = int(unroll["environment"][0])
        if environment in carried:
            torch.testing.assert_close(batch["core_state"], carried[environment], rtol=0, atol=1e-5)
            joins_with_state += int((batch["core_state"] != 0).any())
        else:
            assert (batch["core_state"] == 0).all() and unroll["first"][0].all()
        carried[environment] = before_last.core_state  # the state before row T
        ends += int(unroll["first"][1:].sum())
        assert (unroll["log_probs"].std(-1) > 0.1).any(), "a uniform policy would prove nothing"
    assert ends > 50 and joins_with_state > 50
    assert len(versions) >= 8
