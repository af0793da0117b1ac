"""Whole games played with a checkpoint, kept in RUN/evaluations so that no finished game is played twice."""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from rich.console import Console
from rich.progress import Progress

from agent import checkpoint
from agent.network import Network, NetworkSpec
from eval import rollouts
from launch.config import RunFiles
from tasks.suite import Suite

FOLDER = "evaluations"


@dataclass(frozen=True)
class Played:
    """returns: task -> raw returns [N] of games 0 to N - 1. frames: task -> environment frames of these games.

    file, parameter_hash: of the checkpoint. counters, task_counters: what it says of the training.
    """

    returns: dict[str, np.ndarray]
    frames: dict[str, int]
    file: Path
    parameter_hash: str
    counters: dict[str, Any]
    task_counters: dict[str, Any]


def play(
    run_dir: Path,
    run: RunFiles,
    suite: Suite,
    episodes: int,
    num_envs: int,
    seed: int,
    split: str,
    file: Path | None = None,
    device: str = "cpu",
) -> Played:
    """Games 0 to `episodes` - 1 of each task, with the newest parameters of a run or those of a checkpoint file.

    Finished games are read from RUN/evaluations and new ones appended to it, each when it is over. Raises ValueError or
    OSError as `checkpoint.load` and `rollouts.play_games` do.
    """
    file, content = load_checkpoint(run_dir, file)
    network = Network(NetworkSpec.from_dict(content["network"])).to(device)
    network.load_state_dict(content["parameters"])
    network.double()  # see play_games
    torch.set_num_threads(1)  # as an actor: the run may still be training on the other cores
    store = Store(run_dir / FOLDER / f"{content['parameter_hash'][:16]}-{split}-{seed}.jsonl")
    returns, frames = {}, {}
    with Progress(console=Console(stderr=True), disable=not sys.stderr.isatty(), transient=True) as progress:
        for task in suite.task_names:
            done = store.games(task)
            indices = [index for index in range(episodes) if index not in done]
            settings = run.config.environment
            games = rollouts.play_games(suite, task, network, settings, indices, num_envs, seed, split)
            for game in progress.track(games, total=len(indices), description=task):
                store.add(task, game)
                done[game.index] = game
            returns[task] = np.array([done[index].raw_return for index in range(episodes)])
            frames[task] = sum(done[index].frames for index in range(episodes))
    store.close()
    return Played(returns, frames, file, content["parameter_hash"], content["counters"], content["task_counters"])


def load_checkpoint(run_dir: Path, file: Path | None) -> tuple[Path, dict[str, Any]]:
    """A checkpoint file and its content. A run that trains may remove the newest between a look and the reading: it is
    then looked for again."""
    if file is not None:
        return checkpoint.find(file), checkpoint.load(file)
    for _ in range(5):
        found = checkpoint.find(run_dir)
        try:
            return found, checkpoint.load(found)
        except (FileNotFoundError, ValueError):
            if found.exists():
                raise
    raise ValueError(f"the checkpoints of {run_dir} are replaced faster than they can be read: try again")


class Store:
    """Finished games in a file of lines, only appended to.

    A line that cannot be read (torn by a kill, or by a full disk) is a game to play again. Where the folder cannot be
    written, as in an archive, games are played and not kept; a line on stderr says so.

    Args:
        path: of the file; its name says parameters, split and seed: everything but task and index that fixes a game.
    """

    def __init__(self, path: Path) -> None:
        self._games: dict[str, dict[int, rollouts.Game]] = {}
        text = path.read_bytes() if path.exists() else b""
        for line in text.split(b"\n"):
            try:
                row = json.loads(line)
                game = rollouts.Game(int(row["game"]), float(row["return"]), int(row["frames"]), int(row["steps"]))
                self._games.setdefault(row["task"], {})[game.index] = game
            except (ValueError, LookupError, TypeError):
                continue
        try:
            path.parent.mkdir(exist_ok=True)
            self._stream: BinaryIO | None = path.open("ab")
            if text and not text.endswith(b"\n"):
                self._write(b"\n")
        except OSError as error:
            print(f"note: finished games are not kept: {error}", file=sys.stderr)
            self._stream = None

    def games(self, task: str) -> dict[int, rollouts.Game]:
        """Finished games of a task, by index."""
        return dict(self._games.get(task, {}))

    def add(self, task: str, game: rollouts.Game) -> None:
        """Keep one finished game."""
        row = {"task": task, "game": game.index, "return": game.raw_return, "frames": game.frames, "steps": game.steps}
        self._write(json.dumps(row, ensure_ascii=False).encode() + b"\n")

    def close(self) -> None:
        """Close the file."""
        if self._stream is not None:
            self._stream.close()

    def _write(self, line: bytes) -> None:
        if self._stream is not None:
            self._stream.write(line)
            self._stream.flush()


def find_run_of(file: Path) -> Path:
    """The run folder of a checkpoint file. ValueError where it lies in none."""
    folder = file.resolve().parent.parent
    if file.resolve().parent.name != checkpoint.FOLDER or not (folder / "config.yaml").is_file():
        raise ValueError(f"{file} lies in no run folder (RUN/{checkpoint.FOLDER}/...): its suite is not known")
    return folder


def task_frames(counters: dict[str, Any], tasks: Sequence[str]) -> dict[str, int]:
    """Frames trained per task, of a checkpoint's counters."""
    return {task: counters[task]["frames"] for task in tasks if task in counters}
