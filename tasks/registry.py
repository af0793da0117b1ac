"""From a name to a suite: the suites of this package, a user's YAML file, or an installed entry point."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from importlib.metadata import entry_points
from importlib.resources import files
from pathlib import Path
from typing import Any

from tasks.own_suite import load_yaml, parse_suite
from tasks.suite import Suite, Task, nearest

ENTRY_POINTS = "multitask_agents.suites"
ATARI5 = ("battle_zone", "double_dunk", "name_this_game", "phoenix", "qbert")  # Aitchison et al. 2022
TABLES = {  # score tables of a suite, the default first
    "dmlab30": ("released", "paper_b1"),
    "atari57": ("dqn_zoo", "agent57"),
    "atari5": ("dqn_zoo", "agent57"),
    "toy": ("exact",),
}


def suite_names() -> tuple[str, ...]:
    """Suites that can be loaded by name: those of this package, then installed entry points."""
    return (*TABLES, *sorted(point.name for point in entry_points(group=ENTRY_POINTS) if point.name not in TABLES))


def load_suite(name: str, tasks: Sequence[str] = (), score_table: str = "") -> Suite:
    """The suite called `name`, or described by the YAML file `name`, cut to `tasks` if any are named.

    `score_table` picks other than the default scores. ValueError names what is unknown and the nearest names.
    """
    if name.endswith((".yaml", ".yml")):
        suite = load_yaml(Path(name))
    elif name in TABLES:
        suite = _built_in(name, score_table or TABLES[name][0])
    else:
        suite = _installed(name)
    if score_table not in ("", suite.score_table):
        raise ValueError(f"score_table: suite {suite.name} has {suite.score_table!r} only, not {score_table!r}")
    return suite.subset(tasks) if tasks else suite


def _built_in(name: str, score_table: str) -> Suite:
    if score_table not in TABLES[name]:
        raise ValueError(f"score_table: suite {name} has no table {score_table!r}, {nearest(score_table, TABLES[name])}")
    source = "atari57" if name == "atari5" else name
    scores = {row["task"]: row for row in _read("score_tables") if (row["suite"], row["table"]) == (source, score_table)}
    rows = []
    for row in _read(source):
        score = scores.get(row["task"], row)
        train, test = row.get("train_level", row["task"]), row.get("test_level", row["task"])
        rows.append(Task(row["task"], train, test, float(score["random_score"]), float(score["human_score"])))
    adapter = {"dmlab30": "dmlab", "toy": "toy"}.get(name, "atari")
    suite = Suite(name, adapter, score_table, tuple(rows))
    return suite.subset(ATARI5) if name == "atari5" else suite


def _read(table: str) -> list[dict[str, str]]:
    """Rows of tasks/data/<table>.csv."""
    text = (files("tasks.data") / f"{table}.csv").read_text(encoding="utf-8")
    return list(csv.DictReader(text.splitlines()))


def _installed(name: str) -> Suite:
    """The suite of an entry point: a mapping in the YAML format, or a function that returns one."""
    points = entry_points(group=ENTRY_POINTS, name=name)
    if not points:
        raise ValueError(f"suite: there is no suite {name!r}, {nearest(name, suite_names())}")
    found: Any = next(iter(points)).load()
    content = found() if callable(found) else found
    source = f"entry point {name}"
    if not isinstance(content, Mapping):
        raise ValueError(f"{source}: a mapping with the keys name and tasks is needed, not {type(content).__name__}")
    return parse_suite(content, source, "")
