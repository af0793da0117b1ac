"""The inference process: it owns a network, takes the newest parameters from the board, and answers the actors' requests."""

import os
import time
from pathlib import Path

import torch

from agent.device import allow_tf32
from agent.inference import answer
from agent.network import Network
from agent.transport.board import Board, num_parameters
from agent.transport.mailbox import Mailbox
from launch.config import read_run
from launch.learners import choose_device
from launch.plan import INFERENCE, ActorPlan, Plan
from launch.ranks import find_place, local_place, ranks_here
from launch.remote import plan_of, read_machine
from launch.status import open_status

POLL_SECONDS = 1e-4
WRITE_SECONDS = 1.0


def open_mailboxes(memory: Path, plan: Plan, actor: ActorPlan, create: bool = False) -> list[Mailbox]:
    """One per half-group of an actor."""
    sizes = [sum(group.count for group in half) for half in actor.halves]
    return [Mailbox(memory / f"mailbox-{actor.index}-{half}", plan.unroll, size, create) for half, size in enumerate(sizes)]


def inference(run_dir: Path, memory: Path) -> int:
    """Answer until killed. Returns the exit code."""
    torch.set_num_threads(1)
    run = read_run(run_dir)
    machine = read_machine(run_dir)
    config, plan = run.config, plan_of(run, machine)
    status = open_status(memory, plan)
    row = status.service_row(plan.services.index(INFERENCE))
    status.beat(row)
    place = find_place(os.environ)
    local = local_place(place, 0, 1)  # beside a rank started apart: that rank's GPU
    device = choose_device(config.actor.inference_device, *local, key="actor.inference_device")
    network = Network(plan.network).eval().to(device)
    allow_tf32(config.learner.tf32)
    board = Board(memory / "board", num_parameters(network))
    # A machine that has joined has no ranks, and all actors of its plan.
    ranks = ranks_here(place, plan.num_ranks)
    mine = [actor for actor in plan.actors if machine is not None or actor.rank in ranks]
    mailboxes = [mailbox for actor in mine for mailbox in open_mailboxes(memory, plan, actor)]
    version: int | None = None  # nothing is answered before the learner's first parameters are here
    answered, written = 0, 0.0
    while True:
        status.beat(row)
        waiting = [mailbox for mailbox in mailboxes if mailbox.pending]
        if not waiting:
            time.sleep(POLL_SECONDS)
            continue
        if board.version() != version:
            version = board.read(network, config.actor.wait_seconds).version
        answer(network, version, waiting)
        answered += len(waiting)
        if time.monotonic() - written > WRITE_SECONDS:
            written = time.monotonic()
            status.write(row, steps=answered)
