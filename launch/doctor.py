"""Does this machine run a suite? Answers before a long run what would otherwise come to light hours later.

examples:
  python launch/doctor.py --suite dmlab30
  python launch/doctor.py --suite atari57 --tasks pong,breakout learner.device=cuda
"""

import argparse
import os
import platform
import statistics
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import NamedTuple

import torch
from packaging.requirements import Requirement
from rich.console import Console
from rich.progress import track
from rich.table import Table

from launch import screen
from launch.checks import check_descriptors, check_disk, check_memory, megabytes, shared_bytes
from launch.config import Config, RunFiles, load_config, suite_of
from launch.learners import choose_device
from launch.plan import Plan, make_plan, network_spec
from launch.process import memory_root
from launch.stages import Stages
from tasks.dmlab import make_level_cache
from tasks.engine import EngineError
from tasks.environment import Probe, check_suite, probe, suite_spaces
from tasks.suite import Suite, Task

PACKAGE = "multitask-agents"
# A level that takes so long to start makes every episode of a run slow: the level cache is for that.
SLOW_START_SECONDS = 30.0
STAGE_SECONDS = 0.5
DEEP_BATCH = 4  # unrolls: a whole update of the deep torso takes many seconds, and costs the same per agent step


class Row(NamedTuple):
    """One line of the table."""

    check: str
    holds: bool
    detail: str


def main(arguments: Sequence[str] | None = None) -> int:
    """The command. Exit code 0 if everything holds, 1 if something does not, 2 for a wrong command line."""
    options = parse(arguments)
    settings = [*([f"tasks=[{options.tasks}]"] if options.tasks else []), *options.settings]
    try:
        config = load_config(options.suite, options.config, settings)
        suite = suite_of(config)
        spaces = suite_spaces(suite, config.environment)
        run = RunFiles(config, suite, network_spec(config, suite, spaces), spaces.frames_per_step)
        plan = make_plan(run)
    except ValueError as error:
        print(f"doctor: {error}", file=sys.stderr)
        return 2
    try:
        rows = list(examine(run, plan, options.split))
    except KeyboardInterrupt:
        print("doctor: interrupted", file=sys.stderr)
        return 130
    console = Console(markup=False, highlight=False, width=None if sys.stdout.isatty() else 120)
    table = Table("check", "", "found", title=f"suite {suite.name}, {len(suite.tasks)} tasks, {options.split} levels")
    for row in rows:
        table.add_row(row.check, "ok" if row.holds else "FAILS", row.detail)
    console.print(table)
    failed = [row.check for row in rows if not row.holds]
    console.print(
        f"{len(failed)} of {len(rows)} checks fail: {', '.join(failed)}" if failed else f"all {len(rows)} checks hold"
    )
    return 1 if failed else 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="doctor.py", description=__doc__, formatter_class=form, allow_abbrev=False)
    parser.add_argument("--suite", required=True, metavar="NAME|FILE.yaml")
    parser.add_argument("--tasks", metavar="A,B", help="only these tasks of the suite")
    parser.add_argument("--config", type=Path, metavar="FILE", help="YAML with settings")
    parser.add_argument("--split", choices=("train", "test"), default="train", help="levels to play (default train)")
    parser.add_argument("settings", nargs="*", metavar="key=value", help="any setting of multitask.py")
    return parser.parse_intermixed_args(arguments)


def examine(run: RunFiles, plan: Plan, split: str) -> Iterator[Row]:
    """All checks in turn."""
    config, suite = run.config, run.suite
    yield from versions(suite)
    needed = attempt("suite", lambda: check_suite(suite, config.environment), "its engine and all its levels are there")
    yield needed
    yield from machine(config, plan)
    if suite.adapter == "dmlab":
        yield level_cache(config)
    if needed.holds:
        seconds: list[float] = []
        for task in track(suite.tasks, "playing each task", console=Console(stderr=True), transient=True):
            yield play(suite, task, config, split, seconds)
        if len(seconds) == len(suite.tasks):
            yield speed(run, plan, statistics.mean(seconds))


def attempt(check: str, call: Callable[[], object], detail: str) -> Row:
    """A row from a check that raises what is wrong."""
    try:
        call()
    except (ValueError, OSError, EngineError) as error:
        return Row(check, False, str(error))
    return Row(check, True, detail)


def versions(suite: Suite) -> Iterator[Row]:
    """Python and each package of this program, against the tested range."""
    yield Row("python", (3, 11) <= sys.version_info[:2] < (3, 13), f"{platform.python_version()}, tested: 3.11 and 3.12")
    try:
        wanted = [Requirement(text) for text in requires(PACKAGE) or []]
    except PackageNotFoundError:
        yield Row("packages", False, f"{PACKAGE} is not installed: run pip install -e . in its folder")
        return
    extra = "atari" if suite.adapter == "atari" else ""
    for one in wanted:
        if one.marker is not None and not one.marker.evaluate({"extra": extra}):
            continue
        try:
            found = version(one.name)
            yield Row(one.name, one.specifier.contains(found, prereleases=True), f"{found}, tested: {one.specifier}")
        except PackageNotFoundError:
            yield Row(one.name, False, f"not installed: run pip install '{one.name}{one.specifier}'")
    if suite.adapter == "dmlab":
        try:
            yield Row("deepmind_lab", True, version("deepmind_lab"))
        except PackageNotFoundError:
            pass  # a module without a package, or none: the row of the suite says which


def machine(config: Config, plan: Plan) -> Iterator[Row]:
    """Shared memory, disk, descriptors, GPUs."""
    needed = shared_bytes(plan)
    yield attempt(
        "shared memory", lambda: check_memory(needed, len(plan.actors)), f"{megabytes(needed)} fit in {memory_root()}"
    )
    yield attempt("disk", lambda: check_disk(config, plan, Path("runs")), "checkpoints and records fit in ./runs")
    yield attempt("open files", lambda: check_descriptors(len(plan.actors), config.actor.num_envs), "enough for a process")
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    yield attempt(
        "learner", lambda: choose_device(config.learner.device), f"GPUs: {', '.join(gpus) or 'none, it runs on the CPU'}"
    )
    if config.environment.dmlab.renderer == "hardware" and plan.network.frame_shape[-1] == 3:
        yield Row("renderer", True, "hardware: the engines draw on a GPU; the levels below show whether they can")


def level_cache(config: Config) -> Row:
    """Whether maps can be kept."""
    cache = make_level_cache(config.environment.dmlab)
    if cache is None:
        return Row("level cache", True, "none (environment.dmlab.level_cache=none): half of the levels build maps each episode")

    def try_it() -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "map"
            with zipfile.ZipFile(path, "w") as archive:
                archive.writestr("doctor", "a map that no engine asks for")
            cache.write("doctor", str(path))
            if not cache.fetch("doctor", str(path)):
                raise ValueError(f"{cache.folder} keeps no map: choose a folder that can be written, or none")

    return attempt(
        "level cache", try_it, f"{cache.folder} is writable, up to {megabytes(config.environment.dmlab.level_cache_bytes)}"
    )


def play(suite: Suite, task: Task, config: Config, split: str, seconds: list[float]) -> Row:
    """Reset a task and play 50 steps; adds its seconds per step to `seconds` if all is well."""
    try:
        seen = probe(suite, task, config.environment, config.seed % 2**30, split)
    except (ValueError, EngineError, OSError) as error:
        return Row(task.name, False, str(error))
    seconds.append(seen.step_seconds)
    return Row(task.name, *judge(suite, task, seen))


def judge(suite: Suite, task: Task, seen: Probe) -> tuple[bool, str]:
    """Whether a task is fit to be learned, and what was seen of it."""
    words = "with an instruction" if seen.has_instruction else "no instruction"
    detail = f"start and reset {seen.reset_seconds:.1f} s, step {1000 * seen.step_seconds:.2f} ms, the frame changes, {words}"
    if suite.adapter == "dmlab" and task.name.startswith("language_") and not seen.has_instruction:
        return False, f"{detail}: a language level without a text cannot be learned"
    if seen.reset_seconds > SLOW_START_SECONDS:
        return False, f"{detail}: slower than {SLOW_START_SECONDS:.0f} s"
    return True, detail


def speed(run: RunFiles, plan: Plan, environment_seconds: float) -> Row:
    """Expected frames per second: cores over the sum of the stages' seconds, all measured here, one core each."""
    config = run.config
    if plan.network.settings.torso == "deep":
        config = replace(config, learner=replace(config.learner, batch_size=DEEP_BATCH))
    with tempfile.TemporaryDirectory(dir=memory_root()) as folder:
        stages = Stages(run._replace(config=config), plan, Path(folder), environments=False).measure(STAGE_SECONDS)
    cores = os.cpu_count() or 1
    step = environment_seconds + sum(stages.values())
    parts = {"environment": environment_seconds, **stages}
    shares = ", ".join(f"{name} {100 * cost / step:.0f}%" for name, cost in parts.items())
    frames = plan.frames_per_step * cores / step
    hours = config.total_frames / frames / 3600
    return Row(
        "expected speed",
        True,
        f"at most {frames:,.0f} frames/s on {cores} cores without a GPU ({shares}): {config.total_frames:,} frames in "
        f"{hours:,.1f} hours; python launch/benchmark.py measures a real run",
    )


if __name__ == "__main__":
    screen.show_any_letter()
    sys.exit(main())
