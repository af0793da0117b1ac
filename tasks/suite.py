"""A suite is a table of tasks: levels to train and test on, and the scores of a random player and of a human."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from difflib import get_close_matches
from typing import Any

NAME = re.compile(r"[\w-]+")


@dataclass(frozen=True)
class Task:
    """One row of a suite.

    name: key in metrics and file names: letters of any alphabet, digits, `_` and `-`.
    train_level, test_level: what the adapter opens: ROM id, DMLab level path, toy level, or "module:function".
    random_score, human_score: mean raw returns of whole games; both None if the task is unscored.
    env_kwargs: further arguments of the function, own suites only.
    """

    name: str
    train_level: str
    test_level: str
    random_score: float | None = None
    human_score: float | None = None
    env_kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Suite:
    """Tasks that one agent learns together, in canonical order.

    adapter: who opens the levels: "atari", "dmlab", "toy" or "custom".
    score_table: name of the table that the scores come from; two reports with different tables are not compared.
    import_path: folder in which the functions of an own suite are looked up, "" for none.
    """

    name: str
    adapter: str
    score_table: str
    tasks: tuple[Task, ...]
    import_path: str = ""

    @property
    def task_names(self) -> tuple[str, ...]:
        """Names of all tasks, in canonical order."""
        return tuple(task.name for task in self.tasks)

    def task(self, name: str) -> Task:
        """The task of exactly this name, or ValueError with the nearest names."""
        for task in self.tasks:
            if task.name == name:
                return task
        raise ValueError(f"tasks: suite {self.name} has no task {name!r}, {nearest(name, self.task_names)}")

    def resolve(self, name: str) -> Task:
        """The task of this name, of this train or test level (whole path or its last part), or of this Atari gym id."""
        for task in self.tasks:
            levels = (task.train_level, task.test_level)
            if name == task.name or name in levels or name in [level.rsplit("/", 1)[-1] for level in levels]:
                return task
        if gym_id := re.fullmatch(r"ALE/(\w+)-v5", name):
            for task in self.tasks:  # ALE/BattleZone-v5 is battle_zone: the ids differ in case and underscores only
                if task.name.replace("_", "") == gym_id[1].lower():
                    return task
        return self.task(name)

    def subset(self, names: Sequence[str]) -> Suite:
        """The suite cut to these tasks (names as `resolve` takes them), in canonical order."""
        if not names:
            raise ValueError(f"tasks: none is named, name at least one of suite {self.name} or leave out the list")
        chosen = [self.resolve(name).name for name in names]
        for name in chosen:
            if chosen.count(name) > 1:
                raise ValueError(f"tasks: {name} is named {chosen.count(name)} times, name it once")
        return replace(self, tasks=tuple(task for task in self.tasks if task.name in chosen))

    def normalise(self, task_name: str, mean_return: float) -> float:
        """Human-normalised score in percent: 0 is the random player, 100 the human. Not capped.

        ValueError for an unscored task, for equal scores, and for a mean that is not a finite number.
        """
        task = self.task(task_name)
        if task.random_score is None or task.human_score is None:
            raise ValueError(f"tasks: {task_name} has no random_score and human_score, so it cannot be normalised")
        if task.random_score == task.human_score:
            raise ValueError(
                f"tasks: {task_name} has random_score = human_score = {task.human_score}, so it cannot be normalised"
            )
        if not math.isfinite(mean_return):
            raise ValueError(f"mean_return: {task_name} has {mean_return}, only finite returns can be normalised")
        return 100.0 * (mean_return - task.random_score) / (task.human_score - task.random_score)

    def to_dict(self) -> dict[str, Any]:
        """Plain types, for YAML and JSON."""
        tasks = [{**asdict(replace(task, env_kwargs={})), "env_kwargs": dict(task.env_kwargs)} for task in self.tasks]
        return {
            "name": self.name,
            "adapter": self.adapter,
            "score_table": self.score_table,
            "tasks": tasks,
            "import_path": self.import_path,
        }

    @staticmethod
    def from_dict(row: Mapping[str, Any]) -> Suite:
        """The suite that `to_dict` wrote."""
        return Suite(**{**row, "tasks": tuple(Task(**task) for task in row["tasks"])})


def nearest(name: str, names: Sequence[str]) -> str:
    """The end of an error message: the names most like `name`, or all of them when none is like it."""
    return "did you mean one of: " + ", ".join(get_close_matches(name, names) or names) + "?"
