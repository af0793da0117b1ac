"""The learner: schedule, counting, clipping, non-finite updates, optimiser state, sums over learners."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import agent_reference as reference
from agent.diagnostics import SUMS
from agent.learner import Learner, LearnerSettings, NonFiniteError
from agent.losses import LossSettings, compute_losses
from agent.optimisers import OptimiserSettings
from agent.unroll import Batch

SPEC = reference.small_spec({"a": 2, "b": 3, "absent": 3})
RAW = LossSettings(reward_transform="none")


def make(optimiser: OptimiserSettings | None = None, loss: LossSettings = RAW, total_frames: int = 1000) -> Learner:
    return Learner(reference.make_network(SPEC), loss, optimiser or OptimiserSettings(), total_frames)


def make_batch(seed: int, columns: int = 4, length: int = 5) -> tuple[Batch, list[int]]:
    batch = reference.random_batch(np.random.default_rng(seed), SPEC, length, columns)
    batch["task"][:] = np.arange(columns) % 2
    batch["action"] %= 2
    batch["last_action"] = np.minimum(batch["last_action"], 1)
    return reference.tensors(batch), batch["task"].tolist()


def snapshot(learner: Learner) -> dict[str, torch.Tensor]:
    state = {f"parameter {name}": value.clone() for name, value in learner.network.state_dict().items()}
    return state | {f"square {name}": value.clone() for name, value in learner.optimiser_state().items()}


def assert_same(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> None:
    assert before.keys() == after.keys()
    for name, value in before.items():
        assert torch.equal(value, after[name]), f"{name} moved"


@settings(deadline=None, max_examples=50)
@given(total=st.integers(1, 10**11), share=st.floats(0, 2))
def test_the_schedule_is_linear_over_frames(total: int, share: float) -> None:
    learner = make(OptimiserSettings(learning_rate=0.5), total_frames=total)
    learner.counters.frames = int(total * share)
    assert learner.learning_rate() == pytest.approx(0.5 * max(0.0, (total - learner.counters.frames) / total), abs=1e-15)


def test_the_schedule_by_value_and_the_constant_one() -> None:
    learner = make(OptimiserSettings(learning_rate=6e-4), total_frames=10**10)
    for frames, expected in ((0, 6e-4), (3 * 10**9, 4.2e-4), (10**10 - 1, 6e-14), (10**10, 0.0), (2 * 10**10, 0.0)):
        learner.counters.frames = frames
        assert learner.learning_rate() == pytest.approx(expected, rel=1e-6)
    constant = make(OptimiserSettings(learning_rate=6e-4, schedule="constant"))
    constant.counters.frames = 10**12
    assert constant.learning_rate() == 6e-4
    settings = OptimiserSettings(learning_rate=6e-4, schedule="inverse_sqrt", hot_steps=1000)
    anytime = make(settings)
    for steps, expected in ((0, 6e-4), (3 * 3000, 3e-4), (3 * 15_000, 1.5e-4)):
        anytime.counters.steps = steps  # of three tasks
        assert anytime.learning_rate() == pytest.approx(expected)


def test_the_update_uses_the_rate_of_the_frames_before_it() -> None:
    """Half of the frames are gone: the parameters move half as far as at the start."""
    moves = []
    for frames in (0, 500, 1000):
        learner = make(OptimiserSettings(max_gradient_norm=0.0))
        learner.counters.frames = frames
        before = learner.network.core.input.weight.detach().clone()
        learner.update(*make_batch(0))
        moves.append(learner.network.core.input.weight.detach() - before)
    torch.testing.assert_close(moves[1], moves[0] / 2, rtol=1e-2, atol=1e-7)
    assert (moves[2] == 0).all() and (moves[0] != 0).any()


def test_frames_and_steps_with_resets_and_lost_lives() -> None:
    """Rows 1 to T count, row 0 was counted before. Frames 4, 0 (reset), 4, 3 (cut short), 4 (after a lost life)."""
    learner = make()
    batch, tasks = make_batch(1, columns=1)
    batch["frames"][:, 0] = torch.tensor([4, 4, 0, 4, 3, 4])
    batch["first"][:, 0] = torch.tensor([False, False, True, False, False, True])
    learner.update(batch, tasks)
    assert (learner.counters.frames, learner.counters.steps, learner.counters.updates) == (15, 4, 1)
    learner.update(batch, tasks)
    assert (learner.counters.frames, learner.counters.steps, learner.counters.updates) == (30, 8, 2)


def test_frames_are_exact_python_integers() -> None:
    """2^53 + 1 has no float64, and the sum of a batch no int32."""
    learner = make(total_frames=10**17)
    learner.counters.frames = 2**53 + 1
    batch, tasks = make_batch(2)
    batch["frames"][1:] = 2**31 - 1
    learner.update(batch, tasks)
    assert learner.counters.frames == 2**53 + 1 + 20 * (2**31 - 1)
    assert type(learner.counters.frames) is int and type(learner.counters.steps) is int


def test_the_gradient_is_scaled_to_the_limit_by_its_global_norm() -> None:
    batch, tasks = make_batch(3)
    free, clipped, loose = (make(OptimiserSettings(max_gradient_norm=limit)) for limit in (0.0, 0.25, 1e6))
    norm = free.update(batch, tasks)["gradient_norm"]
    gradients = {name: p.grad for name, p in free.network.named_parameters() if p.grad is not None}
    by_hand = np.sqrt(sum(float((g.double() ** 2).sum()) for g in gradients.values()))
    assert norm == pytest.approx(by_hand, rel=1e-5) and norm > 0.5
    assert clipped.update(batch, tasks)["gradient_norm"] == pytest.approx(norm, rel=1e-6), "reported before clipping"
    for name, parameter in clipped.network.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(parameter.grad, gradients[name] * (0.25 / norm), rtol=1e-4, atol=1e-8)
    loose.update(batch, tasks)
    assert_same(snapshot(free), snapshot(loose))


def break_reward(learner: Learner, batch: Batch) -> None:
    batch["first"][2, 0] = False
    batch["reward"][2, 0] = torch.nan


def break_gradient(learner: Learner, batch: Batch) -> None:
    """The loss stays finite, one gradient does not."""
    learner.network.core.recurrent.weight.register_hook(lambda gradient: gradient * torch.inf)


def break_loss(learner: Learner, batch: Batch) -> None:
    """Every gradient stays finite, the loss does not."""
    break_reward(learner, batch)
    for parameter in learner.network.parameters():
        parameter.register_hook(torch.zeros_like)


@pytest.mark.parametrize("spoil", [break_reward, break_gradient, break_loss])
def test_a_non_finite_update_is_skipped_and_counted(spoil: Callable[[Learner, Batch], None]) -> None:
    learner = make()
    learner.update(*make_batch(4))
    before, rate = snapshot(learner), learner.optimiser.param_groups[0]["lr"]
    frames, steps = learner.counters.frames, learner.counters.steps
    batch, tasks = make_batch(5)
    spoil(learner, batch)
    result = learner.update(batch, tasks)
    assert result["skipped"] and not (np.isfinite(result["loss"]) and np.isfinite(result["gradient_norm"]))
    assert_same(before, snapshot(learner))
    assert learner.optimiser.param_groups[0]["lr"] == rate
    counters = learner.counters
    assert (counters.updates, counters.skipped_updates, counters.skipped_in_a_row) == (1, 1, 1)
    assert counters.frames == frames + int(batch["frames"][1:].sum()), "they were consumed"
    assert counters.steps == steps + int((batch["frames"][1:] > 0).sum())


def test_after_a_skipped_update_learning_goes_on_as_if_it_had_not_been() -> None:
    spoilt, clean = make(OptimiserSettings(schedule="constant")), make(OptimiserSettings(schedule="constant"))
    bad, tasks = make_batch(5)
    break_reward(spoilt, bad)
    for learner in (spoilt, clean):
        learner.update(*make_batch(4))
        if learner is spoilt:
            learner.update(bad, tasks)
        assert not learner.update(*make_batch(6))["skipped"]
    assert_same(snapshot(clean), snapshot(spoilt))
    assert spoilt.counters.skipped_in_a_row == 0 and spoilt.counters.skipped_updates == 1


def test_repeated_non_finite_updates_end_the_run_with_a_reason() -> None:
    learner = make(OptimiserSettings(max_skipped_updates=3, learning_rate=0.125))
    bad, tasks = make_batch(5)
    break_reward(learner, bad)
    for _ in range(2):
        learner.update(bad, tasks)
    learner.update(*make_batch(6))  # a good one between: the row starts anew
    for _ in range(2):
        learner.update(bad, tasks)
    with pytest.raises(NonFiniteError, match=r"not finite 3 times in a row.*optimiser\.learning_rate=0\.125"):
        learner.update(bad, tasks)
    assert learner.counters.skipped_updates == 5 and learner.counters.updates == 1
    frames = int(bad["frames"][1:].sum())
    assert learner.counters.frames == 5 * frames + int(make_batch(6)[0]["frames"][1:].sum()), "the last one counts, too"


def gradients(batch: Batch, tasks: list[int]) -> dict[str, torch.Tensor]:
    network = reference.make_network(SPEC).double()
    compute_losses(network(batch, batch["core_state"].double(), tasks), batch, RAW).total().backward()
    return {name: p.grad for name, p in network.named_parameters() if p.grad is not None}


def test_two_learners_with_half_the_batch_give_the_gradient_of_one_with_all() -> None:
    batch, tasks = make_batch(7, columns=6)
    per_row = {n for n, f in reference.unroll_spec(SPEC, 5).fields().items() if f.per_row}
    halves = [
        gradients({n: (t[:, part] if n in per_row else t[part]) for n, t in batch.items()}, tasks[part])
        for part in (slice(0, 2), slice(2, 6))
    ]
    for name, whole in gradients(batch, tasks).items():
        torch.testing.assert_close(halves[0][name] + halves[1][name], whole, rtol=1e-5, atol=1e-6)


def test_the_heads_of_absent_tasks_stay_as_they_are_to_the_bit() -> None:
    learner = make()
    before = snapshot(learner)
    for seed in range(3):
        learner.update(*make_batch(seed))
    after = snapshot(learner)
    absent = [name for name in before if ".task_absent." in name]
    assert len(absent) == 4 and not any(name.startswith("square") for name in after if ".task_absent." in name)
    for name, value in before.items():
        assert torch.equal(value, after[name]) == (name in absent), name


def test_the_heads_of_a_task_that_is_absent_for_once_stay_as_they_are() -> None:
    """They had gradients in the update before: a gradient of zeros instead of none would shrink their mean square."""
    learner = make()
    learner.update(*make_batch(0))
    before = snapshot(learner)
    batch, _ = make_batch(1)
    batch["task"].zero_()
    learner.update(batch, [0] * 4)
    after = snapshot(learner)
    for name, value in before.items():
        assert torch.equal(value, after[name]) == (".task_b." in name or ".task_absent." in name), name


@pytest.mark.parametrize(("placement", "inside"), [("inside", True), ("outside", False)])
def test_optimiser_settings_reach_the_optimiser(placement: Any, inside: bool) -> None:
    learner = make(OptimiserSettings(learning_rate=0.3, decay=0.8, epsilon=0.07, epsilon_placement=placement))
    group = learner.optimiser.param_groups[0]
    assert (group["lr"], group["decay"], group["epsilon"], group["epsilon_inside"]) == (0.3, 0.8, 0.07, inside)
    assert len(learner.optimiser.param_groups) == 1
    assert len(group["params"]) == len(list(learner.network.parameters()))


def test_the_defaults_are_those_of_the_recipe_for_atari() -> None:
    """T 20, B 32 are elsewhere; here: lr 6e-4 linear to 0, decay 0.99, epsilon 0.01 inside, norm clipped at 40."""
    defaults = OptimiserSettings()
    assert (defaults.learning_rate, defaults.schedule, defaults.decay) == (6e-4, "linear", 0.99)
    assert (defaults.epsilon, defaults.epsilon_placement, defaults.max_gradient_norm) == (0.01, "inside", 40.0)


def test_continuing_from_saved_state_equals_never_having_stopped() -> None:
    straight = make()
    for seed in range(4):
        straight.update(*make_batch(seed))
    first = make()
    for seed in range(2):
        first.update(*make_batch(seed))
    second = make()
    second.network.load_state_dict(first.network.state_dict())
    second.load_optimiser_state(first.optimiser_state())
    second.counters = first.counters
    kept = snapshot(first)
    for seed in range(2, 4):
        second.update(*make_batch(seed))
    assert_same(snapshot(straight), snapshot(second))
    assert second.counters == straight.counters
    assert_same(
        {n: v for n, v in kept.items() if n.startswith("square")},
        {n: v for n, v in snapshot(first).items() if n.startswith("square")},
    )


def test_optimiser_state_of_a_stranger_is_an_error_that_lists_it() -> None:
    with pytest.raises(ValueError, match=r"lacks: policy_heads\.task_x\.bias, zzz"):
        make().load_optimiser_state({"zzz": torch.zeros(1), "policy_heads.task_x.bias": torch.zeros(1)})


def test_sums_per_task_come_with_the_update() -> None:
    learner = make()
    batch, tasks = make_batch(8, columns=6)
    result = learner.update(batch, tasks)
    sums = result["task_sums"]
    assert sums.shape == (3, len(SUMS)) and not result["skipped"]
    transitions = (~batch["first"][1:]).sum(0)
    for task in range(3):
        assert sums[task, SUMS.index("transitions")] == int(transitions[batch["task"] == task].sum())
    parts = [SUMS.index(name) for name in ("policy_gradient_loss", "baseline_loss", "entropy_loss")]
    assert sums[:, parts].sum() == pytest.approx(result["loss"], rel=1e-4)


def test_mean_squares_start_where_the_setting_says() -> None:
    for start in (0.0, 1.0):
        learner = make(OptimiserSettings(initial_square=start, decay=1.0))
        learner.update(*make_batch(0))
        assert all((square == start).all() for square in learner.optimiser_state().values())


def reuse(seed: int = 0, optimiser: OptimiserSettings | None = None, **settings: Any) -> Learner:
    settings = {"batch_size": 8, **settings}
    return Learner(
        reference.make_network(SPEC),
        RAW,
        optimiser or OptimiserSettings(name="adam", learning_rate=1e-3, epsilon=1e-3),
        1000,
        None,
        LearnerSettings(**settings),
        seed,
    )


def test_a_batch_that_is_learned_from_several_times_counts_once() -> None:
    learner, batch = reuse(epochs=3, minibatches=4), make_batch(0, columns=8)
    result = learner.update(*batch)
    once = reuse()
    once.update(*batch)
    assert learner.counters.updates == 12 and once.counters.updates == 1
    for name in ("frames", "steps"):
        assert getattr(learner.counters, name) == getattr(once.counters, name) > 0
    transitions = int((~batch[0]["first"][1:]).sum())
    assert result["samples"] == 3 * transitions
    assert result["task_sums"][:, 0].sum() == result["last_sums"][:, 0].sum() == transitions
    assert not np.array_equal(result["task_sums"], result["last_sums"]), "the policy has moved in between"


def test_every_unroll_is_in_one_minibatch_of_each_epoch_and_they_are_drawn_anew() -> None:
    learner, (batch, tasks) = reuse(epochs=2, minibatches=2), make_batch(0, columns=8)
    batch["actor"] = torch.arange(8, dtype=torch.int32)
    seen: list[list[int]] = []
    inner = learner._update

    def spy(part: Batch, part_tasks: list[int], first: Any, is_new: bool) -> dict[str, Any]:
        seen.append(part["actor"].tolist())
        assert part_tasks == [tasks[column] for column in seen[-1]] == part["task"].tolist()
        assert is_new == (len(seen) <= 2)
        np.testing.assert_array_equal(first, batch["first"].numpy()[:, seen[-1]])
        return inner(part, part_tasks, first, is_new)

    learner._update = spy  # type: ignore[method-assign]
    learner.update(batch, tasks, batch["first"].numpy())
    assert sorted(seen[0] + seen[1]) == sorted(seen[2] + seen[3]) == list(range(8))
    assert {frozenset(part) for part in seen[:2]} != {frozenset(part) for part in seen[2:]}


def test_one_epoch_in_one_part_is_one_plain_update() -> None:
    """By hand: the summed loss, its gradient, Adam's first step of the learning rate's length in every direction."""
    learner, (batch, tasks) = reuse(), make_batch(3, columns=8)
    before = {name: p.detach().clone() for name, p in learner.network.named_parameters()}
    network = reference.make_network(SPEC)
    compute_losses(network(batch, batch["core_state"], tasks), batch, RAW).total().backward()
    norm = float(torch.cat([p.grad.flatten() for p in network.parameters() if p.grad is not None]).norm())
    learner.update(batch, tasks)
    gradients = {name: p.grad for name, p in network.named_parameters() if p.grad is not None}
    for name, after in learner.network.named_parameters():
        if name in gradients:
            clipped = gradients[name] * min(1.0, 40.0 / norm)
            expected = before[name] - 1e-3 * clipped / (clipped.abs() + 1e-3)
            torch.testing.assert_close(after.detach(), expected, rtol=1e-4, atol=1e-7)


def test_epochs_end_when_the_policy_has_gone_too_far() -> None:
    """The batch's behaviour is another network's: its divergence is above any small limit at once."""
    for limit, updates in ((0.0, 6), (1e-6, 2), (1e12, 6)):
        learner = reuse(epochs=3, minibatches=2, max_kl=limit)
        learner.update(*make_batch(0, columns=8))
        assert learner.counters.updates == updates, limit


def test_reuse_continues_exactly_with_adam_and_minibatches() -> None:
    straight = reuse(epochs=2, minibatches=4)
    for seed in range(4):
        straight.update(*make_batch(seed, columns=8))
    first, second = reuse(epochs=2, minibatches=4), reuse(epochs=2, minibatches=4)
    for seed in range(2):
        first.update(*make_batch(seed, columns=8))
    second.network.load_state_dict(first.network.state_dict())
    second.load_optimiser_state(first.optimiser_state())
    second.counters = first.counters
    for seed in range(2, 4):
        second.update(*make_batch(seed, columns=8))
    assert_same(snapshot(straight), snapshot(second))
    assert straight.counters == second.counters
    assert {name.rpartition(".")[2] for name in straight.optimiser_state()} == {"exp_avg", "exp_avg_sq", "step"}


def test_another_seed_draws_other_minibatches() -> None:
    learners = [reuse(seed, minibatches=4) for seed in (0, 0, 1)]
    for learner in learners:
        learner.update(*make_batch(0, columns=8))
    same, equal, other = (snapshot(learner) for learner in learners)
    assert_same(same, equal)
    assert any(not torch.equal(value, other[name]) for name, value in same.items())


def test_adam_leaves_the_heads_of_absent_tasks_as_they_are() -> None:
    learner = reuse(epochs=2, minibatches=2)
    learner.update(*make_batch(0, columns=8))
    before = snapshot(learner)
    batch, _ = make_batch(1, columns=8)
    batch["task"].zero_()
    learner.update(batch, [0] * 8)
    after = snapshot(learner)
    for name, value in before.items():
        assert torch.equal(value, after[name]) == (".task_b." in name or ".task_absent." in name), name


def test_the_rate_warms_up() -> None:
    learner = reuse(optimiser=OptimiserSettings(learning_rate=0.4, schedule="constant", warmup_updates=4))
    rates = []
    for seed in range(6):
        rates.append(learner.learning_rate())
        learner.update(*make_batch(seed, columns=8))
    assert rates == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.4, 0.4])
