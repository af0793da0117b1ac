"""Train one agent on many tasks: configuration -> plan -> checks -> processes.

examples:
  python launch/multitask.py --suite toy
  python launch/multitask.py --suite atari57 --tasks pong,breakout --total-frames 20000000
  python launch/multitask.py --suite my_suite.yaml optimiser.learning_rate=1e-3 actor.num_envs=16
  python launch/multitask.py --suite toy --single-task all --frames-per-task 50000
  python launch/multitask.py --resume runs/toy-20260101-120000
"""

import os
import signal
import sys

if __name__ == "__main__":  # before the slow imports: an interrupt while they load ends without a trace
    for _number in (signal.SIGINT, signal.SIGTERM):
        # At once: an exception would abort the process where C++ code, such as torch's as it loads, calls Python.
        signal.signal(_number, lambda number, _: os._exit(128 + number))
    from launch.screen import keep_descriptors

    keep_descriptors()

import argparse
import contextlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agent import checkpoint
from launch import cluster, screen, series, torchrun
from launch.checks import check_machine, shared_bytes
from launch.config import RunFiles
from launch.learners import choose_device
from launch.plan import describe, make_plan
from launch.ranks import Place, find_place
from launch.remote import check_listen
from launch.start import claim, new_run, resumed_run, start
from tasks.environment import check_suite


def main(arguments: Sequence[str] | None = None) -> int:
    """The command. Exit code 0 done, 1 failed, 2 refused before anything started, 130 or 143 interrupted."""
    options = parse(arguments)
    screen.show_any_letter()
    with contextlib.nullcontext() if options.dry_run else screen.guarded():  # a plan may be read with `less`
        return train(options)


def train(options: argparse.Namespace) -> int:
    """The command, parsed. Exit codes as `main`."""
    try:
        place = find_place(os.environ)
        if place is not None:
            return train_rank(options, place)
        overrides = settings(options)
        is_series = options.single_task is not None or series.is_series(options.resume)
        frames = frames_per_task(options, overrides, is_series)
        if is_series and options.cluster is not None:
            raise ValueError("--single-task does not run with --cluster: train the baselines one after another on one machine")
        if is_series:
            return train_series(options, overrides, frames)
        run_dir, run = run_files(options, overrides, frames)
        plan = make_plan(run)
        if options.dry_run:
            print(json.dumps(describe(run.config, plan, shared_bytes(plan)), indent=2, ensure_ascii=False))
            return 0
        is_default = options.resume is None and options.run_dir is None
        if options.cluster is not None:
            return cluster.train(run_dir, run, is_default)
        choose_device(run.config.learner.device, 0, plan.num_ranks)
        check_suite(run.suite, run.config.environment)
        check_machine(run.config, plan, run_dir)
        check_listen(run.config.remote)
        run_dir, lock = claim(run_dir, is_default)
    except (ValueError, OSError) as error:
        print(f"multitask: {error}", file=sys.stderr)
        return 2
    with lock:
        try:
            code = start(run_dir, run, plan, options.resume is not None, overrides, [])
        except OSError as error:
            print(f"multitask: {error}", file=sys.stderr)
            return 1
    say_what_next(run_dir, code)
    return code


def say_what_next(run_dir: Path, code: int) -> None:
    """The command that follows a run which ended with this exit code."""
    if code == 0:
        print(f"done: python eval/score.py {run_dir}")
    elif checkpoint.exists(run_dir):
        print(f"continue with: python launch/multitask.py --resume {run_dir}")


def train_rank(options: argparse.Namespace, place: Place) -> int:
    """The command under torchrun, where this process supervises one rank. Exit codes as `main`.

    Raises:
        ValueError, OSError: refused before anything started, here or on another rank.
    """
    if options.single_task is not None or series.is_series(options.resume):
        raise ValueError("--single-task does not run under torchrun: use learner.ranks=N on one machine")
    overrides = settings(options)

    def make() -> tuple[Path, RunFiles]:
        return run_files(options, torchrun.with_ranks(overrides, place.size), frames_per_task(options, overrides, False))

    if options.dry_run:
        if place.rank == 0:
            run, plan = torchrun.whole_plan(make()[1], place)
            print(json.dumps(describe(run.config, plan, shared_bytes(plan)), indent=2, ensure_ascii=False))
        return 0
    is_default = options.resume is None and options.run_dir is None
    run_dir, code = torchrun.train_rank(place, make, options.resume is not None, is_default, overrides)
    if place.rank == 0:
        say_what_next(run_dir, code)
    return code


def run_files(options: argparse.Namespace, overrides: list[str], frames: int | None) -> tuple[Path, RunFiles]:
    """Folder and files of the run, new or to be continued; `frames` is the number of --frames-per-task.

    Raises:
        ValueError, OSError: one sentence; nothing was written.
    """
    if options.resume is None:
        return new_run(options.suite, options.config, overrides, options.run_dir, frames)
    return options.resume, resumed_run(options.resume, options.suite, overrides)


def train_series(options: argparse.Namespace, overrides: list[str], frames: int | None) -> int:
    """The command with --single-task, or with --resume of what that has begun.

    Raises:
        ValueError, OSError: refused before anything started.
    """
    if options.resume is None:
        assert frames is not None
        parent, baselines = series.new_series(
            options.suite, options.config, overrides, options.run_dir, options.single_task, frames
        )
    else:
        parent = options.resume
        baselines = series.resumed_series(parent, options.suite, overrides, options.single_task, frames)
    if options.dry_run:
        print(json.dumps(series.describe_series(parent, baselines), indent=2, ensure_ascii=False))
        return 0
    return series.run_series(parent, baselines, overrides, is_default=options.resume is None and options.run_dir is None)


class Once(argparse.Action):
    """A flag that may be given once: of two values, one would be lost in silence."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option_string: str | None = None
    ) -> None:
        """Store the value."""
        if getattr(namespace, self.dest) is not None:
            parser.error(f"{option_string} is set twice: set it once")
        setattr(namespace, self.dest, values)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Command line; argparse ends with exit code 2 on an unknown flag."""
    parser = argparse.ArgumentParser(
        prog="multitask.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--suite", action=Once, metavar="NAME|FILE.yaml", help="dmlab30, atari57, atari5, toy, or your own")
    parser.add_argument("--tasks", action=Once, metavar="A,B", help="only these tasks of the suite")
    parser.add_argument(
        "--preset", action=Once, choices=["fast", "published"], help="settings for a small machine, or of papers"
    )
    parser.add_argument("--config", action=Once, type=Path, metavar="FILE", help="YAML file with settings")
    parser.add_argument("--run-dir", action=Once, type=Path, metavar="DIR", help="default: runs/SUITE-TIME")
    parser.add_argument("--resume", action=Once, type=Path, metavar="RUN", help="continue a run from its newest checkpoint")
    parser.add_argument("--total-frames", action=Once, metavar="N", help="environment frames to train on")
    parser.add_argument("--frames-per-task", action=Once, metavar="N", help="total frames = N times the number of tasks")
    parser.add_argument(
        "--single-task", action=Once, metavar="all|A,B", help="a run of its own per task, one after another, as baselines"
    )
    parser.add_argument("--listen", action=Once, metavar="ADDRESS", help="actors on other machines join at tcp://0.0.0.0:5555")
    parser.add_argument("--seed", action=Once, metavar="N", help="0 to 2^63-1")
    parser.add_argument("--cluster", action=Once, choices=["ray"], help="place learners and actors on the nodes of a cluster")
    parser.add_argument("--dry-run", action="store_true", help="print configuration and plan as JSON, start nothing")
    parser.add_argument("settings", nargs="*", metavar="key=value", help="any setting, such as loss.entropy_cost=0.02")
    options = parser.parse_intermixed_args(arguments)
    if options.resume is None and options.suite is None:
        parser.error("name a suite: --suite toy")
    if options.resume is not None and (options.run_dir is not None or options.config is not None):
        parser.error("--resume continues in its own folder with its own configuration: leave out --run-dir and --config")
    return options


def settings(options: argparse.Namespace) -> list[str]:
    """Flags that are settings, and settings, as key=value.

    Raises:
        ValueError: an empty name in --tasks, or an address beside --cluster.
    """
    flags = []
    if options.tasks is not None:
        names = [name.strip() for name in options.tasks.split(",")]
        if not all(names):
            raise ValueError(f"--tasks {options.tasks!r} has an empty name: write --tasks a,b, or leave it out for all tasks")
        flags.append(f"tasks={json.dumps(names, ensure_ascii=False)}")
    if options.preset is not None:
        flags.append(f"preset={options.preset}")
    if options.total_frames is not None:
        flags.append(f"total_frames={whole(options.total_frames)}")
    if options.cluster is not None:
        if options.listen is not None:
            raise ValueError(f"--listen {options.listen}: --cluster chooses where its learners listen, leave it out")
        flags += cluster.SETTINGS
    if options.seed is not None:
        flags.append(f"seed={options.seed}")
    if options.listen is not None:
        flags.append(f"remote.listen={json.dumps(options.listen)}")
    return [*flags, *options.settings]


def frames_per_task(options: argparse.Namespace, overrides: list[str], is_series: bool) -> int | None:
    """The number of --frames-per-task, if it is given.

    Raises:
        ValueError: it is no whole number of at least 1, is needed and missing, or contradicts another setting.
    """
    keys = {text.partition("=")[0] for text in overrides}
    if is_series and "tasks" in keys:
        raise ValueError(
            "--single-task names the tasks that get a run of their own: leave out --tasks; for the baselines of a run of "
            "some tasks only, put `tasks: [a, b]` into a file for --config"
        )
    if is_series and "total_frames" in keys:
        raise ValueError("total_frames is the same as the frames per task in a series of single tasks: use --frames-per-task")
    text = options.frames_per_task
    if text is None:
        if is_series and options.resume is None:
            raise ValueError("--single-task needs --frames-per-task N: as many as the run to compare with has for each task")
        return None
    if "total_frames" in keys:
        raise ValueError(f"--frames-per-task {text} and total_frames set the same thing: leave one of them out")
    if options.resume is not None and not is_series:
        raise ValueError("--frames-per-task is for a new run or a series: to change the end of this run use --total-frames")
    number = whole(text)
    if not number.isdecimal() or int(number) < 1:
        raise ValueError(f"--frames-per-task {text} is no whole number of at least 1: write --frames-per-task 1000000")
    return int(number)


def whole(text: str) -> str:
    """`1e9` as `1000000000`; anything else as it is, for the configuration to judge."""
    try:
        number = float(text)
    except ValueError:
        return text
    return str(int(number)) if "e" in text.lower() and number.is_integer() else text


if __name__ == "__main__":
    sys.exit(main())
