"""Run folders without a training: settings, finished games, records and checkpoints as a run leaves them behind."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agent import checkpoint
from agent.network import Network
from eval import score
from launch.config import Config, RunFiles, load_config, suite_of, write_run
from launch.plan import network_spec
from tasks.environment import suite_spaces
from tasks.registry import load_suite

DMLAB = load_suite("dmlab30", score_table="paper_b1")
TOY = load_suite("toy")
TINY = ["network.hidden_size=16", "network.core_size=16"]


def main(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, str, str]:
    """The command in this process: its exit code, and what it said."""
    code = score.main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def read_report(folder: Path) -> dict[str, Any]:
    """The report, which is JSON without NaN and infinity."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    report: dict[str, Any] = json.loads((folder / "report.json").read_text(encoding="utf-8"), parse_constant=refuse)
    return report


def start_run(folder: Path, config: Config) -> RunFiles:
    """The folder of a run that has just started."""
    folder.mkdir(parents=True, exist_ok=True)
    suite = suite_of(config)
    spaces = suite_spaces(suite, config.environment)
    run = RunFiles(config, suite, network_spec(config, suite, spaces), spaces.frames_per_step)
    write_run(folder, run)
    return run


def save_checkpoint(folder: Path, run: RunFiles, frames: int, keep: int = 2) -> Path:
    """A checkpoint of a fresh network."""
    content = {
        "counters": {"frames": frames},
        "task_counters": {task: {"frames": frames // 4} for task in run.suite.task_names},
        "network": run.network.to_dict(),
        "parameters": Network(run.network).state_dict(),
    }
    return checkpoint.save(folder, content, keep)


def fake_run(
    folder: Path,
    returns: Mapping[str, Sequence[float]],
    *overrides: str,
    suite: str = "toy",
    frames: int = 4,
    records: Sequence[Mapping[str, Any]] = (),
) -> Path:
    """A run whose games ended with these raw returns, `frames` environment frames each, one game of each task in turn."""
    config = load_config(suite, None, list(overrides))
    start_run(folder, config)
    lines, total = [], 0
    for i in range(max(map(len, returns.values()), default=0)):
        for task, values in returns.items():
            if i < len(values):
                total += frames
                game = {"task": task, "return": float(values[i]), "frames": frames, "steps": 1}
                lines.append(json.dumps({**game, "total_frames": total, "seconds": total / 100}) + "\n")
    (folder / "episodes.jsonl").write_text("".join(lines), encoding="utf-8")
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return folder


def games(percent: float, task: str, generator: np.random.Generator, n: int = 100, spread: float = 8.0) -> list[float]:
    """Raw returns around a normalised score in percent."""
    row = next(task_row for task_row in (*DMLAB.tasks, *TOY.tasks) if task_row.name == task)
    assert row.random_score is not None and row.human_score is not None
    percents = generator.normal(percent, spread, n)
    return (row.random_score + percents / 100 * (row.human_score - row.random_score)).tolist()


def toy_returns(seed: int, shift: float = 0.0) -> dict[str, list[float]]:
    generator = np.random.default_rng(seed)
    return {task: games(60 + (shift if task == "memory" else 0), task, generator, 60) for task in TOY.task_names}
