"""A user's own suite: the strict reading of its YAML file, and the making of its environments."""

from __future__ import annotations

import importlib
import math
import sys
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from tasks.suite import NAME, Suite, Task, nearest

SUITE_KEYS = ("name", "tasks")
TASK_KEYS = ("name", "env", "env_kwargs", "random_score", "human_score")


def load_yaml(path: Path) -> Suite:
    """The suite of a YAML file; ValueError names the file, the key and what is wrong with it."""
    if not path.is_file():
        raise ValueError(f"suite: there is no file {path}, give the path of a YAML file or the name of a suite")
    try:
        # omegaconf's loader refuses duplicate keys, which PyYAML's own silently merges, and reads 1e-3 as a number.
        content = OmegaConf.to_container(OmegaConf.load(path), resolve=True)
    except (yaml.YAMLError, OmegaConfBaseException, OSError, UnicodeDecodeError) as error:
        raise ValueError(f"suite: {path} is no valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict):
        raise ValueError(f"suite: {path} has to be a mapping with the keys name and tasks")
    return parse_suite(content, str(path), str(path.resolve().parent))


def parse_suite(content: Mapping[Any, Any], source: str, import_path: str) -> Suite:
    """A suite from a mapping in the YAML format; `source` is named in errors."""
    _check_keys(content, SUITE_KEYS, SUITE_KEYS, source)
    name = _name(content["name"], f"{source}: name")
    rows = content["tasks"]
    if isinstance(rows, str | bytes) or not isinstance(rows, Sequence) or not rows:
        raise ValueError(f"{source}: tasks has to be a list of at least one task")
    tasks = tuple(_task(row, f"{source}: tasks[{i}]") for i, row in enumerate(rows))
    names = [task.name for task in tasks]
    for task_name in names:
        if names.count(task_name) > 1:
            raise ValueError(f"{source}: tasks has the name {task_name!r} twice, give each task a name of its own")
    return Suite(name, "custom", "own", tasks, import_path)


def _task(row: Any, where: str) -> Task:
    if not isinstance(row, Mapping):
        raise ValueError(f"{where} has to be a mapping with the keys name and env, not {row!r}")
    _check_keys(row, TASK_KEYS, ("name", "env"), where)
    name = _name(row["name"], f"{where}.name")
    env = row["env"]
    parts = env.split(":") if isinstance(env, str) else []
    if len(parts) != 2 or not all(part.isidentifier() for part in [*parts[0].split("."), parts[1]]):
        raise ValueError(f"{where}.env of {name}: {env!r} has to read module:function")
    kwargs = row.get("env_kwargs", {})
    if not isinstance(kwargs, Mapping) or not all(isinstance(key, str) for key in kwargs) or "seed" in kwargs:
        raise ValueError(f"{where}.env_kwargs of {name}: {kwargs!r} has to map names of arguments, not seed, to values")
    scores = {key: _score(row[key], f"{where}.{key} of {name}") for key in ("random_score", "human_score") if key in row}
    if len(scores) == 1:
        raise ValueError(f"{where} of {name}: {next(iter(scores))} stands alone, give random_score and human_score or none")
    return Task(name, env, env, env_kwargs=dict(kwargs), **scores)


def _check_keys(row: Mapping[Any, Any], known: Sequence[str], needed: Sequence[str], where: str) -> None:
    for key in row:
        if key not in known:
            raise ValueError(f"{where}: there is no key {key!r}, {nearest(str(key), known)}")
    for key in needed:
        if key not in row:
            raise ValueError(f"{where}: the key {key} is missing")


def _name(value: Any, where: str) -> str:
    """A name in Unicode NFC, so that one name has one spelling in every file."""
    name = unicodedata.normalize("NFC", value) if isinstance(value, str) else ""
    if not NAME.fullmatch(name):
        raise ValueError(f"{where}: {value!r} has to be a text of letters, digits, _ and - only")
    return name


def _score(value: Any, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{where}: {value!r} has to be a finite number")
    return float(value)


def make_environment(suite: Suite, task: Task, level: str, seed: int) -> Any:
    """Call the task's function: a gymnasium.Env or dm_env.Environment made with `seed` and the task's arguments."""
    function = _find(suite, task, level)
    try:
        return function(seed=seed, **task.env_kwargs)
    except (Exception, SystemExit) as error:  # whatever a user's function raises
        raise ValueError(f"env of task {task.name}: {level} failed: {type(error).__name__}: {error}") from error


def _find(suite: Suite, task: Task, level: str) -> Callable[..., Any]:
    """The function behind "module:function"; ValueError names the task and what is missing."""
    for folder in (suite.import_path, str(Path.cwd())):
        if folder and folder not in sys.path:
            sys.path.append(folder)  # at the end: a user's file must not hide a module of the standard library
    module_name, _, function_name = level.partition(":")
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # a syntax error in the user's module as well
        raise ValueError(
            f"env of task {task.name}: {level!r} cannot be imported ({type(error).__name__}: {error}), "
            "put the module beside the YAML file, into the current folder, or install it"
        ) from error
    function = getattr(module, function_name, None)
    if not callable(function):
        names = [name for name in dir(module) if not name.startswith("_")]
        raise ValueError(f"env of task {task.name}: {module_name} has no {function_name}, {nearest(function_name, names)}")
    return function
