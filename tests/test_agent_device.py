"""bfloat16 and a compiled torso against plain float32: what stays equal, and what stays near."""

import numpy as np
import pytest
import torch

import agent_reference as reference
from agent.conflict import task_gradients
from agent.device import allow_tf32, compile_torso
from agent.learner import Learner
from agent.losses import LossSettings, compute_losses
from agent.network import Network
from agent.optimisers import OptimiserSettings
from agent.unroll import Batch
from launch.recurrence import measure_recurrence

SPEC = reference.small_spec(
    {"a": 2, "b": 3}, (12, 12, 1), "uint8", instruction_length=2, torso="small", hidden_size=32, core_size=16
)
LOSS = LossSettings(reward_transform="none")


def scene(length: int = 5, columns: int = 4) -> tuple[Batch, list[int]]:
    batch = reference.random_batch(np.random.default_rng(0), SPEC, length, columns)
    batch["task"][:] = np.arange(columns) % 2
    batch["action"] %= 2
    return reference.tensors(batch), batch["task"].tolist()


def twins(bf16: bool) -> tuple[Network, Network]:
    """The same parameters twice: float32, and as asked for."""
    plain = reference.make_network(SPEC)
    other = Network(SPEC, bf16)
    other.load_state_dict(plain.state_dict())
    return plain, other


def test_bf16_stays_near_float32_and_is_the_torsos_only() -> None:
    batch, tasks = scene()
    results = []
    types: dict[tuple[str, bool], torch.dtype] = {}
    for network in twins(True):
        for name in ("torso.output", "core.input", "policy_heads.task_a", "instruction.lstm"):
            network.get_submodule(name).register_forward_pre_hook(
                lambda _, inputs, key=(name, network.bf16): types.update({key: inputs[0].dtype})
            )
        output = network(batch, batch["core_state"], [0] * len(tasks))
        loss = compute_losses(output, batch, LOSS).total()
        loss.backward()
        gradients = torch.cat([p.grad.flatten() for p in network.parameters() if p.grad is not None])
        assert loss.isfinite() and gradients.isfinite().all()
        assert {each.dtype for each in (*output, gradients)} == {torch.float32}
        results.append((loss, gradients))
    (loss, expected), (near, found) = results
    assert not torch.equal(found, expected), "nothing was computed in bfloat16"
    assert torch.nn.functional.cosine_similarity(found, expected, dim=0) > 0.999
    assert near.item() == pytest.approx(loss.item(), rel=0.02)
    low = {key for key, dtype in types.items() if dtype == torch.bfloat16}
    assert low == {("torso.output", True)} and len(types) == 8


def test_a_learner_learns_in_bf16_and_keeps_float32_parameters() -> None:
    _, network = twins(True)
    learner = Learner(network, LOSS, OptimiserSettings(learning_rate=1e-2), 10**6)
    batch, tasks = scene()
    losses = [learner.update(batch, tasks)["loss"] for _ in range(5)]
    assert np.isfinite(losses).all() and learner.counters.skipped_updates == 0
    assert {p.dtype for p in network.parameters()} == {torch.float32}


@pytest.mark.slow
def test_a_compiled_torso_gives_equal_losses_under_the_same_names() -> None:
    """Also for another number of frames, and for other tasks, as the conflict measurement has; no gradient is left behind."""
    plain, compiled = twins(False)
    batch, tasks = scene()
    compile_torso(compiled, batch["first"].numel())
    assert list(compiled.state_dict()) == list(plain.state_dict())
    assert all(p.grad is None for p in compiled.parameters())
    kernels = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert kernels >= 1
    results = [
        [Learner(each, LOSS, OptimiserSettings(), 10**6).update(batch, some)["loss"] for some in (tasks, [1] * len(tasks))]
        for each in (plain, compiled)
    ]
    assert results[0] == pytest.approx(results[1], rel=1e-4)
    norms = [task_gradients(each, batch, tasks, [0, 1], LOSS).norms for each in (plain, compiled)]
    np.testing.assert_allclose(*norms, rtol=1e-3)
    kernels_now = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert kernels_now == kernels, "other heads, or another number of frames, compiled it again"
    for name, expected in plain.state_dict().items():
        torch.testing.assert_close(compiled.state_dict()[name], expected, rtol=1e-3, atol=1e-5)


def test_a_machine_that_cannot_compile_is_told_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._inductor.config.cpp, "cxx", ("/no/such/compiler",))
    torch._dynamo.reset()
    with pytest.raises(ValueError, match=r"learner\.compile=true does not work .*: use learner\.compile=false"):
        compile_torso(reference.make_network(reference.small_spec({"a": 2}, (14, 14, 1), "uint8", torso="small")), 7)


def test_tf32_is_switched_both_ways() -> None:
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    try:
        for allowed in (True, False):
            allow_tf32(allowed)
            assert torch.backends.cuda.matmul.allow_tf32 is torch.backends.cudnn.allow_tf32 is allowed
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


def test_the_benchmark_of_the_recurrence() -> None:
    found = measure_recurrence(SPEC, torch.device("cpu"), 4, 2)
    assert found["core_milliseconds"] > 0
    assert found["ratio"] == pytest.approx(found["library_milliseconds"] / found["core_milliseconds"])
