"""The command as one of several processes that torchrun started: each supervises one learner rank and that rank's actors."""

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import IO

from launch.checks import check_machine
from launch.config import RunFiles, code_version, parse_run, run_texts
from launch.learners import choose_device
from launch.plan import Plan, make_plan
from launch.ranks import Place, Talk, rank_folder
from launch.remote import MAX_LISTENERS, check_listen
from launch.start import claim, start
from launch.workers import next_generation
from tasks.environment import check_suite


def with_ranks(overrides: list[str], size: int) -> list[str]:
    """Settings with learner.ranks as torchrun has it.

    Raises:
        ValueError: they have another number.
    """
    for text in overrides:
        key, _, value = text.partition("=")
        if key == "learner.ranks" and value != str(size):
            raise ValueError(f"{text} is not the WORLD_SIZE={size} that torchrun started: leave it out")
    return [*(text for text in overrides if not text.startswith("learner.ranks=")), f"learner.ranks={size}"]


def with_port(run: RunFiles, rank: int) -> RunFiles:
    """A run's files for a rank that listens for actors of its own: its number is added to the port, as ranks may share a
    machine.

    Raises:
        ValueError: too many ranks for that.
    """
    remote = run.config.remote
    if not remote.listen:
        return run
    if rank >= MAX_LISTENERS:
        raise ValueError(f"remote.listen={remote.listen} works with up to {MAX_LISTENERS} ranks under torchrun: leave it out")
    host, _, port = remote.listen.rpartition(":")
    mine = replace(remote, listen=f"{host}:{int(port) + rank}")
    return run._replace(config=replace(run.config, remote=mine))


def whole_plan(run: RunFiles, place: Place) -> tuple[RunFiles, Plan]:
    """The plan of a run on all machines, with the number of actors written down: other machines may have other cores."""
    plan = make_plan(run, (os.cpu_count() or 1) * place.size // place.local_size)
    actor = replace(run.config.actor, num_actors=len(plan.actors))
    return run._replace(config=replace(run.config, actor=actor)), plan


def train_rank(
    place: Place, make: Callable[[], tuple[Path, RunFiles]], resume: bool, is_default: bool, overrides: list[str]
) -> tuple[Path, int]:
    """Agree with the other ranks, and supervise this one. Returns the run's folder and the exit code.

    Args:
        place: of this process.
        make: folder and files of the run; only rank 0 asks for them.
        resume: continue from the newest checkpoint.
        is_default: the folder's name may be changed if it is taken.
        overrides: settings of the command line, for the log.

    Raises:
        ValueError, OSError: refused before anything started, here or on another rank.
    """
    talk = Talk(place)
    if place.rank == 0:
        folder, lock, run, plan, generation = _lead(talk, make, resume, is_default)
    else:
        folder, lock, run, plan, generation, resume = _follow(talk)
    with lock:
        try:
            return folder, start(folder, run, plan, resume, overrides, [], generation, place.rank)
        except OSError as error:
            print(f"multitask: {error}", file=sys.stderr)
            return folder, 1


def _lead(
    talk: Talk, make: Callable[[], tuple[Path, RunFiles]], resume: bool, is_default: bool
) -> tuple[Path, IO[str], RunFiles, Plan, int]:
    try:
        folder, run = make()
        run, plan = whole_plan(run, talk.place)
        _check(run, plan, folder, talk.place)
        folder, lock = claim(folder, is_default)
    except (ValueError, OSError) as error:
        talk.refuse("run", str(error))
        raise
    talk.say("run", run_dir=str(folder), texts=run_texts(run), resume=resume)
    try:
        others = [talk.hear("ready", rank)["generation"] for rank in range(1, talk.place.size)]
    except ValueError as error:
        lock.close()
        talk.refuse("go", str(error))
        raise
    generation = max(next_generation(folder), *others)
    talk.say("go", generation=generation)
    return folder, lock, run, plan, generation


def _follow(talk: Talk) -> tuple[Path, IO[str], RunFiles, Plan, int, bool]:
    facts = talk.hear("run", 0)
    try:
        run = parse_run(facts["texts"])
        if run.code_version != code_version():
            raise ValueError(f"rank 0 has version {run.code_version} of this program, this one {code_version()}: use the same")
        run = with_port(run, talk.place.rank)
        plan = make_plan(run)
        folder = rank_folder(Path(facts["run_dir"]), talk.place.rank)
        _check(run, plan, folder, talk.place)
        folder, lock = claim(folder, is_default=False)
    except (ValueError, OSError) as error:
        talk.refuse("ready", str(error))
        raise
    talk.say("ready", generation=next_generation(folder))
    return folder, lock, run, plan, talk.hear("go", 0)["generation"], facts["resume"]


def _check(run: RunFiles, plan: Plan, folder: Path, place: Place) -> None:
    choose_device(run.config.learner.device, place.local_rank, place.local_size)
    check_suite(run.suite, run.config.environment)
    check_machine(run.config, plan, folder, place.rank, place.local_size)
    check_listen(run.config.remote)
