"""Single-task baselines: a run per task, one after another, each with the network and frames per task of a multi-task run."""

import json
import signal
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from agent import checkpoint
from launch.checks import check_machine, shared_bytes
from launch.config import RunFiles, load_config, suite_of, write_run
from launch.learners import choose_device
from launch.plan import Plan, describe, make_plan, network_spec
from launch.records import RESTARTS
from launch.start import claim, new_folder, resumed_run, start
from tasks.environment import check_suite, suite_spaces
from tasks.suite import nearest

# Names of tasks have no dot, so no baseline's folder can be called like these.
SERIES_FILE, SERIES_LOCK = "series.json", "series.lock"
NEW, STARTED, FINISHED = "new", "started", "finished"


class Baseline(NamedTuple):
    """One run of a series; its folder is PARENT/TASK. state: NEW, STARTED or FINISHED."""

    task: str
    run: RunFiles
    plan: Plan
    state: str


def is_series(path: Path | None) -> bool:
    """Whether this is the parent folder of a series."""
    return path is not None and (path / SERIES_FILE).is_file()


def new_series(
    suite_name: str, config_file: Path | None, overrides: list[str], run_dir: Path | None, tasks: str, frames_per_task: int
) -> tuple[Path, list[Baseline]]:
    """Parent folder and runs of a new series; nothing is written yet. `tasks` is "all", or names with commas between.

    Spaces are those of the whole suite, so that each network is that of the multi-task run with fewer heads.

    Raises:
        ValueError, OSError: one sentence that names the key, the value and the remedy.
    """
    config = load_config(suite_name, config_file, overrides)
    suite = suite_of(config)
    chosen = suite.task_names if tasks == "all" else suite.subset(_names(tasks)).task_names
    parent = new_folder(run_dir, f"{suite.name}-single")
    check_suite(suite, config.environment)
    spaces = suite_spaces(suite, config.environment)
    network = network_spec(config, suite, spaces)
    # Weights divide actors between tasks: one task has them all.
    config = replace(config, total_frames=frames_per_task, actor=replace(config.actor, weights={}))
    baselines = []
    for task in chosen:
        heads = replace(network, legal_actions={task: network.legal_actions[task]})
        run = RunFiles(replace(config, tasks=[task]), suite.subset([task]), heads, spaces.frames_per_step)
        baselines.append(Baseline(task, run, make_plan(run), NEW))
    return parent, baselines


def resumed_series(
    parent: Path, suite_name: str | None, overrides: list[str], tasks: str | None, frames_per_task: int | None
) -> list[Baseline]:
    """The runs of a series to be continued, all or some; they are as they were.

    Raises:
        ValueError, OSError: one sentence.
    """
    if not is_series(parent):
        raise ValueError(f"--resume {parent} is no series of single tasks: leave out --single-task")
    names = json.loads((parent / SERIES_FILE).read_text(encoding="utf-8"))["tasks"]
    chosen = names if tasks in (None, "all") else _names(str(tasks))
    for task in chosen:
        if task not in names:
            raise ValueError(f"--single-task {task}: the series {parent} has no such task, {nearest(task, names)}")
    if frames_per_task is not None:
        overrides = [*overrides, f"total_frames={frames_per_task}"]
    baselines = []
    for task in [name for name in names if name in chosen]:
        folder = parent / task
        run = resumed_run(folder, suite_name, overrides)
        check_suite(run.suite, run.config.environment)
        done = checkpoint.exists(folder) and checkpoint.load(folder)["counters"]["frames"] >= run.config.total_frames
        state = FINISHED if done else STARTED if (folder / RESTARTS).exists() else NEW
        baselines.append(Baseline(task, run, make_plan(run), state))
    return baselines


def describe_series(parent: Path, baselines: Sequence[Baseline]) -> dict[str, Any]:
    """The series as plain types, for --dry-run."""
    frames = baselines[0].run.config.total_frames
    runs = [
        {
            "task": one.task,
            "run_dir": str(parent / one.task),
            "state": one.state,
            **describe(one.run.config, one.plan, shared_bytes(one.plan)),
        }
        for one in baselines
    ]
    return {
        "run_dir": str(parent),
        "frames_per_task": frames,
        "total_frames": sum(one.run.config.total_frames for one in baselines),
        "runs": runs,
    }


def run_series(parent: Path, baselines: Sequence[Baseline], overrides: list[str], is_default: bool) -> int:
    """Train what is not finished, one run after another. An interrupt ends the series, a run that fails does not.

    Returns:
        The exit code of the command: 0, that of the first run that failed, or 130 or 143.

    Raises:
        ValueError, OSError: refused before anything started.
    """
    config = baselines[0].run.config
    choose_device(config.learner.device)
    check_machine(config, baselines[0].plan, parent)
    with ExitStack() as locks:
        parent, lock = claim(parent, is_default, SERIES_LOCK)
        locks.enter_context(lock)
        for one in baselines:  # before the first starts: none must turn out to be in use after days
            locks.enter_context(claim(parent / one.task, is_default=False)[1])
        for one in baselines:  # all, so that an interrupted series has the same settings everywhere
            write_run(parent / one.task, one.run)
        if not is_series(parent):
            text = json.dumps({"tasks": [one.task for one in baselines]}, ensure_ascii=False)
            (parent / SERIES_FILE).write_text(text + "\n", encoding="utf-8")
        return _run_all(parent, baselines, overrides)


def _run_all(parent: Path, baselines: Sequence[Baseline], overrides: list[str]) -> int:
    # One list for all runs: a signal between two of them must not get lost.
    interrupts: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda received, _: interrupts.append(received))
    failed: dict[str, int] = {}
    for count, one in enumerate(baselines, 1):
        about = f"baseline {count} of {len(baselines)}, {one.task}"
        if one.state == FINISHED:
            print(f"{about}: finished before", flush=True)
            continue
        print(f"{about}:", flush=True)
        try:
            code = start(parent / one.task, one.run, one.plan, one.state == STARTED, overrides, interrupts)
        except OSError as error:
            print(f"multitask: {error}", file=sys.stderr)
            code = 1
        if interrupts:
            print(f"continue with: python launch/multitask.py --resume {parent}")
            return 128 + interrupts[0]
        if code:
            failed[one.task] = code
    if failed:
        print(f"failed: {', '.join(failed)}; try again with: python launch/multitask.py --resume {parent}", file=sys.stderr)
        return next(iter(failed.values()))
    print(f"done: python eval/score.py RUN --baseline {parent}/*/")
    return 0


def _names(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    if not all(names):
        raise ValueError(f"--single-task {text!r} has an empty name: write --single-task a,b, or all")
    return names
