"""From the words of the command line to the two sides of a report: runs, checkpoints, files of returns, published agents."""

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from eval import published, returns
from eval.identity import UNSTATED, Identity
from eval.runs import check_one_experiment, expand, load_run
from eval.sides import Kind, RunData, Side
from tasks.registry import TABLES, load_suite
from tasks.suite import Suite, nearest


def subject_side(args: argparse.Namespace) -> Side:
    """What is scored. Raises ValueError for whatever does not fit together, naming it."""
    if args.published is not None:
        return _published_subject(args)
    if args.source[0].is_file():
        suite = load_suite(args.suite, score_table=args.score_table)
        return _file_side(args.source[0], suite, args.split)
    return _run_side(args, args.source)


def baseline_side(args: argparse.Namespace, subject: Side) -> Side:
    """What it is compared with, scored like the subject. Raises ValueError for whatever does not fit together."""
    words = [Path(word) for word in args.baseline]
    if len(words) == 1 and words[0].is_file():
        if words[0].suffix != ".pt":
            return _file_side(words[0], subject.suite, None)
        if args.episodes is None:
            raise ValueError(f"--baseline {words[0]} is a checkpoint: add --episodes N, both are then played alike.")
        return _cut(_run_side(args, words, subject.suite), subject.suite)
    if len(words) == 1 and not words[0].exists():
        return _published_baseline(args, args.baseline[0], subject)
    for word in words:
        if not word.is_dir():
            raise ValueError(f"--baseline {word} is no run folder; several baselines must all be run folders.")
    side = _run_side(args, words, subject.suite)
    ours = {run.folder.resolve() for run in subject.runs if run.folder is not None}
    same = [run.label for run in side.runs if run.folder is not None and run.folder.resolve() in ours]
    if same:
        raise ValueError(f"{same[0]} stands on both sides: give --baseline another run.")
    return _cut(side, subject.suite)


def _cut(side: Side, suite: Suite) -> Side:
    """The side with the subject's tasks, which are scored by the subject's table."""
    own = [task.name for task in side.suite.tasks]
    if not set(own) & set(suite.task_names):
        raise ValueError(f"--baseline {side.label}: it has none of the tasks {', '.join(suite.task_names)}.")
    return dataclasses.replace(side, suite=suite, stated_suite=side.suite)


def _run_side(args: argparse.Namespace, words: Sequence[Path], wanted: Suite | None = None) -> Side:
    """A side of run folders (or one checkpoint file); `wanted`: only these tasks are of interest."""
    if any(word.is_file() for word in words) and len(words) > 1:
        raise ValueError(f"{next(word for word in words if word.is_file())} is a file; several sources must be run folders.")
    folders = [folder for word in words for folder in (expand(word) if word.is_dir() else [word])]
    for folder in folders:
        if folders.count(folder) > 1 or [other.resolve() for other in folders].count(folder.resolve()) > 1:
            raise ValueError(f"{folder} is named twice: each run counts once.")
    loaded = [load_run(args, folder, wanted) for folder in folders]
    suites, identities = [item.suite for item in loaded], [item.identity for item in loaded]
    distinct = {suite.task_names for suite in suites}
    alone = all(len(names) == 1 for names in distinct)
    kind: Kind = "single-task runs" if alone and (len(distinct) > 1 or _one_of_many(distinct, wanted)) else "runs"
    forced = tuple(check_one_experiment(loaded, kind, args.force))
    suite = suites[0]
    if kind == "single-task runs":
        suite = _union(suites, wanted)
    label = ", ".join(str(word) for word in words)
    runs = tuple(item.data for item in loaded)
    return Side(label, kind, suite, _shared_identity(label, identities), runs, forced=forced)


def _one_of_many(distinct: set[tuple[str, ...]], wanted: Suite | None) -> bool:
    return wanted is not None and len(wanted.tasks) > len(distinct)


def _union(suites: Sequence[Suite], wanted: Suite | None) -> Suite:
    """The tasks of all single-task runs in one suite, in order of their first run."""
    tasks = {task.name: task for suite in suites for task in suite.tasks}
    if wanted is not None:
        tasks = {name: tasks[name] for name in wanted.task_names if name in tasks} or tasks
    elif suites[0].name in TABLES:
        order = load_suite(suites[0].name).task_names
        tasks = {name: tasks[name] for name in order if name in tasks}
    return dataclasses.replace(suites[0], tasks=tuple(tasks.values()))


def _shared_identity(label: str, identities: Sequence[Identity]) -> Identity:
    """The identity of all runs together; with several, what is a run's own stands in `runs` only."""
    runs = tuple(entry for identity in identities for entry in identity.runs)
    actions: dict[str, int] = {}
    for identity in identities:
        actions |= identity.action_set or {}
    first = dataclasses.replace(identities[0], source=label, runs=runs, action_set=actions or None)
    return first if len(identities) == 1 else dataclasses.replace(first, checkpoint=None, parameter_hash=None)


def _file_side(path: Path, suite: Suite, split: str | None) -> Side:
    """A file of returns: nobody but the user knows how they were made."""
    found, named_split = returns.read_returns_file(path, suite)
    if split not in (None, named_split or split):
        raise ValueError(f"--split {split} contradicts {path}: it names levels of the {named_split} split.")
    split = split or named_split or UNSTATED
    identity = Identity(str(path), episodes="all in the file", split=split, runs=({"source": str(path)},))
    data = RunData(str(path), {task: np.array(values) for task, values in found.items()}, suite.task_names)
    return Side(str(path), "returns file", suite, identity, (data,))


def _published_subject(args: argparse.Namespace) -> Side:
    agent = published.find(args.published, args.suite or "")
    table = args.score_table or ("" if agent.score_table == UNSTATED else agent.score_table)
    suite = load_suite(args.suite or agent.suite, score_table=table)
    return _published_side(agent, suite, args.score_table)


def _published_baseline(args: argparse.Namespace, name: str, subject: Side) -> Side:
    known = published.names(subject.suite.name)
    if name not in known:
        hint = nearest(name, known) if known else f"and suite {subject.suite.name} has no published scores"
        raise ValueError(f"--baseline {name} is no file, no folder, and no published agent of this suite, {hint}")
    return _published_side(published.find(name, subject.suite.name), subject.suite, args.score_table)


def _published_side(agent: published.Published, suite: Suite, chosen_table: str) -> Side:
    """chosen_table: scores raw returns anew; a score that was published normalised keeps its own table."""
    table = agent.score_table if agent.hns or not chosen_table else chosen_table
    frames = "frames not stated" if agent.frames is None else f"{agent.frames:,} frames"
    identity = Identity(
        f"published: {agent.agent}",
        episodes=f"means as published in {agent.source} ({frames})",
        split=agent.split,
        score_table=table,
        runs=({"source": agent.source, "frames": agent.frames},),
    )
    tasks = tuple(name for name in suite.task_names if name in agent.raw)
    fixed = {name: agent.hns[name] for name in suite.task_names if name in agent.hns}
    data = RunData(agent.agent, {name: np.array([agent.raw[name]]) for name in tasks}, tasks, budget={"frames": agent.frames})
    return Side(agent.agent, "published", suite, identity, (data,), fixed)
