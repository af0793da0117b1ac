"""Train one agent on many tasks: configuration -> plan -> checks -> processes.

examples:
  python launch/multitask.py --suite toy
  python launch/multitask.py --suite atari57 --tasks pong,breakout --total-frames 20000000
  python launch/multitask.py --suite my_suite.yaml optimiser.learning_rate=1e-3 actor.num_envs=16
  python launch/multitask.py --resume runs/toy-20260101-120000
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from agent import checkpoint
from agent.network import NetworkSpec
from launch.checks import check_machine, megabytes, shared_bytes
from launch.config import RunFiles, load_config, override_config, read_run, suite_of, write_run
from launch.display import Display
from launch.plan import Plan, describe, make_plan, network_spec
from launch.supervisor import Supervisor, is_running
from launch.training import choose_device
from tasks.environment import check_suite, suite_spaces

# Settings that a resumed run keeps: another network or seed is another run.
FIXED_ON_RESUME = ("seed", "network")


def main(arguments: Sequence[str] | None = None) -> int:
    """The command. Exit code 0 done, 1 failed, 2 refused before anything started, 130 or 143 interrupted."""
    options = parse(arguments)
    try:
        run_dir, run = prepare(options)
        plan = make_plan(run)
        if options.dry_run:
            print(json.dumps(describe(run.config, plan, shared_bytes(plan)), indent=2, ensure_ascii=False))
            return 0
        choose_device(run.config.learner.device)
        check_suite(run.suite, run.config.environment)
        if (pid := is_running(run_dir)) is not None:
            raise ValueError(f"process {pid} works on {run_dir} already: stop it first")
        check_machine(run.config, plan, run_dir)
    except (ValueError, OSError) as error:
        print(f"multitask: {error}", file=sys.stderr)
        return 2
    return start(run_dir, run, plan, options.resume is not None, settings(options))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Command line; argparse ends with exit code 2 on an unknown flag."""
    parser = argparse.ArgumentParser(
        prog="multitask.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--suite", metavar="NAME|FILE.yaml", help="dmlab30, atari57, atari5, toy, or your own")
    parser.add_argument("--tasks", metavar="A,B", help="only these tasks of the suite")
    parser.add_argument("--config", type=Path, metavar="FILE", help="YAML file with settings")
    parser.add_argument("--run-dir", type=Path, metavar="DIR", help="default: runs/SUITE-TIME")
    parser.add_argument("--resume", type=Path, metavar="RUN", help="continue a run from its newest checkpoint")
    parser.add_argument("--total-frames", metavar="N", help="environment frames to train on")
    parser.add_argument("--seed", metavar="N", help="0 to 2^63-1")
    parser.add_argument("--dry-run", action="store_true", help="print configuration and plan as JSON, start nothing")
    parser.add_argument("settings", nargs="*", metavar="key=value", help="any setting, such as loss.entropy_cost=0.02")
    options = parser.parse_intermixed_args(arguments)
    if options.resume is None and options.suite is None:
        parser.error("name a suite: --suite toy")
    if options.resume is not None and (options.run_dir is not None or options.config is not None):
        parser.error("--resume continues in its own folder with its own configuration: leave out --run-dir and --config")
    return options


def settings(options: argparse.Namespace) -> list[str]:
    """Flags that are settings, and settings, as key=value."""
    flags = []
    if options.tasks is not None:
        flags.append(f"tasks=[{options.tasks}]")
    if options.total_frames is not None:
        flags.append(f"total_frames={options.total_frames}")
    if options.seed is not None:
        flags.append(f"seed={options.seed}")
    return [*flags, *options.settings]


def prepare(options: argparse.Namespace) -> tuple[Path, RunFiles]:
    """Everything that can be refused, before a folder or a process exists.

    Raises:
        ValueError, OSError: one sentence that names the key, the value and the remedy.
    """
    if options.resume is not None:
        return options.resume, _resumed(options)
    config = load_config(options.suite, options.config, settings(options))
    suite = suite_of(config)
    run_dir = options.run_dir or Path("runs") / f"{suite.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    if run_dir.exists() and (not run_dir.is_dir() or any(run_dir.iterdir())):
        raise ValueError(f"--run-dir {run_dir} exists and is not empty: choose another, or continue it with --resume {run_dir}")
    spaces = suite_spaces(suite, config.environment)
    return run_dir, RunFiles(config, suite, network_spec(config, suite, spaces), spaces.frames_per_step)


def _resumed(options: argparse.Namespace) -> RunFiles:
    run = read_run(options.resume)
    overrides = settings(options) + ([f"suite={options.suite}"] if options.suite is not None else [])
    config = override_config(run.config, overrides, FIXED_ON_RESUME)
    same_tasks = (config.suite, config.tasks, config.score_table) == (
        run.config.suite,
        run.config.tasks,
        run.config.score_table,
    )
    suite = run.suite if same_tasks else suite_of(config)
    spaces = suite_spaces(suite, config.environment)
    # Its sizes come from the checkpoint: a cut task list may have fewer actions, the network keeps its width.
    saved = NetworkSpec.from_dict(checkpoint.load(options.resume)["network"])
    network = replace(saved, legal_actions=dict(zip(suite.task_names, spaces.num_actions, strict=True)))
    seen = (spaces.frame_shape, spaces.frame_dtype, spaces.instruction_length)
    if seen != (saved.frame_shape, saved.frame_dtype, saved.instruction_length):
        raise ValueError(f"the checkpoint's network reads {saved.frame_shape} {saved.frame_dtype}, the tasks show {seen}")
    return RunFiles(config, suite, network, spaces.frames_per_step)


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
