"""Pixels about their mean in their task: statistics by hand, apart for each task, equal in actor and learner, kept by name."""

import numpy as np
import pytest
import torch

import agent_reference as reference
from agent.checkpoint import match_heads
from agent.inference import LocalPolicy
from agent.learner import Learner, LearnerSettings
from agent.losses import LossSettings
from agent.network import Network, NetworkSpec
from agent.normaliser import LIMIT, LOWEST_STEP, Normaliser, PixelStatistics
from agent.optimisers import OptimiserSettings
from agent.transport.board import Board, num_parameters

SHAPE = (12, 12, 2)


def spec(*tasks: str) -> NetworkSpec:
    legal = dict.fromkeys(tasks, 3)
    return reference.small_spec(legal, SHAPE, "uint8", torso="small", input_normalisation="pixel", initialisation="orthogonal")


def frames(seed: int, count: int) -> torch.Tensor:
    rng = np.random.default_rng(seed)
    return torch.from_numpy(rng.integers(256, size=(count, *SHAPE), dtype=np.uint8))


def test_statistics_are_plain_means_over_the_first_updates() -> None:
    normaliser, seen = Normaliser(["a", "b"], SHAPE, "uint8"), frames(0, 12)
    for part in seen.split(4):
        normaliser.update(normaliser.sums(part, torch.ones(4, dtype=torch.int32)))
    values = seen.double().numpy()
    mean, variance = values.mean(0), values.var(0)
    found = normaliser(seen[:, None], [1])[:, 0].numpy()
    np.testing.assert_allclose(found, (values - mean) / np.sqrt(variance + variance.mean()), rtol=1e-3, atol=1e-4)
    assert float(normaliser.of(0).count) == 0 and float(normaliser.of(1).count) == 3


def test_before_there_are_statistics_frames_are_over_255() -> None:
    seen = frames(1, 3)[None]
    torch.testing.assert_close(Normaliser(["a"], SHAPE, "uint8")(seen, [0, 0, 0]), seen / 255)


def test_each_task_has_its_own() -> None:
    normaliser = Normaliser(["dark", "bright"], SHAPE, "uint8")
    seen = torch.cat([frames(2, 20) // 8, 255 - frames(3, 20) // 8])
    tasks = [0] * 20 + [1] * 20
    normaliser.update(normaliser.sums(seen, torch.tensor(tasks)))
    found = normaliser(seen[None], tasks)[0]
    for part in (found[:20], found[20:]):
        assert abs(float(part.mean())) < 1e-3 and 0.5 < float(part.std()) < 0.8
    one = normaliser(seen[None, 20:], [1] * 20)[0]
    torch.testing.assert_close(one, found[20:])


def test_what_never_changes_is_zero_and_what_seldom_does_is_limited() -> None:
    seen = torch.full((1000, *SHAPE), 87, dtype=torch.uint8)
    seen[:, 0] = frames(4, 1000)[:, 0]
    seen[5, 3, 3] = 255
    normaliser = Normaliser(["a"], SHAPE, "uint8")
    normaliser.update(normaliser.sums(seen, torch.zeros(1000, dtype=torch.int32)))
    found = normaliser(seen[:, None], [0])[:, 0]
    assert (found[:, 4:] == 0).all(), "the background"
    assert 5 < float(found[5, 3, 3].max()) <= LIMIT
    assert float(found.abs().max()) <= LIMIT


def test_later_steps_do_not_get_shorter_than_the_lowest() -> None:
    statistics = PixelStatistics((1, 1, 1), 255.0)
    statistics.count.fill_(10 / LOWEST_STEP)
    statistics.update(torch.ones(1, 1, 1), torch.ones(1, 1, 1))
    assert float(statistics.mean) == pytest.approx(LOWEST_STEP)


def make_learner(network: Network) -> Learner:
    return Learner(
        network, LossSettings(), OptimiserSettings(name="adam"), 1000, None, LearnerSettings(epochs=2, minibatches=2)
    )


def test_a_learner_measures_each_batch_once_and_before_it_learns() -> None:
    """Wherever learning went: the newest rows of both batches, each once."""
    network = reference.make_network(spec("a"))
    learner = make_learner(network)
    newest = []
    for seed in (0, 1):
        batch = reference.tensors(reference.random_batch(np.random.default_rng(seed), network.spec, 4, 6))
        newest.append(batch["frame"][-1].double())
        learner.update(batch, [0] * 6)
    assert network.normaliser is not None
    torch.testing.assert_close(network.normaliser.of(0).mean.double(), torch.cat(newest).mean(0), rtol=1e-4, atol=1e-3)
    assert float(network.normaliser.of(0).count) == 2


def test_an_actor_sees_what_the_learner_sees(tmp_path) -> None:
    network = reference.make_network(spec("a", "b"))
    batch = reference.random_batch(np.random.default_rng(0), network.spec, 4, 6, garbage=False)
    data, tasks = reference.tensors(batch), batch["task"].tolist()
    make_learner(network).update(data, tasks)
    board = Board(tmp_path / "board", num_parameters(network), create=True)
    board.publish(network, 1, 0)
    other = reference.make_network(network.spec, seed=7)
    board.read(other)
    policy = LocalPolicy(other, tasks)
    policy.core_state = data["core_state"].clone()
    policy.last_action = batch["last_action"][0]
    _, log_probs = policy.act(batch["frame"][0], None, batch["reward"][0], batch["first"][0], np.zeros(6))
    expected = torch.log_softmax(network(data, data["core_state"], tasks).logits[0], -1)
    torch.testing.assert_close(torch.from_numpy(log_probs), expected, rtol=1e-5, atol=1e-5)


def test_statistics_follow_their_task_when_tasks_are_cut_or_reordered() -> None:
    network = reference.make_network(spec("a", "b", "c"))
    batch = reference.random_batch(np.random.default_rng(0), network.spec, 4, 12)
    batch["task"][:] = np.arange(12) % 3
    make_learner(network).update(reference.tensors(batch), batch["task"].tolist())
    cut = reference.make_network(spec("c", "a"), seed=3)
    cut.load_state_dict(match_heads(network.state_dict(), cut, frozenset({"b"})))
    assert network.normaliser is not None and cut.normaliser is not None
    assert torch.equal(cut.normaliser.of(0).mean, network.normaliser.of(2).mean)
    assert torch.equal(cut.normaliser.of(1).mean_square, network.normaliser.of(0).mean_square)
    assert not torch.equal(cut.normaliser.of(0).mean, cut.normaliser.of(1).mean)
