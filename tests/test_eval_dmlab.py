"""Scores of DeepMind Lab's levels that were played without their images."""

import json
from pathlib import Path

import pytest

from eval import score
from eval_runs import fake_run

LEVELS = "tasks=[rooms_watermaze,psychlab_continuous_recognition]"
GAMES = {"rooms_watermaze": [10.0, 20.0], "psychlab_continuous_recognition": [30.0, 31.0]}


def test_levels_played_with_plain_colours_have_no_score(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = fake_run(tmp_path / "run", GAMES, LEVELS, "environment.dmlab.dummy_dataset=true", suite="dmlab30")
    assert score.main([str(run), "--out", str(tmp_path / "out")]) == 0
    report = json.loads((tmp_path / "out" / "report.json").read_text(encoding="utf-8"))
    assert report["unscored"] == ["psychlab_continuous_recognition"]
    assert report["tasks"]["psychlab_continuous_recognition"]["hns"] is None
    assert report["tasks"]["psychlab_continuous_recognition"]["raw_mean"] == 30.5
    assert report["tasks"]["rooms_watermaze"]["hns"] is not None
    assert report["aggregates"]["mean_capped"]["value"] is None
    assert "played with plain colours in place of their images: psychlab_continuous_recognition" in capsys.readouterr().out


def test_with_their_images_they_have_one(tmp_path: Path) -> None:
    run = fake_run(tmp_path / "run", GAMES, LEVELS, suite="dmlab30")
    assert score.main([str(run), "--out", str(tmp_path / "out")]) == 0
    report = json.loads((tmp_path / "out" / "report.json").read_text(encoding="utf-8"))
    assert report["unscored"] == []
    assert report["aggregates"]["mean_capped"]["value"] is not None


def test_other_settings_of_the_engine_are_another_game(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    games = {"rooms_watermaze": [10.0, 20.0, 12.0]}
    runs = []
    for seconds in ("2", "5"):
        settings = ("tasks=[rooms_watermaze]", f"environment.dmlab.engine.episodeLengthSeconds={seconds}")
        runs.append(str(fake_run(tmp_path / seconds, games, *settings, suite="dmlab30")))
    assert score.main([runs[0], "--baseline", runs[1]]) == 2
    assert "protocol: dmlab, episodeLengthSeconds=2 against dmlab, episodeLengthSeconds=5" in capsys.readouterr().err
