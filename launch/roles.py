"""One process of a run: `python -m launch.roles learner|actor|inference ...`. The wiring; the supervisor starts these."""

import argparse
import functools
import os
import random
import signal
import sys
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch

from agent.actor import Actor, HalfGroup, Member
from agent.distributed import LostRankError, UnequalRanksError
from agent.inference import BatchedPolicy, LocalPolicy
from agent.learner import NonFiniteError
from agent.network import Network
from agent.transport.board import Board, num_parameters
from agent.transport.ledger import Ledger
from agent.transport.listener import FIRST_REMOTE_ACTOR
from agent.transport.ring import Ring
from launch import screen, services
from launch.config import RunFiles, read_run
from launch.inference import inference, open_mailboxes
from launch.learners import choose_device
from launch.plan import INFERENCE, LISTENER, ActorPlan, Plan, environment_seeds, make_plan, probe_seed
from launch.process import EXIT_REFUSED, EXIT_STOPPED, follow_parent, on_stop_request, remove_folders
from launch.ranks import find_place, join, local_place
from launch.remote import LEDGER, RELAY, plan_of, read_machine, remote_record, remote_ring_name
from launch.status import open_status
from launch.training import Training
from tasks.contract import TaskVectorEnv
from tasks.engine import EngineError
from tasks.environment import make_vector_env, probe


def learner(run_dir: Path, memory: Path, rank: int, resume: bool) -> int:
    """Train until done or told to stop, alone or in step with other ranks. Returns the exit code."""
    stop: list[bool] = []
    on_stop_request(lambda: stop.append(True))
    run = read_run(run_dir)
    config = run.config
    torch.set_num_threads(config.learner.threads)
    torch.manual_seed(config.seed)
    np.random.seed(config.seed % 2**32)
    random.seed(config.seed)
    plan = make_plan(run)
    status = open_status(memory, plan)
    mine = [actor.index for actor in plan.actors if actor.rank == rank]
    rings = [Ring(memory / f"ring-{index}", plan.unroll, plan.slots) for index in mine]
    remote = None
    if plan.remote_slots:
        names = [remote_ring_name(rank, task) for task in range(len(plan.task_names))]
        rings += [Ring(memory / name, plan.unroll, plan.remote_slots) for name in names]
        ledger, counters = Ledger(run_dir / LEDGER), services.open_counters(memory, LISTENER)
        remote = functools.partial(remote_record, ledger, counters)
    board = Board(memory / "board", num_parameters(Network(plan.network)))
    try:
        place = find_place(os.environ)
        device = choose_device(config.learner.device, *local_place(place, rank, plan.num_ranks))
        if device.type == "cuda":
            torch.cuda.set_device(device.index or 0)  # what has no device of its own must not go to the first one
        ranks = join(place, config, rank, memory, device)
        is_apart = place is not None
        training = Training(run_dir, run, plan, rings, board, status, resume, device, ranks, is_apart, remote)
        is_done = training.run(lambda: bool(stop))
    except (ValueError, OSError, TimeoutError, NonFiniteError, LostRankError, UnequalRanksError) as error:
        traceback.print_exc()
        print(error, file=sys.stderr)
        return EXIT_STOPPED if isinstance(error, LostRankError) else 1
    ranks.close()
    return 0 if is_done or stop else EXIT_STOPPED


def actor(run_dir: Path, memory: Path, index: int, generation: int) -> int:
    """Play until killed. Returns the exit code."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    run = read_run(run_dir)
    config, suite = run.config, run.suite
    machine = read_machine(run_dir)
    plan = plan_of(run, machine)
    me = plan.actors[index]
    number = index if machine is None else FIRST_REMOTE_ACTOR + machine.first + index
    status = open_status(memory, plan)
    row = status.actor_row(index)
    status.beat(row)
    status.write(row, generation=generation)
    ring = Ring(memory / f"ring-{index}", plan.unroll, plan.slots)
    if config.environment.probe and ring.committed == 0:
        try:
            for task in me.tasks:
                probe(suite, suite.tasks[task], config.environment, probe_seed(config, plan, me, generation))
                status.beat(row)
        except (ValueError, EngineError) as error:
            print(error, file=sys.stderr)
            return EXIT_REFUSED
    make_policy, pull = _policies(run, plan, me, memory, lambda: status.beat(row))
    rng = np.random.default_rng([config.seed, generation, number, *(first for first, _ in plan.seed_blocks[:1])])
    halves = []
    counted: list[tuple[TaskVectorEnv, np.ndarray]] = []
    for groups in me.halves:
        members = []
        for group in groups:
            seeds = environment_seeds(config, plan, me, group, generation)
            environment = make_vector_env(
                suite, suite.tasks[group.task], group.count, config.environment, seeds, spaces=plan.spaces()
            )
            members.append(Member(group.task, environment))
            counted.append((environment, status.engines(index, group.task)))
            status.beat(row)
        halves.append(HalfGroup(members, make_policy, plan.task_names, plan.unroll, number, groups[0].first, rng))
    player = Actor(
        halves,
        pull=pull,
        wait_for_space=lambda count: ring.wait_for_space(count, config.actor.wait_seconds, lambda: status.beat(row)),
        beat=lambda: status.beat(row),
    )
    for rows, column in player.unrolls():
        ring.write(rows, column)
        if column == 0:
            status.write(row, steps=player.steps, **player.seconds)
            for environment, counts in counted:
                counts += environment.new_counts()
    return 0


def _policies(
    run: RunFiles, plan: Plan, me: ActorPlan, memory: Path, beat: Callable[[], None]
) -> tuple[Callable[[list[int]], LocalPolicy | BatchedPolicy], Callable[[], int] | None]:
    """How an actor makes the policies of its half-groups, in their order, and takes parameters for them (see agent.actor)."""
    settings = run.config.actor
    if settings.inference == "batched":
        mailboxes = iter(open_mailboxes(memory, plan, me))
        return lambda tasks: BatchedPolicy(next(mailboxes), tasks, settings.wait_seconds, beat), None
    network = Network(plan.network).eval()
    board = Board(memory / "board", num_parameters(network))
    return partial(LocalPolicy, network), lambda: board.read(network, settings.wait_seconds).version


def service(run_dir: Path, memory: Path) -> int:
    """The listener, or on a machine that has joined the relay. Returns the exit code."""
    on_stop_request(lambda: sys.exit(0))
    torch.set_num_threads(1)
    run, machine = read_run(run_dir), read_machine(run_dir)
    plan = plan_of(run, machine)
    if machine is None:
        return services.listener(run_dir, memory, run, plan)
    return services.relay(run_dir, memory, run, plan, machine)


def main() -> int:
    """Parse, follow the parent, run the role."""
    parser = argparse.ArgumentParser(prog="python -m launch.roles", description=__doc__)
    parser.add_argument("role", choices=["learner", "actor", INFERENCE, LISTENER, RELAY])
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--memory", type=Path, required=True, help="folder of the run's mapped files")
    parser.add_argument("--parent", type=int, required=True, help="process id of the supervisor")
    parser.add_argument("--grace", type=float, required=True, help="seconds to end in when the supervisor is gone")
    parser.add_argument("--index", type=int, default=0)
    parser.add_argument("--generation", type=int, default=0)
    parser.add_argument("--resume", action="store_true")
    arguments = parser.parse_args()
    screen.guard_logs()
    # Denormals make a learner's step half as slow again; each thread has its own flag, so before any other starts.
    torch.set_flush_denormal(True)
    tidies = arguments.role in ("learner", RELAY)
    follow_parent(arguments.parent, arguments.memory, signal.SIGTERM if tidies else signal.SIGKILL, arguments.grace)
    try:
        return play(arguments)
    finally:
        if tidies and os.getppid() != arguments.parent:  # the parent was killed: nobody else is left to tidy up
            remove_folders(arguments.memory)


def play(arguments: argparse.Namespace) -> int:
    """The role. Returns the exit code."""
    if arguments.role == "learner":
        return learner(arguments.run_dir, arguments.memory, arguments.index, arguments.resume)
    if arguments.role == "actor":
        try:
            return actor(arguments.run_dir, arguments.memory, arguments.index, arguments.generation)
        except SystemExit as error:  # its code would be taken for one of ours
            raise RuntimeError(f"an environment called sys.exit({error.code!r})") from error
    if arguments.role == INFERENCE:
        return inference(arguments.run_dir, arguments.memory)
    return service(arguments.run_dir, arguments.memory)


if __name__ == "__main__":
    sys.exit(main())
