"""Does it learn? Actor and learner on two tiny tasks, to a return that an oracle, written apart from the agent, computes."""

import itertools
from collections.abc import Iterator
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import torch

import agent_reference as reference
from agent.actor import Actor, HalfGroup, Member
from agent.inference import LocalPolicy
from agent.learner import Learner
from agent.losses import LossSettings
from agent.optimisers import OptimiserSettings
from agent.unroll import Arrays

PLACES, TEMPTATION, GOAL = 5, 0.2, 1.0


class Chain(gymnasium.vector.VectorEnv[Any, Any, Any]):
    """Places 0 to 4, start at 0. Action 0 takes a small reward and ends; action 1 walks on, and the last place pays 1."""

    def __init__(self, num_envs: int) -> None:
        self.num_envs = num_envs
        self.place, self.over = np.zeros(num_envs, int), np.zeros(num_envs, bool)
        self.actions = np.zeros(num_envs, int)

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        return self._observe(), {}

    def _observe(self) -> dict[str, np.ndarray]:
        return {"frame": np.eye(PLACES, dtype=np.float32)[self.place][..., None, None]}

    def step_async(self, actions: np.ndarray) -> None:
        self.actions = actions

    def step_wait(self) -> Any:
        reset = self.over
        walked = (self.actions == 1) & ~reset
        self.place = np.where(reset, 0, self.place + walked)
        arrived, gave_up = walked & (self.place == PLACES - 1), ~walked & ~reset
        reward = arrived * GOAL + gave_up * TEMPTATION
        self.over = arrived | gave_up
        infos = {"frames": (~reset).astype(np.int32), "reset": reset}
        return self._observe(), reward, self.over.copy(), np.zeros(self.num_envs, bool), infos


class PayDay(gymnasium.vector.VectorEnv[Any, Any, Any]):
    """Never ends. Every `period`-th action is paid 1 if it names the cue that is seen then, and else 0; others pay nothing."""

    def __init__(self, num_envs: int, period: int, seed: int) -> None:
        self.num_envs, self.period, self.step_index = num_envs, period, 0
        self.rng = np.random.default_rng(seed)
        self.cue = self.rng.integers(3, size=num_envs)
        self.actions = np.zeros(num_envs, int)

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        return self._observe(), {}

    def _observe(self) -> dict[str, np.ndarray]:
        return {"frame": np.eye(3, dtype=np.float32)[self.cue][..., None, None]}

    def step_async(self, actions: np.ndarray) -> None:
        self.actions = actions

    def step_wait(self) -> Any:
        self.step_index += 1
        reward = np.where(self.step_index % self.period == 0, (self.actions == self.cue) * 1.0, 0.0)
        self.cue = self.rng.integers(3, size=self.num_envs)
        never = np.zeros(self.num_envs, bool)
        return self._observe(), reward, never, never, {"frames": np.ones(self.num_envs, np.int32), "reset": never}


def train(environments: list[Any], actions: int, length: int, updates: int, frame: int, gamma: float) -> Iterator[Arrays]:
    """Yield every batch of a run: all unrolls of both halves, learned from at once, fresh parameters each round."""
    network_spec = reference.small_spec({"task": actions}, (frame, 1, 1), hidden_size=16, core_size=16)
    spec = reference.unroll_spec(network_spec, length)
    network = reference.make_network(network_spec, 1)
    optimiser = OptimiserSettings(learning_rate=0.02, schedule="constant", epsilon=0.01)
    learner = Learner(network, LossSettings(discount=gamma), optimiser, 10**9)
    halves = [
        HalfGroup(
            [Member(0, env)],
            partial(LocalPolicy, network),
            network.task_names,
            spec,
            0,
            i * env.num_envs,
            np.random.default_rng(i),
        )
        for i, env in enumerate(environments)
    ]
    actor = Actor(halves, lambda: learner.counters.updates, lambda n: None, lambda: None)
    count = sum(env.num_envs for env in environments)
    slot = spec.views(np.zeros(spec.unroll_bytes(), np.uint8))
    unrolls = actor.unrolls()
    for _ in range(updates):
        batch = spec.empty(count)
        for column, (rows, source) in enumerate(itertools.islice(unrolls, count)):
            spec.copy_out(slot, rows, source)
            spec.copy_in(batch, column, slot)
        assert not learner.update({n: torch.from_numpy(a) for n, a in batch.items()}, batch["task"].tolist())["skipped"]
        yield batch


def chain_return(walk: float) -> float:
    """Oracle: expected return of the policy that walks with this probability everywhere, by dynamic programming."""
    value = GOAL
    for _ in range(PLACES - 1):
        value = walk * value + (1 - walk) * TEMPTATION
    return value


def test_a_chain_with_a_temptation() -> None:
    """Random play: 0.25 (the walker arrives once in 16). Optimal: 1, only by refusing 0.2 four times."""
    random_score, optimal = chain_return(0.5), max(chain_return(p) for p in (0.0, 1.0))
    assert random_score == 0.25 and optimal == 1.0
    returns = [
        batch["episode_return"][1:][~np.isnan(batch["episode_return"][1:])]
        for batch in train([Chain(8), Chain(8)], actions=2, length=6, updates=300, frame=PLACES, gamma=0.99)
    ]
    assert np.mean(returns[0]) < 0.5, "it starts near random play"
    assert np.mean(np.concatenate(returns[-30:])) > 0.95 * optimal


def test_a_reward_that_comes_with_the_last_row_only() -> None:
    """Period = T: the paid action is always the last transition of an unroll. Lose it, and nothing can be learned (1/3)."""
    length = 4
    paid = []
    for batch in train([PayDay(8, length, 0), PayDay(8, length, 1)], actions=3, length=length, updates=200, frame=3, gamma=0.0):
        assert (batch["reward"][1:length] == 0).all(), "all pay arrives with row T"
        paid.append(batch["reward"][length].mean())
    assert np.mean(paid[:5]) < 0.6
    assert np.mean(paid[-30:]) > 0.9
