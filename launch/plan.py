"""From a configuration to the plan of a run: who plays what, with which seeds, in how much shared memory. Pure."""

import dataclasses
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from agent.network import NetworkSpec
from agent.transport.ring import ring_bytes
from agent.unroll import UnrollSpec
from launch.config import Config, RunFiles
from tasks.assignment import assign
from tasks.environment import Spaces
from tasks.seeds import environment_seed
from tasks.suite import Suite

# Numbers of seeds: the run's own actors count up from 0, those of other machines have a part of the numbers that neighbouring
# runs do not share (tasks/seeds.py), and when that is used up the upper half of all.
REMOTE_SEEDS = range(3 * 2**16, 2**18)
MORE_REMOTE_SEEDS = 2**29
LISTENER = "listener"
# The service that runs the network for all actors of a machine.
INFERENCE = "inference"


@dataclass(frozen=True)
class Group:
    """One vector environment: `count` environments of task `task` (index in the suite), first of them number `first`."""

    task: int
    first: int
    count: int


@dataclass(frozen=True)
class ActorPlan:
    """One actor: its tasks, its two half-groups of vector environments, and the learner rank that it feeds."""

    index: int
    tasks: tuple[int, ...]
    halves: tuple[tuple[Group, ...], ...]
    rank: int

    @property
    def num_envs(self) -> int:
        """Environments that it really has."""
        return sum(group.count for half in self.halves for group in half)


@dataclass(frozen=True)
class Plan:
    """Everything that follows from a configuration before anything starts.

    notes: sentences that a person should read. num_ranks: learners. services: names of the other roles, such as a relay.
    remote_slots: of each ring for actors on other machines, 0 = there are none. seed_blocks: first number and count, as the
    run gave them to this machine; none = this is the run's own.
    """

    task_names: tuple[str, ...]
    actors: tuple[ActorPlan, ...]
    slots: int
    unroll: UnrollSpec
    network: NetworkSpec
    frames_per_step: int
    notes: tuple[str, ...]
    num_ranks: int = 1
    services: tuple[str, ...] = ()
    remote_slots: int = 0
    seed_blocks: tuple[tuple[int, int], ...] = ()

    def ring_bytes(self) -> int:
        """Of one actor."""
        return ring_bytes(self.unroll, self.slots)

    def spaces(self) -> Spaces:
        """What the environments showed when the run was planned: nobody has to build them again to know."""
        network = self.network
        actions = tuple(network.legal_actions.values())
        return Spaces(network.frame_shape, network.frame_dtype, network.instruction_length, actions, self.frames_per_step)


def make_plan(run: RunFiles, cores: int | None = None) -> Plan:
    """The plan of a run; without a number of actors it depends on the `cores` of all machines, by default of this one.

    Raises:
        ValueError: too few actors or environments for the tasks; says how many are needed.
    """
    config = run.config
    actors = () if config.remote.only else _actors(run, cores)
    largest = max((sum(group.count for group in half) for one in actors for half in one.halves), default=0)
    if 0 < config.actor.slots < largest:
        raise ValueError(
            f"actor.slots={config.actor.slots} is too few: a half-group hands over its {largest} unrolls together, "
            f"use {largest} or more"
        )
    if config.remote.only and not config.remote.listen:
        raise ValueError("remote.only=true leaves nobody to play: add --listen tcp://0.0.0.0:5555")
    return Plan(
        run.suite.task_names,
        actors,
        config.actor.slots or config.actor.num_envs,
        unroll_spec(run.network, config.actor.unroll_length),
        run.network,
        run.frames_per_step,
        tuple(_notes(config, len(actors), len(run.suite.tasks))),
        config.learner.ranks,
        tuple(_services(config, actors)),
        remote_slots=config.remote.slots if config.remote.listen else 0,
    )


def _services(config: Config, actors: tuple[ActorPlan, ...]) -> Iterator[str]:
    if config.actor.inference == "batched" and actors:
        yield INFERENCE
    if config.remote.listen:
        yield LISTENER


def _actors(run: RunFiles, cores: int | None) -> tuple[ActorPlan, ...]:
    """The actors beside the learners, or of a machine that has joined."""
    actor = run.config.actor
    num_tasks = len(run.suite.tasks)
    ranks = run.config.learner.ranks
    cores = max(cores or os.cpu_count() or 1, ranks)
    if actor.automatic == "fewest":
        automatic = max(ranks, -(-num_tasks // actor.num_envs), num_tasks if run.config.learner.balance == "frames" else 1)
    else:
        automatic = max(num_tasks, cores) if num_tasks <= 4 * cores else cores
    num_actors = actor.num_actors or automatic
    if run.config.learner.balance == "frames" and num_actors < num_tasks:
        raise ValueError(
            f"learner.balance=frames needs an actor per task, there are {num_actors} for {num_tasks} tasks: "
            f"use actor.num_actors={num_tasks}, or learner.balance=actors"
        )
    assignment = assign(run.suite.task_names, num_actors, actor.num_envs, actor.weights)
    if num_actors < ranks:
        raise ValueError(
            f"learner.ranks={ranks} needs an actor for each rank, there are {num_actors}: "
            f"use actor.num_actors={ranks} or more, or fewer ranks"
        )
    return tuple(
        ActorPlan(index, tasks, split_halves(tasks, actor.num_envs), rank)
        for index, (tasks, rank) in enumerate(zip(assignment, deal_ranks(assignment, ranks), strict=True))
    )


def deal_ranks(assignment: Sequence[tuple[int, ...]], ranks: int) -> list[int]:
    """The learner rank of each actor: equal numbers, and the actors of a task on as many ranks as there can be."""
    dealt = [0] * len(assignment)
    for number, index in enumerate(sorted(range(len(assignment)), key=lambda i: assignment[i])):
        dealt[index] = number % ranks
    return dealt


def network_spec(config: Config, suite: Suite, spaces: Spaces) -> NetworkSpec:
    """The network of a new run."""
    return NetworkSpec(
        config.network,
        spaces.frame_shape,
        spaces.frame_dtype,
        spaces.instruction_length,
        max(spaces.num_actions),
        dict(zip(suite.task_names, spaces.num_actions, strict=True)),
    )


def unroll_spec(network: NetworkSpec, unroll_length: int) -> UnrollSpec:
    """The unroll that fits a network."""
    return UnrollSpec(
        unroll_length,
        network.frame_shape,
        network.frame_dtype,
        network.instruction_length,
        network.num_actions,
        network.settings.state_size,
    )


def split_halves(tasks: tuple[int, ...], num_envs: int) -> tuple[tuple[Group, ...], ...]:
    """Two half-groups of equal work: every task in both where its share of environments is even, else half the tasks each."""
    count = num_envs // len(tasks)
    if count % 2 == 0:
        parts = [[(task, count // 2) for task in tasks]] * 2
    else:
        middle = (len(tasks) + 1) // 2
        parts = [[(task, count) for task in tasks[:middle]], [(task, count) for task in tasks[middle:]]]
    halves, first = [], 0
    for part in parts:
        groups = []
        for task, size in part:
            groups.append(Group(task, first, size))
            first += size
        halves.append(tuple(groups))
    return tuple(halves)


def environment_seeds(config: Config, plan: Plan, actor: ActorPlan, group: Group, generation: int) -> list[int]:
    """Seeds of one vector environment. `generation` counts all starts of actors in the life of the run, so a restarted or
    resumed actor plays new episodes. The first seed number of a generation is the probe's.

    Raises:
        ValueError: a machine has used up what the run gave it.
    """
    start = _first_number(config, plan, actor, generation) + 1 + group.first
    return [environment_seed(config.seed, _seed_index(plan, start + i)) for i in range(group.count)]


def probe_seed(config: Config, plan: Plan, actor: ActorPlan, generation: int) -> int:
    """Seed of the check for dead observations; no environment of the run has it."""
    return environment_seed(config.seed, _seed_index(plan, _first_number(config, plan, actor, generation)))


def seeds_per_start(config: Config) -> int:
    """Numbers that a start of an actor on another machine uses up at most."""
    return config.actor.num_envs + 1


def _first_number(config: Config, plan: Plan, actor: ActorPlan, generation: int) -> int:
    if not plan.seed_blocks:
        stride = max(a.num_envs for a in plan.actors) + 1
        return (generation * len(plan.actors) + actor.index) * stride
    # Generation 1 is the start of all actors of a machine, each later one that of a single actor.
    starts = actor.index if generation == 1 else len(plan.actors) + generation - 2
    position = starts * seeds_per_start(config)
    for first, count in plan.seed_blocks:
        if position < count:
            return first + position
        position -= count
    raise ValueError(f"there are no seeds left for actor {actor.index}: waiting for the run to give more")


def _seed_index(plan: Plan, number: int) -> int:
    """Indices of tasks/seeds.py: two disjoint sets for the run's own machine and for all others."""
    if plan.seed_blocks:
        return REMOTE_SEEDS.start + number if number < len(REMOTE_SEEDS) else MORE_REMOTE_SEEDS + number - len(REMOTE_SEEDS)
    index = number if number < REMOTE_SEEDS.start else number + len(REMOTE_SEEDS)
    if index >= MORE_REMOTE_SEEDS:
        raise ValueError("the run has used up all seeds: start a new one")
    return index


def describe(config: Config, plan: Plan, shared_bytes: int) -> dict[str, Any]:
    """The plan as plain types, for --dry-run."""
    return {
        "config": dataclasses.asdict(config),
        "plan": {
            "tasks": list(plan.task_names),
            "actors": [
                {
                    "actor": actor.index,
                    "tasks": [plan.task_names[task] for task in actor.tasks],
                    "num_envs": actor.num_envs,
                    "learner_rank": actor.rank,
                    "half_groups": [
                        [{"task": plan.task_names[g.task], "num_envs": g.count} for g in half] for half in actor.halves
                    ],
                    "seeds": [seed for group in groups(actor) for seed in environment_seeds(config, plan, actor, group, 0)],
                }
                for actor in plan.actors
            ],
            "learner": {
                "batch_size": config.learner.batch_size,
                "device": config.learner.device,
                "ranks": config.learner.ranks,
            },
            "frame_shape": list(plan.unroll.frame_shape),
            "num_actions": dict(plan.network.legal_actions),
            "frames_per_step": plan.frames_per_step,
            "unroll_bytes": plan.unroll.unroll_bytes(),
            "shared_memory_bytes": shared_bytes,
            "notes": list(plan.notes),
        },
    }


def groups(actor: ActorPlan) -> Iterator[Group]:
    """All vector environments of an actor."""
    for half in actor.halves:
        yield from half


def _notes(config: Config, num_actors: int, num_tasks: int) -> Iterator[str]:
    if 0 < num_actors < num_tasks:
        each = config.actor.num_envs // -(-num_tasks // num_actors)
        yield (
            f"{num_actors} actors play {num_tasks} tasks: each holds several tasks with {each} or more environments per task "
            f"(actor.num_actors={num_tasks} gives every task its own)"
        )
    if config.learner.balance == "actors":
        yield "tasks feed the learner as fast as their actors play: see `share` per task (learner.balance=frames evens it out)"
    else:
        yield "tasks feed the learner equal frames: fast actors wait for slow ones"
        if config.learner.ranks > 1:
            yield "learner.balance=frames is kept within each rank: shares are equal if each rank has actors of every task"
