"""Sampling by inversion, and the local policy: what it carries from row to row, and what it forgets at a start."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import agent_reference as reference
from agent.inference import LocalPolicy, sample_actions
from agent.network import ILLEGAL_LOGIT

ALMOST_ONE = np.nextafter(1.0, 0.0)  # the largest number that numpy.random.Generator.random can give


def log_probs(seed: int, legal: list[bool], dtype: type = np.float32) -> np.ndarray:
    logits = np.where(legal, np.random.default_rng(seed).normal(size=len(legal)) * 3, ILLEGAL_LOGIT)
    return reference.log_softmax(logits).astype(dtype)[None]


@settings(deadline=None, max_examples=150)
@given(
    seed=st.integers(0, 2**32 - 1),
    legal=st.lists(st.booleans(), min_size=1, max_size=8).filter(any),
    uniform=st.one_of(st.sampled_from([0.0, ALMOST_ONE, 0.5]), st.floats(0, 1, exclude_max=True)),
    dtype=st.sampled_from([np.float32, np.float64]),
)
def test_an_illegal_action_is_never_drawn(seed: int, legal: list[bool], uniform: float, dtype: type) -> None:
    action = sample_actions(log_probs(seed, legal, dtype), np.array([uniform]))
    assert action.dtype == np.int32 and action.shape == (1,)
    assert 0 <= action[0] < len(legal) and legal[action[0]]


def test_the_edges() -> None:
    row = log_probs(0, [False, True, False, True, False])
    assert sample_actions(row, np.array([0.0])) == 1
    assert sample_actions(row, np.array([ALMOST_ONE])) == 3
    # Rounded probabilities need not add up to 1: neither above nor below is there a hole.
    for error in (-1e-3, 1e-3):
        assert sample_actions(row + np.float32(error), np.array([0.0, ALMOST_ONE][1:])) == 3


@pytest.mark.parametrize("seed", range(3))
def test_the_distribution(seed: int) -> None:
    """Evenly spaced uniforms: each action is drawn n p times, give or take the two ends of its interval."""
    row = log_probs(seed, [True, False, True, True, False, True])
    n = 10_000
    drawn = np.bincount(sample_actions(row.repeat(n, 0), (np.arange(n) + 0.5) / n), minlength=6)
    np.testing.assert_allclose(drawn, n * np.exp(row[0].astype(np.float64)), atol=2)


SPEC = reference.small_spec({"a": 2, "b": 3}, instruction_length=2)


def rows(seed: int, envs: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    frame = rng.normal(size=(envs, *SPEC.frame_shape)).astype(np.float32)
    return frame, rng.integers(0, 9, size=(envs, 2)).astype(np.int32), rng.normal(size=envs)


@pytest.mark.parametrize("first_reward", [0.0, 123.0])
def test_at_an_episodes_start_nothing_of_before_is_left(first_reward: float) -> None:
    """State, last action and last reward of the episode before are gone: a policy with a past acts as a new one."""
    network = reference.make_network(SPEC)
    with_past, new = LocalPolicy(network, [0, 1, 1]), LocalPolicy(network, [0, 1, 1])
    for step in range(4):
        frame, words, reward = rows(step, 3)
        with_past.act(frame, words, reward, np.full(3, step == 0), np.full(3, 0.7))
    assert (with_past.last_action > 0).any(), "or the test would show nothing"
    frame, words, _ = rows(9, 3)
    old_action, old = with_past.act(frame, words, np.full(3, first_reward), np.ones(3, bool), np.full(3, 0.3))
    action, fresh = new.act(frame, words, np.zeros(3), np.ones(3, bool), np.full(3, 0.3))
    np.testing.assert_allclose(old, fresh, atol=1e-6)
    np.testing.assert_array_equal(action, old_action)
    torch.testing.assert_close(with_past.core_state, new.core_state)


def test_one_environment_may_start_while_the_other_goes_on() -> None:
    network = reference.make_network(SPEC)
    both, alone = LocalPolicy(network, [1, 1]), LocalPolicy(network, [1])
    for step in range(5):
        frame, words, reward = rows(step, 2)
        first = np.array([step == 0, step in (0, 3)])
        _, found = both.act(frame, words, reward, first, np.array([0.7, 0.7]))
        _, expected = alone.act(frame[:1], words[:1], reward[:1], first[:1], np.array([0.7]))
        np.testing.assert_allclose(found[:1], expected, atol=1e-6)


def test_the_same_history_gives_the_same_logits_as_the_network_over_all_rows() -> None:
    """Acting row by row, as in training and evaluation, is Network.forward over the whole history."""
    network = reference.make_network(SPEC)
    policy = LocalPolicy(network, [0, 1])
    history: dict[str, list[np.ndarray]] = {name: [] for name in ("frame", "instruction", "reward", "first", "last_action")}
    found = []
    last = np.full(2, -1, np.int32)
    for step in range(6):
        frame, words, reward = rows(step, 2)
        first = np.array([step in (0, 4), step == 0])
        last = np.where(first, -1, last).astype(np.int32)
        values = (frame, words, np.where(first, 0, reward), first, last)
        for name, value in zip(history, values, strict=True):
            history[name].append(value)
        last, log_probabilities = policy.act(frame, words, reward, first, np.random.default_rng(step).random(2))
        found.append(log_probabilities)
    stacked = {name: torch.from_numpy(np.stack(values)) for name, values in history.items()}
    output = network(stacked, network.initial_state(2), [0, 1])
    np.testing.assert_allclose(np.stack(found), torch.log_softmax(output.logits, -1).detach().numpy(), atol=1e-5)


def test_a_policy_without_instructions() -> None:
    network = reference.make_network(reference.small_spec({"a": 2}))
    frame, _, reward = rows(0, 2)
    action, probabilities = LocalPolicy(network, [0, 0]).act(frame, None, reward, np.ones(2, bool), np.array([0.0, 0.999]))
    assert action.tolist() == [0, 1] and probabilities.shape == (2, 2)
    np.testing.assert_allclose(np.exp(probabilities).sum(1), 1, rtol=1e-5)
