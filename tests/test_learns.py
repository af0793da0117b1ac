"""Does the fast preset learn frames of Atari's size? The game that tells: a ball on a bright background, in catch84.py.

Uniformly random play scores -4.9. With the pixels as they are (network.input_normalisation=none) nothing is learned in 80,000
steps: half of the units die in the first updates.
"""

from pathlib import Path

import numpy as np
import pytest

from runs import lines, run

SUITE = Path(__file__).parent / "catch84.yaml"


def play(folder: Path, background: str, seed: int, steps: int, *settings: str) -> tuple[np.ndarray, dict]:
    """Returns of all games in order, and the last record."""
    done = run(
        "--suite", str(SUITE), "--tasks", background, "--seed", str(seed), "--run-dir", str(folder),
        "--total-frames", str(steps), "network.torso=shallow", "actor.num_actors=1", "log.every_seconds=2", *settings,
        timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "preset fast" in done.stdout
    return np.array([game["return"] for game in lines(folder / "episodes.jsonl")]), lines(folder / "metrics.jsonl")[-1]


def test_a_ball_on_a_grey_background_is_caught(tmp_path):
    """The short form: 40,000 steps."""
    returns, last = play(tmp_path / "run", "grey", 0, 40_000)
    assert returns[:50].mean() < -2, "it starts near random play"
    assert returns[-50:].mean() > 3
    assert last["steps"] >= 40_000 and last["samples_per_second"] > 1.5 * last["steps_per_second"]
    assert min(last["live_units"]["hidden"] / last["units"]["hidden"], 1) > 0.5
    assert "warning" not in last


@pytest.mark.slow
@pytest.mark.parametrize("background", ["grey", "black"])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_every_seed_learns(tmp_path, background, seed):
    returns, _ = play(tmp_path / "run", background, seed, 80_000)
    assert returns[-100:].mean() > 4
