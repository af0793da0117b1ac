"""Finding suites: names, a user's YAML file and its mistakes, entry points, languages."""

import os
import subprocess
import sys
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tasks import registry
from tasks.environment import EnvironmentSettings, check_suite, make_vector_env, suite_spaces
from tasks.registry import load_suite, suite_names

ROOT = Path(__file__).parents[1]
ENTRY: dict[str, Any] = {"name": "mine", "tasks": [{"name": "counting", "env": "my_envs:make_counting"}]}


def make_entry() -> dict[str, Any]:
    """What a function of an entry point returns."""
    return {**ENTRY, "name": "made"}


def test_names() -> None:
    assert suite_names()[:4] == ("dmlab30", "atari57", "atari5", "toy")
    with pytest.raises(ValueError, match=r"no suite 'atari75', did you mean one of: atari5, atari57"):
        load_suite("atari75")
    with pytest.raises(ValueError, match=r"no table 'relased', did you mean one of: released"):
        load_suite("dmlab30", score_table="relased")


def write(folder: Path, text: str) -> str:
    path = folder / "mine.yaml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_yaml_file_and_the_module_beside_it(tmp_path: Path) -> None:
    module = (ROOT / "tests" / "my_envs.py").read_text(encoding="utf-8")
    (tmp_path / "envs_beside_yaml.py").write_text(module, encoding="utf-8")
    path = write(
        tmp_path,
        "{name: mine, tasks: ["
        "{name: counting, env: envs_beside_yaml:make_counting, env_kwargs: {length: 4}, random_score: 1e-3, "
        "human_score: 10}, {name: dm, env: envs_beside_yaml:make_dm_counting}]}",
    )
    suite = load_suite(path)
    assert (suite.name, suite.adapter, suite.score_table, suite.task_names) == (
        "mine", "custom", "own", ("counting", "dm"),
    )  # fmt: skip
    assert suite.import_path == str(tmp_path)
    assert (suite.tasks[0].random_score, suite.tasks[0].human_score, suite.tasks[1].random_score) == (0.001, 10.0, None)
    settings = EnvironmentSettings(instruction_length=3)
    check_suite(suite, settings)
    spaces = suite_spaces(suite, settings)
    assert (spaces.frame_shape, spaces.frame_dtype, spaces.instruction_length) == ((6, 5, 2), "uint8", 3)
    assert (spaces.num_actions, spaces.frames_per_step) == ((3, 4), 1)
    for task, length in zip(suite.tasks, (4, 7), strict=True):
        env = make_vector_env(suite, task, 2, settings, [1, 2])
        observations, _ = env.reset()
        assert observations["instruction"].shape == (2, 3)
        rows = [env.step(np.array([2, 1])) for _ in range(length + 1)]
        assert [row[1].tolist() for row in rows[:2]] == [[2.0, 1.0], [102.0, 101.0]]
        assert rows[length - 1][2].all() and rows[length][4]["reset"].all()
        env.close()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{name: mine, task: []}", "no key 'task', did you mean one of: tasks"),
        ("{tasks: [{name: a, env: 'm:f'}]}", "the key name is missing"),
        ("{name: mine, name: yours, tasks: []}", "duplicate key name"),
        ("{name: mine, tasks: []}", "tasks has to be a list of at least one"),
        ("{name: mine, tasks: 3}", "tasks has to be a list"),
        ("{name: mine, tasks: [3]}", r"tasks\[0\] has to be a mapping"),
        ("[1, 2]", "has to be a mapping"),
        ("", "the key name is missing"),
        ("{name: [", "no valid YAML"),
        ("{name: a/b, tasks: [{name: a, env: 'm:f'}]}", "name: 'a/b' has to be"),
        ("{name: mine, tasks: [{name: a.b, env: 'm:f'}]}", r"tasks\[0\]\.name: 'a\.b' has to be"),
        ("{name: mine, tasks: [{name: 3, env: 'm:f'}]}", r"tasks\[0\]\.name: 3 has to be"),
        ("{name: mine, tasks: [{name: a, env: 'm:f'}, {name: a, env: 'm:f'}]}", "the name 'a' twice"),
        ("{name: mine, tasks: [{name: a}]}", r"tasks\[0\]: the key env is missing"),
        ("{name: mine, tasks: [{name: a, env: m.f}]}", "'m.f' has to read module:function"),
        ("{name: mine, tasks: [{name: a, env: 'm:f', env_kwarg: {}}]}", "did you mean one of: env_kwargs"),
        ("{name: mine, tasks: [{name: a, env: 'm:f', env_kwargs: 3}]}", "env_kwargs of a: 3"),
        ("{name: mine, tasks: [{name: a, env: 'm:f', env_kwargs: {seed: 3}}]}", "not seed"),
        ("{name: mine, tasks: [{name: a, env: 'm:f', random_score: 1}]}", "random_score stands alone"),
        ("{name: mine, tasks: [{name: a, env: 'm:f', human_score: x, random_score: 1}]}", "human_score of a: 'x'"),
        ("{name: mine, tasks: [{name: a, env: 'm:f', human_score: .nan, random_score: 1}]}", "nan has to be a finite"),
        ("{name: mine, tasks: [{name: a, env: 'm:f', human_score: true, random_score: 1}]}", "human_score of a: True"),
    ],
)
def test_mistakes_in_yaml(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        load_suite(write(tmp_path, text))
    assert "mine.yaml" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_file_and_missing_functions(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there is no file"):
        load_suite(str(tmp_path / "none.yaml"))
    for env, message in (("no_such_module:f", "cannot be imported"), ("my_envs:make_countin", "make_counting")):
        path = write(tmp_path, f"{{name: mine, tasks: [{{name: a, env: '{env}'}}]}}")
        with pytest.raises(ValueError, match=message):
            check_suite(load_suite(path), EnvironmentSettings())
    with pytest.raises(ValueError, match="score_table: suite mine has 'own' only"):
        load_suite(path, score_table="released")


def test_entry_points(monkeypatch: pytest.MonkeyPatch) -> None:
    group = registry.ENTRY_POINTS
    here = EntryPoints([EntryPoint(name, f"{__name__}:{name}", group) for name in ("ENTRY", "make_entry", "TABLE")])
    monkeypatch.setattr(registry, "entry_points", here.select)
    assert suite_names()[4:] == ("ENTRY", "TABLE", "make_entry")
    assert load_suite("ENTRY").name == "mine"
    assert load_suite("make_entry").name == "made"
    with pytest.raises(ValueError, match="entry point TABLE: a mapping"):
        load_suite("TABLE")
    with pytest.raises(ValueError, match="did you mean one of: make_entry"):
        load_suite("make_entri")


TABLE = 3  # no suite


def test_non_ascii_task_name_without_a_utf8_locale(tmp_path: Path) -> None:
    decomposed = "cafe\u0301"
    path = write(tmp_path, f"{{name: mine, tasks: [{{name: café, env: 'm:f'}}, {{name: {decomposed}2, env: 'm:f'}}]}}")
    code = f"from tasks.registry import load_suite; print(ascii(load_suite({path!r}).task_names))"
    env = {**os.environ, "LANG": "C", "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    out = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True, check=True)
    assert out.stdout.strip() == r"('caf\xe9', 'caf\xe92')"
