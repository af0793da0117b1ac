"""Train one agent on many tasks: configuration -> plan -> checks -> processes.

examples:
  python launch/multitask.py --suite toy
  python launch/multitask.py --suite atari57 --tasks pong,breakout --total-frames 20000000
  python launch/multitask.py --suite my_suite.yaml optimiser.learning_rate=1e-3 actor.num_envs=16
  python launch/multitask.py --resume runs/toy-20260101-120000
"""

import os
import signal
import sys

if __name__ == "__main__":  # before the slow imports: an interrupt while they load ends without a trace
    for _number in (signal.SIGINT, signal.SIGTERM):
        # At once: an exception would abort the process where C++ code, such as torch's as it loads, calls Python.
        signal.signal(_number, lambda number, _: os._exit(128 + number))

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

from agent import checkpoint
from agent.network import NetworkSpec
from launch.checks import check_machine, megabytes, shared_bytes
from launch.config import RunFiles, load_config, override_config, read_run, suite_of, write_run
from launch.display import Display
from launch.plan import Plan, describe, make_plan, network_spec
from launch.process import hold
from launch.supervisor import Supervisor
from launch.training import choose_device
from tasks.environment import check_suite, suite_spaces

# Settings that a resumed run keeps: with others it is another run, and its records would be of two kinds.
FIXED_ON_RESUME = (
    *("seed", "network", "environment.atari_protocol", "environment.action_repeat", "loss.time_limit"),
    *(f"environment.dmlab.{key}" for key in ("width", "height", "action_set", "episode_end", "dummy_dataset", "engine")),
)
LOCK = "lock"


def main(arguments: Sequence[str] | None = None) -> int:
    """The command. Exit code 0 done, 1 failed, 2 refused before anything started, 130 or 143 interrupted."""
    options = parse(arguments)
    try:
        overrides = settings(options)
        if options.resume is None:
            run_dir, run = new_run(options, overrides)
        else:
            run_dir, run = options.resume, resumed_run(options.resume, options.suite, overrides)
        plan = make_plan(run)
        if options.dry_run:
            print(json.dumps(describe(run.config, plan, shared_bytes(plan)), indent=2, ensure_ascii=False))
            return 0
        choose_device(run.config.learner.device)
        check_suite(run.suite, run.config.environment)
        check_machine(run.config, plan, run_dir)
        run_dir, lock = claim(run_dir, is_default=options.resume is None and options.run_dir is None)
    except (ValueError, OSError) as error:
        print(f"multitask: {error}", file=sys.stderr)
        return 2
    with lock:
        try:
            return start(run_dir, run, plan, options.resume is not None, overrides)
        except OSError as error:
            print(f"multitask: {error}", file=sys.stderr)
            return 1


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
    parser.add_argument("--config", action=Once, type=Path, metavar="FILE", help="YAML file with settings")
    parser.add_argument("--run-dir", action=Once, type=Path, metavar="DIR", help="default: runs/SUITE-TIME")
    parser.add_argument("--resume", action=Once, type=Path, metavar="RUN", help="continue a run from its newest checkpoint")
    parser.add_argument("--total-frames", action=Once, metavar="N", help="environment frames to train on")
    parser.add_argument("--seed", action=Once, metavar="N", help="0 to 2^63-1")
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
        ValueError: an empty name in --tasks.
    """
    flags = []
    if options.tasks is not None:
        names = [name.strip() for name in options.tasks.split(",")]
        if not all(names):
            raise ValueError(f"--tasks {options.tasks!r} has an empty name: write --tasks a,b, or leave it out for all tasks")
        flags.append(f"tasks={json.dumps(names, ensure_ascii=False)}")
    if options.total_frames is not None:
        flags.append(f"total_frames={whole(options.total_frames)}")
    if options.seed is not None:
        flags.append(f"seed={options.seed}")
    return [*flags, *options.settings]


def whole(text: str) -> str:
    """`1e9` as `1000000000`; anything else as it is, for the configuration to judge."""
    try:
        number = float(text)
    except ValueError:
        return text
    return str(int(number)) if "e" in text.lower() and number.is_integer() else text


def new_run(options: argparse.Namespace, overrides: list[str]) -> tuple[Path, RunFiles]:
    """Folder and files of a new run; nothing is written yet.

    Raises:
        ValueError, OSError: one sentence that names the key, the value and the remedy.
    """
    config = load_config(options.suite, options.config, overrides)
    suite = suite_of(config)
    run_dir = options.run_dir or Path("runs") / f"{suite.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    if run_dir.exists() and not run_dir.is_dir():
        raise ValueError(f"--run-dir {run_dir} is a file: choose another")
    if run_dir.exists() and any(run_dir.iterdir()):
        raise ValueError(f"--run-dir {run_dir} exists and is not empty: choose another, or continue it with --resume {run_dir}")
    spaces = suite_spaces(suite, config.environment)
    return run_dir, RunFiles(config, suite, network_spec(config, suite, spaces), spaces.frames_per_step)


def resumed_run(run_dir: Path, suite_name: str | None, overrides: list[str]) -> RunFiles:
    """Files of a run to be continued, from its newest checkpoint or, if it has none yet, from its start.

    Raises:
        ValueError, OSError: one sentence; the run is as it was.
    """
    run = read_run(run_dir)
    overrides = overrides + ([f"suite={suite_name}"] if suite_name is not None else [])
    config = override_config(run.config, overrides, FIXED_ON_RESUME)
    changed = any(getattr(config, key) != getattr(run.config, key) for key in ("suite", "tasks", "score_table"))
    suite = suite_of(config) if changed else run.suite
    spaces = suite_spaces(suite, config.environment)
    content = checkpoint.load(run_dir) if checkpoint.exists(run_dir) else None
    frames = content["counters"]["frames"] if content else 0
    if config.total_frames < min(frames, run.config.total_frames):
        raise ValueError(f"total_frames={config.total_frames} is less than the {frames} frames that the run has already")
    # Sizes come from the checkpoint: a cut task list may have fewer actions, the network keeps its width.
    saved = NetworkSpec.from_dict(content["network"]) if content else run.network
    added = sorted(set(suite.task_names) - set(saved.legal_actions))
    if added:
        raise ValueError(
            f"tasks: {', '.join(added)} is new to this run: a resume may cut or reorder tasks, not add any; start a new run"
        )
    actions = dict(zip(suite.task_names, spaces.num_actions, strict=True))
    seen = (spaces.frame_shape, spaces.frame_dtype, spaces.instruction_length, actions)
    known = {name: saved.legal_actions[name] for name in suite.task_names}
    if seen != (saved.frame_shape, saved.frame_dtype, saved.instruction_length, known):
        raise ValueError(
            f"the environments have changed: the run's network reads frames {saved.frame_shape} {saved.frame_dtype}, "
            f"{saved.instruction_length} words and has actions {known}, the environments have {seen}; start a new run"
        )
    return RunFiles(config, suite, replace(saved, legal_actions=actions), spaces.frames_per_step)


def claim(run_dir: Path, is_default: bool) -> tuple[Path, IO[str]]:
    """Make the folder and hold its lock, so that no other process works on it; a default name that was taken in the same
    second gets a number.

    Raises:
        ValueError: another process works on it.
    """
    path, number = run_dir, 1
    while is_default:
        try:
            path.mkdir(parents=True)
            break
        except FileExistsError:
            number += 1
            path = run_dir.with_name(f"{run_dir.name}-{number}")
    path.mkdir(parents=True, exist_ok=True)
    return path, hold(path / LOCK)


def start(run_dir: Path, run: RunFiles, plan: Plan, resume: bool, overrides: list[str]) -> int:
    """Make the folder and run to the end."""
    for folder in ("logs", "checkpoints", *(["unrolls"] if run.config.debug.dump_unrolls else [])):
        (run_dir / folder).mkdir(parents=True, exist_ok=True)
    write_run(run_dir, run)
    config = run.config
    envs = sum(actor.num_envs for actor in plan.actors)
    print(
        f"{'resuming' if resume else 'run'} {run_dir}: suite {run.suite.name}, {len(plan.task_names)} tasks, "
        f"{len(plan.actors)} actors with {envs} environments, {config.total_frames:,} frames, seed {config.seed}, "
        f"{megabytes(shared_bytes(plan))} shared memory"
    )
    for note in plan.notes:
        print(f"note: {note}")
    sys.stdout.flush()
    supervisor = Supervisor(run_dir, run, plan, resume, overrides)
    display = Display(run_dir, config.total_frames)
    try:
        code = supervisor.run(display.update)
    finally:
        display.close()
    if code == 0:
        print(f"done: python eval/score.py {run_dir}")
    elif (run_dir / "checkpoints" / checkpoint.LATEST).exists():
        print(f"continue with: python launch/multitask.py --resume {run_dir}")
    return code


if __name__ == "__main__":
    sys.exit(main())
