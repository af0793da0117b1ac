"""Scores of published agents, per task: tasks/data/published_<suite>.csv, with source, frames and score table."""

import csv
from dataclasses import dataclass
from importlib.resources import files

from tasks.registry import load_suite
from tasks.suite import nearest

SUITES = ("dmlab30", "atari57")
UNSTATED = "unstated"


@dataclass(frozen=True)
class Published:
    """One agent's rows of one suite.

    source: where the numbers were published. split, score_table: as published, or "unstated". frames: of training, or
    None where unstated. raw: task -> mean raw return. hns: task -> normalised percent, for tasks without a raw return.
    """

    agent: str
    suite: str
    source: str
    split: str
    score_table: str
    frames: int | None
    raw: dict[str, float]
    hns: dict[str, float]


def names(suite: str = "") -> list[str]:
    """Names of all agents, or of those with scores for this suite, sorted."""
    found = {row["agent"] for name in SUITES if suite in ("", name, _small(name)) for row in _rows(name)}
    return sorted(found)


def find(agent: str, suite: str = "") -> Published:
    """The agent's scores for a suite; without one, for the only suite that has the agent.

    Raises ValueError for an unknown name (with the nearest names), and where two suites have the agent and none is given.
    """
    wanted = [name for name in SUITES if suite in ("", name, _small(name))]
    found = [(name, [row for row in _rows(name) if row["agent"] == agent]) for name in wanted]
    found = [(name, rows) for name, rows in found if rows]
    if not found:
        where = f" for suite {suite}" if suite else ""
        known = names(suite)
        hint = nearest(agent, known) if known else "this suite has no published scores"
        raise ValueError(f"there is no published agent {agent!r}{where}, {hint}")
    if len(found) > 1:
        raise ValueError(f"{agent} has published scores in {' and '.join(name for name, _ in found)}: add --suite NAME")
    name, rows = found[0]
    first = rows[0]
    table = first.get("score_table") or UNSTATED
    return Published(
        agent,
        name,
        first["source"],
        first.get("split") or UNSTATED,
        UNSTATED if table == "unstated" else table,
        int(first["frames"]) if first["frames"] else None,
        {row["task"]: float(row["raw_score"]) for row in rows if row["raw_score"]},
        {row["task"]: float(row["hns_percent"]) for row in rows if not row["raw_score"] and row.get("hns_percent")},
    )


def _small(suite: str) -> str:
    """A suite whose tasks are among another's."""
    return {"atari57": "atari5"}.get(suite, suite)


def _rows(suite: str) -> list[dict[str, str]]:
    text = (files("tasks.data") / f"published_{suite}.csv").read_text(encoding="utf-8")
    rows = list(csv.DictReader(text.splitlines()))
    known = set(load_suite(suite).task_names)
    assert all(row["task"] in known for row in rows), suite
    return rows
