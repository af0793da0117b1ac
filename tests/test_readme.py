"""The README is true: its commands exist, its example runs, its tree is the tree."""

import json
import re
import shlex
import sys
from pathlib import Path

import pytest

import runs
from launch import actors, multitask

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", TEXT, re.DOTALL | re.MULTILINE)


def block(language: str, word: str) -> str:
    """The code block of a language that holds a word."""
    found = [code for name, code in BLOCKS if name == language and word in code]
    assert len(found) == 1
    return found[0]


def test_the_example_of_an_own_suite_runs(tmp_path):
    (tmp_path / "mine.yaml").write_text(block("yaml", "counting"), encoding="utf-8")
    (tmp_path / "my_envs.py").write_text(block("python", "Counting"), encoding="utf-8")
    run_dir = tmp_path / "run"
    done = runs.run(
        "--suite", str(tmp_path / "mine.yaml"), "--run-dir", str(run_dir), "--total-frames", "3000", *runs.QUICK
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    lengths = {game["task"]: game["steps"] for game in runs.lines(run_dir / "episodes.jsonl")}
    assert lengths == {"counting": 7, "counting_long": 20}


def test_every_command_line_is_understood(capsys):
    lines = [line.split("#")[0].strip() for name, code in BLOCKS if name == "" for line in code.splitlines()]
    parts = [part.strip() for line in lines for part in line.split("&&")]
    commands = [part for part in parts if part.startswith("python launch/multitask.py")]
    assert len(commands) >= 7
    for command in [part for part in parts if part.startswith("python launch/actors.py")]:
        actors.parse(shlex.split(command)[2:])
    for command in commands:
        arguments = shlex.split(command)[2:]
        if "--resume" in arguments or "mine.yaml" in arguments:
            multitask.parse(arguments)
            continue
        assert multitask.main([*arguments, *([] if "--dry-run" in arguments else ["--dry-run"])]) == 0, command
        json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("folder", ["agent", "tasks", "launch", "eval"])
def test_the_tree_names_every_file(folder):
    tree = block("", "tasks/                  the worlds")
    for path in (ROOT / folder).glob("*.py"):
        assert path.name == "__init__.py" or path.name in tree, path
    for name in re.findall(r"\b(\w+\.py)\b", tree):
        assert list(ROOT.rglob(name)), name


def test_this_python_is_one_of_the_tested():
    assert (3, 11) <= sys.version_info < (3, 13)
