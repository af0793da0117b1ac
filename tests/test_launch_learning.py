"""Studies: who runs, how long, what is drawn; with the real command and a peer of a few lines."""

import json
import shlex
import sys
from pathlib import Path

import numpy as np
import pytest

from launch import learning, multitask

ROOT = Path(__file__).parents[1]

PEER = """
import argparse, json, sys, time
p = argparse.ArgumentParser()
for name, kind in (("seed", int), ("seconds", float), ("out", str), ("best", float)):
    p.add_argument("--" + name, type=kind)
o = p.parse_args()
with open(o.out, "w", buffering=1) as out:
    for i in range(300):
        out.write(json.dumps({"return": min(o.best, i / 10 + o.seed), "total_steps": 50 * (i + 1), "seconds": i / 100}) + "\\n")
if o.best > 50:
    time.sleep(600)
"""


def write(folder: Path, text: str) -> Path:
    (folder / "peer.py").write_text(PEER)
    path = folder / "study.yaml"
    path.write_text(text.replace("PEER", f"{sys.executable} {folder / 'peer.py'}"))
    return path


def test_ours_and_a_peer_in_turn(tmp_path, capsys):
    tiny = "learner.batch_size=8 actor.num_envs=8 actor.num_actors=1 log.every_seconds=0.5 log.tensorboard=false"
    study = write(
        tmp_path,
        f"""
name: two of them
seconds: 60
seeds: [0, 1]
target: 10
note: nothing else ran
configurations:
  ours: {{settings: --suite toy --tasks catch --total-frames 3000 {tiny}}}
  peer: {{peer: PEER --best 20}}
""",
    )
    out = tmp_path / "out"
    assert learning.main([str(study), "--out", str(out)]) == 0
    order = [line.split(":")[1].split(",")[0].strip() for line in capsys.readouterr().out.splitlines() if "up to" in line]
    assert order == ["ours", "peer"] * 2, "seed by seed"
    found = json.loads((out / "study.json").read_text())
    assert found["note"] == "nothing else ran"
    for seed, run in enumerate(found["runs"]["ours"]):
        assert run["seed"] == seed and run["games"] > 100 and run["exit_code"] == 0 and run["steps"] >= 2000
        assert -1 <= run["last_100"] <= 1 and run["target_steps"] is None
    for seed, run in enumerate(found["runs"]["peer"]):
        returns = np.minimum(20, np.arange(300) / 10 + seed)
        means = np.convolve(returns, np.ones(100) / 100, "valid")
        assert (
            run["games"] == 300
            and run["last_100"] == pytest.approx(means[-1])
            and run["best_100"] == pytest.approx(means.max())
        )
        first = 99 + int(np.argmax(means >= 10))
        assert run["target_steps"] == 50 * (first + 1) and run["target_seconds"] == pytest.approx(first / 100)
    assert (out / "study.png").read_bytes().startswith(b"\x89PNG")
    before = (out / "peer" / "seed-0" / "about.json").stat().st_mtime_ns
    assert learning.main([str(study), "--out", str(out)]) == 0
    assert "up to" not in capsys.readouterr().out, "what is there is not run again"
    assert (out / "peer" / "seed-0" / "about.json").stat().st_mtime_ns == before


@pytest.mark.parametrize(("more", "limit"), [("seconds: 600\nstop_at_target: true", 30), ("seconds: 3", 30)])
def test_a_run_ends_at_its_target_or_time(tmp_path, more, limit):
    """The peer would sleep for ten minutes."""
    study = write(tmp_path, f"name: ends\n{more}\ntarget: 20\nconfigurations:\n  peer: {{peer: PEER --best 100}}\n")
    assert learning.main([str(study), "--out", str(tmp_path / "out")]) == 0
    (run,) = json.loads((tmp_path / "out" / "study.json").read_text())["runs"]["peer"]
    assert run["wall_seconds"] < limit and run["target_steps"] is not None and run["exit_code"] != 0


def test_a_run_that_was_broken_off_starts_anew(tmp_path):
    study = write(tmp_path, "name: again\nseconds: 20\nconfigurations:\n  peer: {peer: PEER --best 20}\n")
    left = tmp_path / "out" / "peer" / "seed-0"
    left.mkdir(parents=True)
    (left / "games.jsonl").write_text('{"return": 1.0, "total_steps": 1, "seconds": 1}\n' * 1000)
    (left / "run").mkdir()
    assert learning.main([str(study), "--out", str(tmp_path / "out")]) == 0
    (run,) = json.loads((tmp_path / "out" / "study.json").read_text())["runs"]["peer"]
    assert run["games"] == 300 and not (left / "run").exists()


def test_a_peer_that_plays_nothing_is_named(tmp_path, capsys):
    study = write(tmp_path, "name: dead\nseconds: 20\nconfigurations:\n  dead: {peer: /bin/false}\n")
    assert learning.main([str(study), "--out", str(tmp_path / "out")]) == 1
    assert "no finished game, exit code 1" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name: a\nseconds: 5\nconfigurations: {x: {}}", "configurations.x needs either"),
        ("name: a\nseconds: 5\nconfigurations: {x: {settings: a, peer: b}}", "configurations.x needs either"),
        ("name: a\nseconds: 5\nconfigurations: {}", "needs configurations, seeds"),
        ("name: a\nseconds: 0\nconfigurations: {x: {peer: b}}", "seconds above 0"),
        ("name: a\nseconds: soon\nconfigurations: {x: {peer: b}}", "seconds"),
        ("name: a\nseconds: 5\nconfigurations: {x: {peer: $NOBODY_SETS_THIS b}}", "export NOBODY_SETS_THIS="),
        ("name: a\nsecond: 5\nconfigurations: {x: {peer: b}}", "second"),
    ],
)
def test_a_wrong_study_is_refused(tmp_path, capsys, text, message):
    assert learning.main([str(write(tmp_path, text)), "--out", str(tmp_path / "out")]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("path", sorted((ROOT / "launch" / "studies").glob("*.yaml")), ids=lambda path: path.stem)
def test_the_studies_of_the_project_can_be_started(path, monkeypatch, capsys):
    """Read, and each of our own configurations planned; peers live in environments of their own."""
    monkeypatch.chdir(ROOT)
    for name in ("SB3", "SF"):
        monkeypatch.setenv(name, "python")
    study = learning.read_study(path)
    assert study.configurations
    for one in study.configurations.values():
        if one.settings:
            assert multitask.main([*shlex.split(one.settings), "--dry-run"]) == 0, capsys.readouterr().err
        else:
            assert (ROOT / shlex.split(one.peer)[1]).is_file()


def test_curves_are_means_over_the_last_hundred_games():
    games = [{"return": float(i), "total_steps": 10 * i, "seconds": i / 2} for i in range(150)]
    points = learning.curve(games)
    assert points["return"][0] == pytest.approx(np.mean(range(10))) and points["steps"][0] == 90
    assert points["return"][-1] == pytest.approx(np.mean(range(50, 150))) and points["seconds"][-1] == 74.5
    assert learning.curve([])["return"].size == 0
