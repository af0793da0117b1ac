"""Sample Factory's APPO with its own Atari preset, and an LSTM: trains for some seconds, writes each game.

Runs in an environment of its own: pip install sample-factory 'ale-py<0.11' 'numpy<2' 'opencv-python-headless<4.12'
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import ale_py  # noqa: F401  (registers the games)
import gymnasium
from sample_factory.envs.env_utils import register_env
from sample_factory.train import run_rl
from sf_examples.atari.atari_utils import make_atari_env
from sf_examples.atari.train_atari import parse_atari_args

NUM_ENVS = 8  # of the preset: 8 workers with one each


class Recorder(gymnasium.Wrapper):
    """A line per finished game, raw. Steps of the run are those of this environment times their number: nobody else counts."""

    def __init__(self, env: gymnasium.Env, path: str, began: float) -> None:
        super().__init__(env)
        self._path, self._began, self._steps = path, began, 0

    def step(self, action: Any) -> Any:
        """Pass on, count, write."""
        found = self.env.step(action)
        self._steps += 1
        if "episode" in found[4]:
            line = {
                "return": float(found[4]["episode"]["r"]),
                "total_steps": NUM_ENVS * self._steps,
                "seconds": round(time.time() - self._began, 2),
            }
            with Path(self._path).open("a", encoding="utf-8") as stream:
                stream.write(json.dumps(line) + "\n")
        return found


def make(name: str, config: Any, env_config: Any, render_mode: str | None = None) -> gymnasium.Env:
    """In a worker process, which knows the file and the time from its environment variables."""
    return Recorder(make_atari_env(name, config, env_config, render_mode), os.environ["GAMES"], float(os.environ["BEGAN"]))


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--game", default="pong", help="as in atari_pong")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--out", type=Path, required=True, help="file for the games, JSON lines")
    options = parser.parse_args()
    os.environ |= {"GAMES": str(options.out), "BEGAN": str(time.time())}
    register_env(f"atari_{options.game}", make)
    arguments = [
        f"--env=atari_{options.game}",
        f"--seed={options.seed}",
        f"--train_for_seconds={int(options.seconds)}",
        "--device=cpu",
        "--use_rnn=True",
        "--recurrence=-1",
        f"--train_dir={options.out.parent / 'sample_factory'}",
        "--experiment=peer",
        "--restart_behavior=overwrite",
    ]
    sys.exit(run_rl(parse_atari_args(arguments)))


if __name__ == "__main__":
    main()
