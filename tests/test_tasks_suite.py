"""Suites: canonical order, score tables by value, normalisation, names of tasks and levels."""

import csv
import json
import math
from pathlib import Path

import pytest

from tasks.registry import load_suite
from tasks.suite import Suite, Task

DATA = Path(__file__).parents[1] / "tasks" / "data"


def test_sizes_and_canonical_order() -> None:
    dmlab, atari = load_suite("dmlab30"), load_suite("atari57")
    assert (len(dmlab.tasks), len(atari.tasks)) == (30, 57)
    assert dmlab.task_names[:2] == ("rooms_collect_good_objects", "rooms_exploit_deferred_effects")
    assert dmlab.task_names[-1] == "explore_object_rewards_many"
    assert atari.task_names == tuple(sorted(atari.task_names))
    assert load_suite("atari5").task_names == ("battle_zone", "double_dunk", "name_this_game", "phoenix", "qbert")
    assert load_suite("toy").task_names == ("catch", "memory", "instruction", "large_rewards")


def test_levels_of_both_splits() -> None:
    task = load_suite("dmlab30").task("rooms_collect_good_objects")
    assert task.train_level == "contributed/dmlab30/rooms_collect_good_objects_train"
    assert task.test_level == "contributed/dmlab30/rooms_collect_good_objects_test"
    assert load_suite("atari5").task("qbert").train_level == "qbert"


@pytest.mark.parametrize(
    ("suite", "table", "task", "random_score", "human_score"),
    [
        ("dmlab30", "", "lasertag_one_opponent_small", -0.224, 12.65),
        ("dmlab30", "paper_b1", "lasertag_one_opponent_small", -0.1, 18.6),
        ("dmlab30", "paper_b1", "lasertag_three_opponents_small", -0.1, 31.5),
        ("dmlab30", "paper_b1", "lasertag_one_opponent_large", -0.2, 12.7),
        ("dmlab30", "paper_b1", "lasertag_three_opponents_large", -0.2, 18.6),
        ("dmlab30", "paper_b1", "rooms_watermaze", 4.1, 54.0),
        ("atari57", "", "video_pinball", 16256.9, 17667.9),
        ("atari57", "agent57", "video_pinball", 0.0, 17667.9),
        ("atari57", "agent57", "pong", -20.7, 14.6),
        ("atari5", "agent57", "qbert", 163.9, 13455.0),
    ],
)
def test_scores_by_table(suite: str, table: str, task: str, random_score: float, human_score: float) -> None:
    loaded = load_suite(suite, score_table=table)
    assert (loaded.task(task).random_score, loaded.task(task).human_score) == (random_score, human_score)
    assert loaded.score_table == (table or {"dmlab30": "released", "atari57": "dqn_zoo"}[suite])


def test_normalise() -> None:
    atari = load_suite("atari57")
    assert atari.normalise("pong", -20.7) == 0.0
    assert atari.normalise("pong", 14.6) == pytest.approx(100.0)
    assert atari.normalise("breakout", 430.3) == pytest.approx(100 * (430.3 - 1.7) / 28.8)
    assert atari.normalise("pong", -21.0) < 0
    assert load_suite("atari57", score_table="agent57").normalise("video_pinball", 17667.9) == pytest.approx(100.0)


def test_what_cannot_be_normalised() -> None:
    tasks = (Task("bare", "m:f", "m:f"), Task("flat", "m:f", "m:f", 2.0, 2.0), Task("fine", "m:f", "m:f", 0.0, 1.0))
    suite = Suite("mine", "custom", "own", tasks)
    with pytest.raises(ValueError, match="bare has no random_score"):
        suite.normalise("bare", 1.0)
    with pytest.raises(ValueError, match=r"flat has random_score = human_score = 2\.0"):
        suite.normalise("flat", 1.0)
    for value in (math.nan, math.inf):
        with pytest.raises(ValueError, match="mean_return: fine"):
            suite.normalise("fine", value)


def test_unknown_task_gives_near_names() -> None:
    with pytest.raises(ValueError, match=r"no task 'breakuot', did you mean one of: breakout"):
        load_suite("atari57", tasks=["breakuot"])
    with pytest.raises(ValueError, match="catch, memory, instruction, large_rewards"):
        load_suite("toy").task("zzzzzz")


def test_every_gym_id_and_level_name_resolves() -> None:
    atari, dmlab = load_suite("atari57"), load_suite("dmlab30")
    for row in csv.DictReader((DATA / "atari57.csv").read_text(encoding="utf-8").splitlines()):
        assert atari.resolve(row["gym_id"]).name == row["task"]
    for row in csv.DictReader((DATA / "dmlab30.csv").read_text(encoding="utf-8").splitlines()):
        for level in (row["train_level"], row["test_level"]):
            assert dmlab.resolve(level).name == dmlab.resolve(level.split("/")[-1]).name == row["task"]
    with pytest.raises(ValueError, match="pong"):
        atari.resolve("ALE/Pongg-v5")


def test_subset_keeps_canonical_order() -> None:
    toy = load_suite("toy", tasks=["large_rewards", "catch"])
    assert toy.task_names == ("catch", "large_rewards")
    for names, message in (([], "none is named"), (["catch", "catch"], "catch is named 2 times")):
        with pytest.raises(ValueError, match=message):
            toy.subset(names)


def test_dict_round_trip() -> None:
    own = Suite("mine", "custom", "own", (Task("a", "m:f", "m:f", env_kwargs={"length": [1, 2]}),), "/folder")
    for suite in (own, load_suite("dmlab30", score_table="paper_b1")):
        assert Suite.from_dict(json.loads(json.dumps(suite.to_dict()))) == suite
