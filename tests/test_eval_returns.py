"""Reading returns: a stream of episodes that may still be growing, and files of returns with their sound-alikes."""

import json
from pathlib import Path
from typing import Any

import pytest

from eval import returns
from eval.episodes import Columns, read_columns
from tasks.registry import load_suite

TOY = load_suite("toy")
DMLAB30 = load_suite("dmlab30")


def line(task: str, value: float, total_frames: int = 0) -> str:
    row = {"task": task, "return": value, "frames": 4, "steps": 1, "total_frames": total_frames, "seconds": 1.0}
    return json.dumps({**row, "policy_version": 1, "actor": 0}) + "\n"


def read(path: Path, text: str) -> dict[str, Columns]:
    path = path / "episodes.jsonl"
    path.write_text(text, encoding="utf-8")
    return read_columns(path, TOY)


def values(found: dict[str, Columns], name: str) -> dict[str, list[float]]:
    """One column of each task that has a game."""
    return {task: getattr(column, name).tolist() for task, column in found.items() if len(column.returns)}


def test_the_episodes_of_each_task_are_read_in_their_order(tmp_path: Path) -> None:
    found = read(tmp_path, "".join(line("catch", i, 10 * i) + line("memory", -i, 10 * i + 5) for i in range(3)))
    assert tuple(found) == TOY.task_names
    assert values(found, "returns") == {"catch": [0, 1, 2], "memory": [0, -1, -2]}
    assert values(found, "frames") == {"catch": [4] * 3, "memory": [4] * 3}
    assert values(found, "total_frames") == {"catch": [0, 10, 20], "memory": [5, 15, 25]}


@pytest.mark.parametrize("cut", [1, 12, 40, 90])
def test_a_last_line_being_written_is_ignored_wherever_it_is_cut(tmp_path: Path, cut: int) -> None:
    found = read(tmp_path, line("catch", 1.0, 4) + line("catch", 2.0, 8)[:cut])
    assert values(found, "returns") == {"catch": [1.0]} and values(found, "total_frames") == {"catch": [4]}


def test_a_run_without_an_episode_yet_has_empty_columns(tmp_path: Path) -> None:
    for found in (read_columns(tmp_path / "episodes.jsonl", TOY), read(tmp_path, "")):
        assert tuple(found) == TOY.task_names and values(found, "returns") == {}


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (line("catch", 2.0)[:30] + "\n", "line 2 of .* is damaged"),
        (line("catch", 2.0)[:30] + line("catch", 2.0), "line 2 of .* is damaged"),
        ("\n", "line 2 of .* is damaged"),
        ("[1]\n", "line 2 of .* is no episode"),
        ('{"task": "catch", "return": null, "frames": 4, "total_frames": 4}\n', "line 2 of .* is no episode"),
        (line("catch", 10**400), "line 2 of .* is no episode"),
        (line("catsh", 2.0), "line 2 of .*: suite toy has no task 'catsh'"),
        (line("catch", float("nan")), "line 2 of .*: the return of catch is nan"),
        (line("catch", float("inf")), "line 2 of .*: the return of catch is inf"),
    ],
)
def test_a_line_in_the_middle_that_is_no_episode_is_an_error_with_its_number(tmp_path: Path, bad: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read(tmp_path, line("catch", 1.0) + bad + line("catch", 3.0))


def read_file(path: Path, content: Any) -> tuple[dict[str, list[float]], str | None]:
    path = path / "returns.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return returns.read_returns_file(path, DMLAB30)


def test_task_train_and_test_names_mean_the_same_task(tmp_path: Path) -> None:
    task, level = "rooms_collect_good_objects", "contributed/dmlab30/rooms_collect_good_objects"
    assert read_file(tmp_path, {task: [1, 2.5]}) == ({task: [1.0, 2.5]}, None)
    assert read_file(tmp_path, {f"{level}_train": [1]}) == ({task: [1.0]}, "train")
    assert read_file(tmp_path, {f"{task}_test": [1]}) == ({task: [1.0]}, "test")
    assert read_file(tmp_path, {"contributed/dmlab30/rooms_watermaze": [1]}) == ({"rooms_watermaze": [1.0]}, None)
    assert read_file(tmp_path, {}) == ({}, None)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            {"rooms_collect_good_objects_train": [1], "rooms_collect_good_objects_test": [1]},
            "'rooms_collect_good_objects_train' and 'rooms_collect_good_objects_test' are the same task",
        ),
        ('{"rooms_watermaze": [1], "rooms_watermaze": [2]}', "'rooms_watermaze' and 'rooms_watermaze' are the same"),
        (
            {"rooms_collect_good_objects_train": [1], "rooms_exploit_deferred_effects_test": [1]},
            "'rooms_collect_good_objects_train' is a training level, 'rooms_exploit_deferred_effects_test' a test level",
        ),
        ({"rooms_watermaze": []}, r"'rooms_watermaze' holds \[\]"),
        ({"rooms_watermaze": 3}, "'rooms_watermaze' holds 3"),
        ({"rooms_watermaze": [1, "2"]}, "'rooms_watermaze': return 1 is '2'"),
        ({"rooms_watermaze": [True]}, "'rooms_watermaze': return 0 is True"),
        ('{"rooms_watermaze": [NaN]}', "'rooms_watermaze': return 0 is nan"),
        ('{"rooms_watermaze": [1, -Infinity]}', "'rooms_watermaze': return 1 is -inf"),
        ('{"rooms_watermaze": [1e999]}', "'rooms_watermaze': return 0 is inf"),
        ({"rooms_watermaze": [10**400]}, "'rooms_watermaze': return 0 is inf"),
        ({"rooms_watermase": [1]}, "rooms_watermaze"),
        ("[1, 2]", "must hold one JSON object"),
        ("{", "is not a readable JSON file"),
    ],
)
def test_sound_alikes_and_nonsense_are_errors_that_name_them(tmp_path: Path, content: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        read_file(tmp_path, content)
    assert str(tmp_path / "returns.json") in str(error.value)
