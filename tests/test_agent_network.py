"""Network: resets, joins, heads by name, last action and reward, instructions, shapes. Torsos have a file of their own."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import agent_reference as reference
from agent.network import Network, NetworkSpec
from agent.unroll import Batch

SPEC = reference.small_spec({"a": 2, "b": 3, "c": 4}, instruction_length=4)


def scene(seed: int, length: int, columns: int, spec: NetworkSpec = SPEC) -> tuple[Network, Batch, list[int]]:
    batch = reference.random_batch(np.random.default_rng(seed), spec, length, columns)
    return reference.make_network(spec, seed).double(), reference.tensors(batch), batch["task"].tolist()


def evaluate(network: Network, batch: Batch, tasks: list[int], rows: slice = slice(None), state: Any = None) -> Any:
    part = {name: batch[name][rows] for name in ("frame", "reward", "last_action", "first", "instruction") if name in batch}
    return network(part, batch["core_state"].double() if state is None else state, tasks)


@settings(deadline=None, max_examples=15)
@given(seed=st.integers(0, 2**32 - 1), cut=st.integers(1, 6))
def test_a_reset_in_mid_unroll_is_two_unrolls(seed: int, cut: int) -> None:
    """From the first row of an episode on, nothing depends on what was before, nor on the state carried into it."""
    network, batch, tasks = scene(seed, 6, 3)
    batch["first"][cut] = True
    whole = evaluate(network, batch, tasks)
    left = evaluate(network, batch, tasks, slice(None, cut))
    right = evaluate(network, batch, tasks, slice(cut, None), state=network.initial_state(3))
    torch.testing.assert_close(whole.logits, torch.cat([left.logits, right.logits]))
    torch.testing.assert_close(whole.values, torch.cat([left.values, right.values]))
    torch.testing.assert_close(whole.core_state, right.core_state)


@settings(deadline=None, max_examples=15)
@given(seed=st.integers(0, 2**32 - 1), cut=st.integers(1, 6))
def test_two_pieces_with_carried_state_are_one_unroll(seed: int, cut: int) -> None:
    network, batch, tasks = scene(seed, 6, 3)
    whole = evaluate(network, batch, tasks)
    left = evaluate(network, batch, tasks, slice(None, cut))
    right = evaluate(network, batch, tasks, slice(cut, None), state=left.core_state)
    torch.testing.assert_close(whole.logits, torch.cat([left.logits, right.logits]))
    torch.testing.assert_close(whole.values, torch.cat([left.values, right.values]))
    torch.testing.assert_close(whole.core_state, right.core_state)


def test_the_state_before_row_0_counts_unless_row_0_is_first() -> None:
    network, batch, tasks = scene(1, 0, 2)
    batch["first"][0] = torch.tensor([False, True])
    here = evaluate(network, batch, tasks).values
    zeroed = evaluate(network, batch, tasks, state=network.initial_state(2)).values
    assert here[0, 0] != zeroed[0, 0] and here[0, 1] == zeroed[0, 1]


def test_core_equals_torch_lstm() -> None:
    """Without resets the core is torch.nn.LSTM (gates i, f, g, o)."""
    network, _, _ = scene(2, 0, 1)
    core: Any = network.core
    size, num_features = SPEC.settings.core_size, core.input.in_features
    oracle: Any = torch.nn.LSTM(num_features, size).double()
    with torch.no_grad():
        oracle.weight_ih_l0.copy_(core.input.weight)
        oracle.bias_ih_l0.copy_(core.input.bias)
        oracle.weight_hh_l0.copy_(core.recurrent.weight)
        oracle.bias_hh_l0.zero_()
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(5, 3, num_features, generator=generator, dtype=torch.float64)
    state = torch.randn(3, 2, size, generator=generator, dtype=torch.float64)
    found, after = core(features, torch.zeros(5, 3, dtype=torch.bool), state)
    h, c = (part[None].contiguous() for part in state.unbind(1))
    expected, (h, c) = oracle(features, (h, c))
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(after, torch.stack([h[0], c[0]], 1))


@pytest.mark.parametrize("heads", ["per_task", "shared"])
def test_heads_are_bound_by_name(heads: str) -> None:
    """Two networks with the same state dict, one with its tasks reordered and cut: the same outputs for the same names."""
    names = {"a": 2, "b": 3, "c": 4}
    spec = reference.small_spec(names, policy_head=heads, value_head=heads)
    network, batch, _ = scene(3, 4, 3, spec)
    other = Network(reference.small_spec({"c": 4, "a": 2}, policy_head=heads, value_head=heads)).double()
    known = set(dict(other.named_parameters()))
    other.load_state_dict({name: value for name, value in network.state_dict().items() if name in known})
    found = evaluate(other, batch, [0, 1, 0])
    expected = evaluate(network, batch, [2, 0, 2])
    torch.testing.assert_close(found, expected)


def test_each_column_uses_its_own_head() -> None:
    network, batch, _ = scene(4, 4, 3)
    together = evaluate(network, batch, [0, 1, 2])
    for task in range(3):
        alone = evaluate(network, batch, [task] * 3)
        torch.testing.assert_close(together.logits[:, task], alone.logits[:, task])
        torch.testing.assert_close(together.values[:, task], alone.values[:, task])
    assert not torch.equal(evaluate(network, batch, [0] * 3).values, evaluate(network, batch, [1] * 3).values)


@pytest.mark.parametrize("tasks", [[0, 0, 2], [0, 0, 0]])
def test_heads_of_absent_tasks_have_no_gradient_at_all(tasks: list[int]) -> None:
    network, batch, _ = scene(5, 4, 3)
    output = evaluate(network, batch, tasks)
    (output.logits.clamp(min=-100).sum() + output.values.sum()).backward()
    for task, name in enumerate(network.task_names):
        for kind in ("policy_heads", "value_heads"):
            for key, parameter in network.named_parameters():
                if key.startswith(f"{kind}.task_{name}."):
                    assert (parameter.grad is not None) == (task in tasks), key
    heads = [key for key, _ in network.named_parameters() if "heads" in key]
    assert len(heads) == 3 * 2 * 2  # three tasks, two kinds, weight and bias


def test_shared_heads_are_one_head_with_legal_actions_per_task() -> None:
    spec = reference.small_spec({"a": 2, "b": 3}, policy_head="shared", value_head="shared")
    network, batch, _ = scene(6, 3, 2, spec)
    assert sorted(name for name, _ in network.named_parameters() if "heads" in name) == [
        "policy_heads.shared.bias",
        "policy_heads.shared.weight",
        "value_heads.shared.bias",
        "value_heads.shared.weight",
    ]
    as_a, as_b = evaluate(network, batch, [0, 0]), evaluate(network, batch, [1, 1])
    torch.testing.assert_close(as_a.values, as_b.values)
    torch.testing.assert_close(as_a.logits[..., :2], as_b.logits[..., :2])
    assert (torch.softmax(as_a.logits, -1)[..., 2] == 0).all() and (torch.softmax(as_b.logits, -1)[..., 2] > 0).all()


@pytest.mark.parametrize("name", ["keys", "café", "shared", "training", "pop", "weight", "forward", "a b", "0"])
def test_any_task_name_works(name: str) -> None:
    """Also names of ModuleDict's methods, and "shared", which is not the shared head."""
    spec = reference.small_spec({name: 2, "other": 3})
    network, batch, _ = scene(7, 2, 2, spec)
    twin = reference.make_network(NetworkSpec.from_dict(spec.to_dict()), 8).double()
    twin.load_state_dict(network.state_dict())
    torch.testing.assert_close(evaluate(twin, batch, [0, 1]), evaluate(network, batch, [0, 1]))
    assert torch.equal(evaluate(network, batch, [0, 1]).logits[..., 2] < -1e8, torch.tensor([True, False]).expand(3, 2))


@pytest.mark.parametrize(("legal", "message"), [({"a": 2, "empty": 0}, "task empty has 0"), ({"many": 9}, "task many has 9")])
def test_a_task_without_a_legal_action_is_an_error_that_names_it(legal: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Network(reference.small_spec(legal, num_actions=4))


def test_no_tasks() -> None:
    spec = reference.small_spec()
    with pytest.raises(ValueError, match="no tasks"):
        Network(NetworkSpec(spec.settings, spec.frame_shape, spec.frame_dtype, 0, 3, {}))


def features_of(network: Network, batch: Batch, tasks: list[int]) -> torch.Tensor:
    """What the core reads, [T, B, F]."""
    found: list[torch.Tensor] = []
    handle = network.core.register_forward_hook(lambda module, inputs, output: found.append(inputs[0]))
    evaluate(network, batch, tasks)
    handle.remove()
    return found[0]


def test_no_action_yet_is_not_action_0() -> None:
    """Input layout of the recipe: frame ++ clipped last reward ++ one-hot last action; -1 is all zeros."""
    spec = reference.small_spec({"a": 3})
    network, batch, _ = scene(8, 3, 1, spec)
    batch["last_action"][:, 0] = torch.tensor([-1, 0, 1, 2])
    start = spec.settings.hidden_size + 1
    one_hot = features_of(network, batch, [0])[:, 0, start : start + 3]
    assert one_hot.tolist() == [[0, 0, 0], [1, 0, 0], [0, 1, 0], [0, 0, 1]]


def test_the_last_reward_is_clipped_on_the_input_only() -> None:
    spec = reference.small_spec({"a": 3})
    network, batch, _ = scene(9, 4, 1, spec)
    raw = torch.tensor([-300.0, -0.5, 0.0, 0.7, 200.0])
    batch["reward"][:, 0] = raw
    found = features_of(network, batch, [0])[:, 0, spec.settings.hidden_size]
    assert found.tolist() == pytest.approx([-1.0, -0.5, 0.0, 0.7, 1.0])
    assert torch.equal(batch["reward"][:, 0], raw), "the learner's rewards stay raw"


def test_instructions_of_any_length_are_finite_and_padding_changes_nothing() -> None:
    """The same words in a longer field give the same vector; an empty text gives zeros, whatever is beside it."""
    encoder = reference.make_network(SPEC, 10).instruction
    assert encoder is not None
    words = torch.tensor([[5, 9, 0, 0], [0, 0, 0, 0], [5, 9, 7, 1], [1000, 0, 0, 0], [5, 9, 0, 0]])
    found = encoder(words)
    assert found.isfinite().all() and (found[1] == 0).all() and (found[0] != 0).any()
    assert torch.equal(found[0], found[4]), "equal texts, equal vectors"
    assert not torch.equal(found[0], found[2])
    longer = torch.cat([words, torch.zeros(5, 3, dtype=torch.long)], 1)
    torch.testing.assert_close(encoder(longer), found, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(encoder(words[:1, :2]), found[:1], rtol=1e-5, atol=1e-6)
    assert (encoder(torch.zeros(3, 4, dtype=torch.long)) == 0).all()


def test_an_instruction_is_read_by_the_lstm_to_its_last_word() -> None:
    encoder = reference.make_network(SPEC, 11).instruction
    assert encoder is not None
    for row in ([3], [3, 4], [4, 3], [3, 4, 8, 2]):
        outputs, _ = encoder.lstm(encoder.embedding(torch.tensor([row])))
        padded = torch.tensor([row + [0] * (4 - len(row))])
        torch.testing.assert_close(encoder(padded)[0], outputs[0, -1], rtol=1e-5, atol=1e-6)


def test_the_gradient_of_a_padded_or_empty_instruction_is_finite() -> None:
    network, batch, tasks = scene(12, 3, 3)
    batch["instruction"][:, 0] = 0
    evaluate(network, batch, tasks).values.sum().backward()
    for name, parameter in network.named_parameters():
        assert parameter.grad is None or parameter.grad.isfinite().all(), name
    assert network.instruction is not None and network.instruction.embedding.weight.grad is not None
    assert (network.instruction.embedding.weight.grad[0] == 0).all(), "padding is no word"


def test_every_row_has_its_own_instruction() -> None:
    """One text per row: changing row 2's changes nothing before row 2."""
    network, batch, tasks = scene(13, 4, 2)
    batch["first"][:] = False
    batch["instruction"][:] = 7
    before = evaluate(network, batch, tasks).values
    batch["instruction"][2, 0] = 8
    after = evaluate(network, batch, tasks).values
    assert torch.equal(before[:2], after[:2]) and torch.equal(before[:, 1], after[:, 1])
    assert (before[2:, 0] != after[2:, 0]).all()


def test_wrong_frames_and_numbers_of_tasks() -> None:
    network, batch, tasks = scene(14, 2, 2)
    with pytest.raises(ValueError, match="one task per column"):
        evaluate(network, batch, [0])
    batch["frame"] = torch.zeros(3, 2, 1, 2, 1)
    with pytest.raises(ValueError, match=r"frames \[2, 1, 1\]"):
        evaluate(network, batch, tasks)


def test_output_shapes_and_illegal_logits() -> None:
    network, batch, _ = scene(15, 5, 3)
    output = evaluate(network, batch, [0, 1, 2])
    assert output.logits.shape == (6, 3, 4) and output.values.shape == (6, 3) and output.core_state.shape == (3, 2, 5)
    probabilities = torch.softmax(output.logits, -1)
    for column, legal in enumerate((2, 3, 4)):
        assert (probabilities[:, column, legal:] == 0).all() and (probabilities[:, column, :legal] > 0).all()


def test_spec_round_trip_is_plain() -> None:
    plain = SPEC.to_dict()
    assert NetworkSpec.from_dict(plain) == SPEC
    assert isinstance(plain["frame_shape"], list) and isinstance(plain["settings"], dict)


def test_a_network_without_a_core_forgets_everything() -> None:
    """Each row on its own, whatever came before it and whatever state it is given; the state is empty."""
    spec = reference.small_spec(core="none")
    network, batch, tasks = scene(6, 5, 3, spec)
    whole = evaluate(network, batch, tasks)
    assert spec.settings.state_size == 0 and batch["core_state"].shape == whole.core_state.shape == (3, 2, 0)
    assert not any(name.startswith("core.") for name in network.state_dict())
    for t in range(6):
        row = evaluate(network, batch, tasks, slice(t, t + 1))
        torch.testing.assert_close(row.logits[0], whole.logits[t])
        torch.testing.assert_close(row.values[0], whole.values[t])


@pytest.mark.parametrize("torso", ["shallow", "deep"])
def test_an_orthogonal_start(torso: str) -> None:
    """Rows (or columns, where there are more rows) are orthogonal and sqrt(2) long; policies are near uniform."""
    spec = reference.small_spec(frame_shape=(84, 84, 4), frame_dtype="uint8", torso=torso, initialisation="orthogonal")
    network = reference.make_network(spec)
    weights = [m.weight.flatten(1) for m in network.torso.modules() if isinstance(m, torch.nn.Conv2d | torch.nn.Linear)]
    assert len(weights) >= 3
    for weight in weights:
        product = weight @ weight.T if weight.shape[0] <= weight.shape[1] else weight.T @ weight
        torch.testing.assert_close(product, 2 * torch.eye(len(product)), rtol=1e-4, atol=1e-4)
    for heads, gain in ((network.policy_heads, 0.01), (network.value_heads, 1.0)):
        for head in heads.values():
            assert isinstance(head, torch.nn.Linear) and (head.bias == 0).all()
            assert torch.linalg.matrix_norm(head.weight, 2).item() == pytest.approx(gain, rel=1e-4)
    weight = network.torso.output.weight
    other = reference.make_network(spec, 1).torso.output.weight
    assert not torch.equal(weight, other), "from the seed"
