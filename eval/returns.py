"""Raw returns that somebody else wrote down: a JSON file of {level: [returns]}."""

import json
import math
from pathlib import Path

from tasks.suite import Suite, Task


def read_returns_file(path: Path, suite: Suite) -> tuple[dict[str, list[float]], str | None]:
    """The returns in a JSON file of {level: [returns]}, by task, and the split that the names give away, if any.

    A level is a task's name, or its train or test level. Raises ValueError naming file and level where a level is
    unknown, stands twice (under whichever names), its returns are not a list of at least one finite number, or where
    some levels are of the train split and others of the test split.
    """
    try:
        # Pairs, not a dict: a dict would silently keep the last of two equal names. All numbers as floats, so that a
        # whole number too large for one becomes infinite and is refused.
        pairs = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=tuple, parse_int=float)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is not a readable JSON file of {{level: [returns]}}: {error}.") from error
    if not isinstance(pairs, tuple):
        raise ValueError(f"{path} must hold one JSON object of {{level: [returns]}}.")
    names: dict[str, str] = {}
    splits: dict[str, str] = {}
    returns: dict[str, list[float]] = {}
    for name, values in pairs:
        try:
            task = suite.resolve(name)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
        if task.name in names:
            raise ValueError(f"{path}: '{names[task.name]}' and '{name}' are the same task; keep one of them.")
        names[task.name] = name
        returns[task.name] = check_returns(f"{path}: '{name}'", values)
        split = split_of(task, name)
        if split is not None:
            splits[split] = name
    if len(splits) > 1:
        raise ValueError(
            f"{path} mixes splits: '{splits['train']}' is a training level, '{splits['test']}' a test level; "
            f"give levels of one split."
        )
    return returns, next(iter(splits), None)


def split_of(task: Task, name: str) -> str | None:
    """The split ("train", "test") that a level's name, whole path or last part, gives away; None where both share it."""
    last_part = name.rsplit("/", 1)[-1]
    in_train, in_test = (level.rsplit("/", 1)[-1] == last_part for level in (task.train_level, task.test_level))
    if in_train == in_test:
        return None
    return "train" if in_train else "test"


def check_returns(name: str, values: object) -> list[float]:
    """The values as finite floats; ValueError beginning with `name` where they are no list of at least one such."""
    if not isinstance(values, list) or not values:
        raise ValueError(f"{name} holds {values!r}; give a list of at least one return, or leave the level out.")
    for index, value in enumerate(values):
        if not isinstance(value, float) or not math.isfinite(value):
            raise ValueError(f"{name}: return {index} is {value!r}, not a finite number; remove it.")
    return values
