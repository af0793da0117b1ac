"""The stages of a run's work, each alone on one core: environment, inference, learner (on its device), transport."""

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from agent.inference import LocalPolicy
from agent.network import Network
from agent.transport.board import Board, num_parameters
from agent.transport.ring import Ring
from launch.config import RunFiles
from launch.learners import choose_device, make_learner
from launch.plan import Plan, groups
from launch.scaling import random_batch
from tasks.environment import make_vector_env


class Stages:
    """Measures each stage alone on one core, with a run's own sizes.

    Args:
        run, plan: what is measured.
        folder: for mapped files.
        environments: measure them too; engines that are processes work on all cores at once.
    """

    def __init__(self, run: RunFiles, plan: Plan, folder: Path, environments: bool = True) -> None:
        torch.set_num_threads(1)
        torch.set_flush_denormal(True)
        rng = np.random.default_rng(0)
        learner = run.config.learner
        first = {group.task: group for actor in reversed(plan.actors) for group in groups(actor)}
        self._environments = [_environment(run, task, group.count) for task, group in first.items() if environments]
        self._rng = rng
        self._num_steps = learner.batch_size * run.config.actor.unroll_length
        network = Network(plan.network)
        self.device = choose_device(learner.device)
        self._learner = make_learner(run, self.device)
        self._arrays = random_batch(plan.unroll, learner.batch_size, len(plan.task_names), rng)
        self._batch = {name: torch.from_numpy(array).to(self.device) for name, array in self._arrays.items()}
        half = plan.actors[0].halves[0]
        self._num_envs = sum(group.count for group in half)
        self._policy = LocalPolicy(network, [group.task for group in half for _ in range(group.count)])
        self._rows = {
            name: rng.integers(0, 255, (self._num_envs, *array.shape[2:])).astype(array.dtype)
            for name, array in self._arrays.items()
            if name in ("frame", "instruction")
        }
        self._ring = Ring(folder / "benchmark-ring", plan.unroll, 1, create=True)
        self._board = Board(folder / "benchmark-board", num_parameters(network), create=True)
        self._received = plan.unroll.empty(learner.batch_size)

    def measure(self, seconds: float) -> dict[str, float]:
        """Stage -> seconds per agent step, each measured for about `seconds`."""
        environments = [self._environment_cost(e, seconds) for e in self._environments]
        return {
            **({"environment": statistics.mean(environments)} if environments else {}),
            "inference": time_of(self._infer, seconds) / self._num_envs,
            "learner": time_of(self._update, seconds) / self._num_steps,
            "transport": time_of(self._transport, seconds) / self._num_steps,
        }

    def _environment_cost(self, environment: Any, seconds: float) -> float:
        def step() -> None:
            environment.step(self._rng.integers(0, environment.single_action_space.n, environment.num_envs))

        return time_of(step, seconds / len(self._environments)) / environment.num_envs

    def _infer(self) -> None:
        zeros = np.zeros(self._num_envs, np.float32)
        self._policy.act(self._rows["frame"], self._rows.get("instruction"), zeros, zeros > 0, self._rng.random(self._num_envs))

    def _update(self) -> None:
        self._learner.update(self._batch, self._arrays["task"].tolist(), self._arrays["first"])

    def _transport(self) -> None:
        """A batch down, parameters up: once posted, once read."""
        for column in range(len(self._arrays["task"])):
            self._ring.write(self._arrays, column)
            self._ring.spec.copy_in(self._received, column, self._ring.peek())
            self._ring.release()
        self._board.publish(self._learner.network, 1, 0)
        self._board.read(self._policy.network)


def time_of(call: Callable[[], None], seconds: float) -> float:
    """Mean seconds of a call, repeated for about `seconds` after one to warm up."""
    call()
    count, began = 0, time.perf_counter()
    while (spent := time.perf_counter() - began) < seconds or not count:
        call()
        count += 1
    return spent / count


def _environment(run: RunFiles, task: int, count: int) -> Any:
    environment = make_vector_env(run.suite, run.suite.tasks[task], count, run.config.environment, list(range(count)))
    environment.reset()
    return environment
