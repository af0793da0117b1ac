"""Plays whole games of a task with a checkpoint's parameters: the same games whether one or many run in parallel."""

import dataclasses
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from agent.inference import LocalPolicy
from agent.network import Network
from tasks.contract import EnvironmentSettings, Observations, TaskVectorEnv
from tasks.engine import EngineError
from tasks.environment import make_vector_env, suite_spaces
from tasks.seeds import evaluation_seed
from tasks.suite import Suite

# Beside a game's seed: actions must not be drawn from the stream that an environment makes of the same seed.
ACTION_STREAM = 1
# At a game whose engine dies: it is played anew, with the same seed.
ATTEMPTS = 2


@dataclass(frozen=True)
class Game:
    """A whole game: its index, raw return, environment frames and agent steps."""

    index: int
    raw_return: float
    frames: int
    steps: int


@dataclass
class Slot:
    """A game being played: its environment and generator, the row the policy reads next, and the sums so far."""

    env: TaskVectorEnv
    index: int
    generator: np.random.Generator
    observations: Observations
    reward: float = 0.0
    first: bool = True
    over: bool = False
    failure: EngineError | None = None
    attempt: int = 1
    raw_return: float = 0.0
    frames: int = 0
    steps: int = 0


def play_games(
    suite: Suite,
    task_name: str,
    network: Network,
    settings: EnvironmentSettings,
    indices: Sequence[int],
    num_envs: int,
    base_seed: int,
    split: str,
) -> Iterator[Game]:
    """Play the games of these indices, `num_envs` at a time, actions sampled; yield each when it is over.

    Game i always has the same environment seed and the same generator for its actions, and each game that starts is
    played to its end and counted: neither the number in parallel nor a game's length moves a result. Give a network in
    float64: in float32 log-probabilities change with the size of the batch, enough to change an action now and then.
    Raises ValueError where the network has no such task, where an environment cannot be made, and on NaN in the policy.
    """
    if task_name not in network.task_names:
        raise ValueError(f"The checkpoint knows no task '{task_name}', only: {', '.join(network.task_names)}.")
    head = network.task_names.index(task_name)
    task = suite.task(task_name)
    # A single-task baseline reads the instructions of its whole suite, which its own task may lack.
    words = network.spec.instruction_length
    spaces = dataclasses.replace(suite_spaces(suite, settings), instruction_length=words)
    waiting = deque(indices)
    slots: list[Slot] = []

    def start_game(index: int, attempt: int = 1) -> Slot:
        # A new environment for each game: not every engine's seeded reset forgets the games before it (dm_env has no
        # seeded reset at all).
        seed = evaluation_seed(base_seed, task_name, index)
        env = make_vector_env(suite, task, 1, settings, [seed], training=False, split=split, spaces=spaces)
        try:
            first = env.reset()[0]
        except EngineError as error:
            env.close()
            return start_game(index, again(index, attempt, error))
        return Slot(env, index, np.random.default_rng((seed, ACTION_STREAM)), first, attempt=attempt)

    try:
        while waiting and len(slots) < num_envs:
            slots.append(start_game(waiting.popleft()))
        policy = LocalPolicy(network, [head] * len(slots))
        while slots:
            advance(slots, policy)
            columns: list[int] = []
            for column, slot in enumerate(slots):
                if slot.failure is not None:
                    slot.env.close()
                    slots[column] = start_game(slot.index, again(slot.index, slot.attempt, slot.failure))
                elif slot.over:
                    slot.env.close()
                    yield Game(slot.index, slot.raw_return, slot.frames, slot.steps)
                    if not waiting:
                        continue
                    slots[column] = start_game(waiting.popleft())
                columns.append(column)
            if len(columns) < len(slots):
                slots = [slots[column] for column in columns]
                policy = keep_columns(policy, columns)
    finally:
        for slot in slots:
            slot.env.close()


def again(index: int, attempt: int, error: EngineError) -> int:
    """The number of the next attempt at a game whose engine died; ValueError where that has happened twice."""
    if attempt == ATTEMPTS:
        raise ValueError(f"game {index} cannot be played: {error}, {attempt} times") from error
    return attempt + 1


def advance(slots: Sequence[Slot], policy: LocalPolicy) -> None:
    """One agent step of all games: one forward pass, then all environments step at the same time."""
    rows = {name: np.concatenate([slot.observations[name] for slot in slots]) for name in slots[0].observations}
    actions, log_probs = policy.act(
        rows["frame"],
        rows.get("instruction"),
        np.array([slot.reward for slot in slots]),
        np.array([slot.first for slot in slots]),
        np.array([slot.generator.random() for slot in slots]),
    )
    if not np.isfinite(log_probs).all():
        raise ValueError("The network's log-probabilities are not finite: the checkpoint or an observation holds NaN.")
    for slot, action in zip(slots, actions, strict=True):
        slot.env.step_async(np.array([action]))
    for slot in slots:
        try:
            slot.observations, rewards, terminated, truncated, infos = slot.env.step_wait()
        except EngineError as error:
            slot.failure = error
            continue
        slot.reward = float(rewards[0])
        slot.first = False
        slot.over = bool(terminated[0] or truncated[0])
        slot.raw_return += slot.reward
        slot.frames += int(infos["frames"][0])
        slot.steps += 1


def keep_columns(policy: LocalPolicy, columns: Sequence[int]) -> LocalPolicy:
    """The policy for some of its environments, with what it carries for them."""
    kept = LocalPolicy(policy.network, [policy.tasks[column] for column in columns])
    kept.core_state = policy.core_state[list(columns)]
    kept.last_action = policy.last_action[list(columns)]
    return kept
