"""What has to hold before a run starts: shared memory, disk, descriptors. Each failure is one sentence with its remedy."""

import os
import resource
import shutil
from pathlib import Path

from agent.network import Network
from agent.transport.board import board_bytes, num_parameters
from agent.transport.mailbox import mailbox_bytes
from agent.transport.ring import ring_bytes
from launch.config import Config
from launch.learners import choose_device
from launch.plan import INFERENCE, Plan
from launch.process import memory_root, remove_stale_folders
from launch.status import status_bytes

# Room for records and TensorBoard files of the first days.
RECORDS_BYTES = 100 * 2**20


def shared_bytes(plan: Plan, rank: int | None = None) -> int:
    """Bytes of all mapped files of a run, or of one rank's on a machine of its own."""
    count = num_parameters(Network(plan.network))
    num_actors = len(plan.actors)
    status = status_bytes(plan.num_ranks + num_actors + len(plan.services), num_actors, len(plan.task_names))
    mine = [actor for actor in plan.actors if rank is None or actor.rank == rank]
    halves = [sum(group.count for group in half) for actor in mine for half in actor.halves]
    asked = sum(mailbox_bytes(plan.unroll, size) for size in halves) if INFERENCE in plan.services else 0
    ranks = plan.num_ranks if rank is None else 1
    remote = ranks * len(plan.task_names) * ring_bytes(plan.unroll, plan.remote_slots) if plan.remote_slots else 0
    return len(mine) * plan.ring_bytes() + remote + board_bytes(count) + status + asked


def check_machine(config: Config, plan: Plan, run_dir: Path, rank: int | None = None, num_alike: int = 1) -> None:
    """Raise ValueError for the first thing that this machine lacks, for the whole run or for one `rank` of it, which shares
    the machine with others to `num_alike` in all."""
    if config.actor.inference == "batched":
        choose_device(config.actor.inference_device, key="actor.inference_device")
    remove_stale_folders()
    check_memory(num_alike * shared_bytes(plan, rank), len(plan.actors))
    check_disk(config, plan, run_dir)
    check_descriptors(len(plan.actors), config.actor.num_envs)


def check_memory(needed: int, num_actors: int) -> None:
    """ValueError if the shared memory is too small for `needed` bytes."""
    root = memory_root()
    free = shutil.disk_usage(root).free
    if needed > free:
        raise ValueError(
            f"{root} has {megabytes(free)} free, this run needs {megabytes(needed)} of shared memory: use fewer actors "
            f"(actor.num_actors={num_actors}), smaller actor.slots, or in Docker the flag --shm-size={needed // 2**30 + 1}g"
        )


def check_disk(config: Config, plan: Plan, run_dir: Path) -> None:
    """ValueError if the run folder cannot be made, or has no room for checkpoints and records."""
    folder = run_dir
    while not folder.exists():
        folder = folder.parent
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ValueError(f"{folder} is not writable: choose another place with --run-dir")
    # Parameters and mean squares, with Adam means, too, float32; one more file than is kept exists during a save.
    checkpoint = (12 if config.optimiser.name == "adam" else 8) * num_parameters(Network(plan.network))
    needed = (config.checkpoint.keep + 1) * checkpoint + RECORDS_BYTES
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise ValueError(f"{folder} has {megabytes(free)} free, the run needs {megabytes(needed)}: free some or use --run-dir")


def check_descriptors(num_actors: int, num_envs: int) -> None:
    """ValueError if a process may open too few files; the soft limit is raised where it may be."""
    # An actor's environments may be processes, two pipes each; the supervisor holds a few per actor.
    needed = 128 + 4 * max(num_actors, num_envs)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < needed:
        if hard != resource.RLIM_INFINITY and hard < needed:
            raise ValueError(f"a process may open {hard} files here, this run needs {needed}: raise it with ulimit -n {needed}")
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def megabytes(count: int) -> str:
    """For messages."""
    return f"{count / 2**20:,.0f} MB"
