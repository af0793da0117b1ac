"""Run folders without a training: settings, finished games and records as a run leaves them behind."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from launch.config import Config, RunFiles, load_config, suite_of, write_run
from launch.plan import network_spec
from tasks.environment import suite_spaces


def start_run(folder: Path, config: Config) -> RunFiles:
    """The folder of a run that has just started."""
    folder.mkdir(parents=True, exist_ok=True)
    suite = suite_of(config)
    spaces = suite_spaces(suite, config.environment)
    run = RunFiles(config, suite, network_spec(config, suite, spaces), spaces.frames_per_step)
    write_run(folder, run)
    return run


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
