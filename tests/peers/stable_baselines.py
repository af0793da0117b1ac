"""stable-baselines3's PPO or A2C with the settings of rl-baselines3-zoo for Atari: trains for some seconds, writes each game.

Runs in an environment of its own: pip install stable-baselines3 ale-py opencv-python-headless
"""

import argparse
import functools
import json
import time
from pathlib import Path

import ale_py
import gymnasium
from stable_baselines3 import A2C, PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_atari_env
from stable_baselines3.common.sb2_compat.rmsprop_tf_like import RMSpropTFLike as RMSpropTF
from stable_baselines3.common.vec_env import SubprocVecEnv, VecFrameStack

# Over which the zoo's linear schedules fall.
SCHEDULE_STEPS = 10_000_000


def make_game(name: str, **kwargs: object) -> gymnasium.Env:
    """In a process of its own, where the games have to be registered first."""
    gymnasium.register_envs(ale_py)
    return gymnasium.make(f"{name}NoFrameskip-v4", **kwargs)


class Recorder(BaseCallback):
    """A line per finished game, until the time is up."""

    def __init__(self, path: Path, seconds: float) -> None:
        super().__init__()
        self._stream = path.open("w", encoding="utf-8", buffering=1)
        self._seconds = seconds
        self._began = time.monotonic()

    def _on_step(self) -> bool:
        seconds = time.monotonic() - self._began
        for info in self.locals["infos"]:
            if "episode" in info:
                line = {"return": float(info["episode"]["r"]), "total_steps": self.num_timesteps, "seconds": round(seconds, 2)}
                self._stream.write(json.dumps(line) + "\n")
        return seconds < self._seconds


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--algorithm", choices=["ppo", "a2c"], required=True)
    parser.add_argument("--game", default="Pong", help="as in PongNoFrameskip-v4")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--out", type=Path, required=True, help="file for the games, JSON lines")
    options = parser.parse_args()
    num_envs = 8 if options.algorithm == "ppo" else 16
    games = make_atari_env(functools.partial(make_game, options.game), num_envs, options.seed, vec_env_cls=SubprocVecEnv)
    games = VecFrameStack(games, 4)
    if options.algorithm == "ppo":
        settings = {
            "n_steps": 128,
            "n_epochs": 4,
            "batch_size": 256,
            "learning_rate": lambda left: left * 2.5e-4,
            "clip_range": lambda left: left * 0.1,
            "vf_coef": 0.5,
            "ent_coef": 0.01,
        }
        model = PPO("CnnPolicy", games, seed=options.seed, device="cpu", **settings)
    else:
        model = A2C(
            "CnnPolicy",
            games,
            seed=options.seed,
            device="cpu",
            vf_coef=0.25,
            ent_coef=0.01,
            policy_kwargs={"optimizer_class": RMSpropTF, "optimizer_kwargs": {"eps": 1e-5}},
        )
    model.learn(SCHEDULE_STEPS, callback=Recorder(options.out, options.seconds))


if __name__ == "__main__":
    main()
