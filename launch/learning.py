"""Does it learn, how soon, and beside whom: trains named configurations one after another, and draws all of their seeds.

  python launch/learning.py launch/studies/pong.yaml --out studies/pong

A study names configurations. `settings` are arguments of launch/multitask.py; `peer` is a command of another program that
takes --seed N --seconds S --out FILE and writes a JSON line per game: `return`, `total_steps` (agent steps of the run),
`seconds`; $NAME in it is an environment variable. Seed by seed the configurations take turns. What is there is not run again:
stop at any time, and start again.
"""

import argparse
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from launch import screen
from launch.config import RESOLVED_FILE, read_run
from launch.records import EPISODES, read_lines
from launch.settings import first_line, read_yaml

ROOT = Path(__file__).parents[1]
GAMES, ABOUT = "games.jsonl", "about.json"
# Curves and results are means over so many last games.
WINDOW = 100
POLL_SECONDS = 1.0
STOP_SECONDS = 60.0


@dataclass(frozen=True)
class Configuration:
    """One of them: arguments of the run's command, or the command of a peer."""

    settings: str = ""
    peer: str = ""


@dataclass(frozen=True)
class Study:
    """A study.

    Attributes:
        name: title of the figure.
        seconds: wall time of each run, its start and imports included; curves count from after them.
        seeds: of each configuration.
        target: a run's result tells when the mean of the last 100 games first was so high; None = there is none.
        stop_at_target: a run ends when it is reached.
        cores: each run may use these only, as taskset takes them ("0" or "0,1"); empty = all.
        note: what else ran, and anything a reader of the figure has to know.
        configurations: name -> configuration.
    """

    name: str
    seconds: float
    configurations: dict[str, Configuration]
    seeds: list[int] = field(default_factory=lambda: [0])
    target: float | None = None
    stop_at_target: bool = False
    cores: str = ""
    note: str = ""


def read_study(path: Path) -> Study:
    """From a YAML file.

    Raises:
        ValueError: an unknown key, a wrong type, or a configuration that is neither ours nor a peer's.
    """
    content = read_yaml(path)
    try:
        study = cast(Study, OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Study), content)))
    except OmegaConfBaseException as error:
        raise ValueError(f"{path}: {getattr(error, 'full_key', None) or 'a key'}: {first_line(error)}") from error
    for name, one in study.configurations.items():
        if bool(one.settings) == bool(one.peer):
            raise ValueError(f"{path}: configurations.{name} needs either `settings` or `peer`")
        if unset := re.search(r"\$\{?(\w+)", os.path.expandvars(one.peer)):
            raise ValueError(f"{path}: configurations.{name} needs {unset[1]}: export {unset[1]}=... first")
    if not study.configurations or not study.seeds or study.seconds <= 0:
        raise ValueError(f"{path}: a study needs configurations, seeds, and seconds above 0")
    return study


def command(one: Configuration, seed: int, seconds: float, folder: Path) -> list[str]:
    """The command line of a run."""
    if one.peer:
        return [
            *shlex.split(os.path.expandvars(one.peer)),
            "--seed",
            str(seed),
            "--seconds",
            f"{seconds:g}",
            "--out",
            str(folder / GAMES),
        ]
    ours = [sys.executable, str(ROOT / "launch" / "multitask.py"), *shlex.split(one.settings)]
    return [*ours, "--seed", str(seed), "--run-dir", str(folder / "run")]


def games(folder: Path) -> list[dict[str, Any]]:
    """Games of a run so far, ours or a peer's: `return`, `total_steps`, `seconds` of training, without imports."""
    run = folder / "run"
    if not (run / RESOLVED_FILE).exists():
        return list(read_lines(folder / GAMES))
    per_step = read_run(run).frames_per_step
    return [
        {"return": game["return"], "total_steps": game["total_frames"] // per_step, "seconds": game["seconds"]}
        for game in read_lines(run / EPISODES)
    ]


def curve(found: Sequence[Mapping[str, Any]]) -> dict[str, np.ndarray]:
    """Points [P] after each game from the tenth on: `steps`, `seconds`, and the mean `return` of the last WINDOW games."""
    if not found:
        return {name: np.empty(0) for name in ("return", "steps", "seconds")}
    returns = np.array([game["return"] for game in found], float)
    sums = np.concatenate([[0.0], returns.cumsum()])
    ends = np.arange(min(10, returns.size), returns.size + 1)
    starts = np.maximum(0, ends - WINDOW)
    return {
        "return": (sums[ends] - sums[starts]) / (ends - starts),
        "steps": np.array([game["total_steps"] for game in found], float)[ends - 1],
        "seconds": np.array([game["seconds"] for game in found], float)[ends - 1],
    }


def result(found: Sequence[Mapping[str, Any]], target: float | None) -> dict[str, Any]:
    """What a run reached: games, steps, seconds, mean of the last 100 games and the best such mean, and when the target was."""
    if not found:
        return {"games": 0}
    points = curve(found)
    whole = np.arange(1, points["return"].size + 1) + min(10, len(found)) - 1 >= WINDOW
    numbers: dict[str, Any] = {
        "games": len(found),
        "steps": int(found[-1]["total_steps"]),
        "seconds": float(found[-1]["seconds"]),
        "last_100": float(points["return"][-1]),
        "best_100": float(points["return"][whole].max()) if whole.any() else None,
    }
    if target is not None:
        reached = np.flatnonzero(whole & (points["return"] >= target))
        numbers["target_steps"] = int(points["steps"][reached[0]]) if reached.size else None
        numbers["target_seconds"] = float(points["seconds"][reached[0]]) if reached.size else None
    return numbers


def play(one: Configuration, seed: int, study: Study, folder: Path) -> dict[str, Any]:
    """Run it to its end, its time, or the target; returns what there is to know about it."""
    shutil.rmtree(folder, ignore_errors=True)  # of a run that was broken off
    folder.mkdir(parents=True)
    call = [*(["taskset", "-c", study.cores] if study.cores else []), *command(one, seed, study.seconds, folder)]
    load_before, began = os.getloadavg()[0], time.monotonic()
    with (folder / "output.txt").open("w") as output:
        process = subprocess.Popen(call, stdout=output, stderr=subprocess.STDOUT, cwd=ROOT, start_new_session=True)
        try:
            while process.poll() is None and not _is_over(study, folder, time.monotonic() - began):
                time.sleep(POLL_SECONDS)
        finally:
            _end(process)
    return {
        "command": shlex.join(call),
        "seed": seed,
        "wall_seconds": round(time.monotonic() - began, 1),
        "exit_code": process.returncode,
        "load_before": load_before,
        "load_after": os.getloadavg()[0],
        **result(games(folder), study.target),
    }


def _is_over(study: Study, folder: Path, seconds: float) -> bool:
    if seconds >= study.seconds:
        return True
    return study.stop_at_target and result(games(folder), study.target).get("target_steps") is not None


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ask, wait, kill: what a command started ends with it."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def run_study(study: Study, out: Path) -> dict[str, list[dict[str, Any]]]:
    """All runs that are not there yet, seed by seed; name -> what is known of each."""
    for seed in study.seeds:
        for name, one in study.configurations.items():
            about = _folder(out, name, seed) / ABOUT
            if about.exists():
                continue
            print(f"{study.name}: {name}, seed {seed}, up to {study.seconds / 60:.0f} minutes", flush=True)
            found = play(one, seed, study, about.parent)
            about.write_text(json.dumps(found, indent=2), encoding="utf-8")
            print(f"  {sentence(found, study.target)}", flush=True)
            summarise(study, out)
    return summarise(study, out)


def summarise(study: Study, out: Path) -> dict[str, list[dict[str, Any]]]:
    """Write OUT/study.json and OUT/study.png of all runs that are there."""
    runs: dict[str, list[dict[str, Any]]] = {}
    for name in study.configurations:
        files = [_folder(out, name, seed) / ABOUT for seed in study.seeds]
        runs[name] = [json.loads(file.read_text(encoding="utf-8")) for file in files if file.exists()]
    content = {"name": study.name, "note": study.note, "cores": study.cores or "all", "target": study.target, "runs": runs}
    (out / "study.json").write_text(json.dumps(content, indent=2), encoding="utf-8")
    draw(study, out)
    return runs


def sentence(found: Mapping[str, Any], target: float | None) -> str:
    """A run in one line."""
    if not found["games"]:
        return f"no finished game, exit code {found['exit_code']}: see output.txt in its folder"
    text = f"mean of the last {min(WINDOW, found['games'])} games {found['last_100']:.2f} after {found['steps']:,} steps"
    text += f" and {found['seconds'] / 60:.1f} minutes"
    if target is None:
        return text
    if found["target_steps"] is None:
        return f"{text}; {target:g} not reached"
    return f"{text}; {target:g} reached after {found['target_steps']:,} steps and {found['target_seconds'] / 60:.1f} minutes"


def draw(study: Study, out: Path) -> None:
    """Return against agent steps and against minutes, every seed a line, a colour for each configuration."""
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, 2, figsize=(11, 4.2), sharey=True, layout="constrained")
    for colour, name in enumerate(study.configurations):
        label: str | None = name
        for seed in study.seeds:
            points = curve(games(_folder(out, name, seed)))
            if not points["return"].size:
                continue
            style = {"color": f"C{colour}", "lw": 1.3, "alpha": 0.85}
            panels[0].plot(points["steps"] / 1e6, points["return"], label=label, **style)
            panels[1].plot(points["seconds"] / 60, points["return"], **style)
            label = None
    for panel, text in zip(panels, ("agent steps, millions", "minutes of training, wall time"), strict=True):
        panel.set_xlabel(text)
        panel.grid(alpha=0.3)
        if study.target is not None:
            panel.axhline(study.target, color="grey", ls=":", lw=1)
    panels[0].set_ylabel(f"mean return of the last {WINDOW} games")
    if panels[0].get_legend_handles_labels()[0]:
        panels[0].legend(fontsize=8)
    figure.suptitle(study.name)
    if study.note:
        figure.supxlabel(study.note, fontsize=8)
    figure.savefig(out / "study.png", dpi=130)
    plt.close(figure)


def _folder(out: Path, name: str, seed: int) -> Path:
    return out / name / f"seed-{seed}"


def main(arguments: Sequence[str] | None = None) -> int:
    """The command. Exit code 0 done, 1 a run finished no game, 2 refused."""
    parser = argparse.ArgumentParser(
        prog="learning.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("study", type=Path, help="YAML file; launch/studies has some")
    parser.add_argument("--out", type=Path, help="folder for runs and results; default: studies/NAME of the file")
    options = parser.parse_args(arguments)
    try:
        study = read_study(options.study)
        out = options.out or Path("studies") / options.study.stem
        out.mkdir(parents=True, exist_ok=True)
    except (ValueError, OSError) as error:
        print(f"learning: {error}", file=sys.stderr)
        return 2
    runs = run_study(study, out.resolve())
    print(f"{out / 'study.json'}, {out / 'study.png'}")
    return 0 if all(run["games"] for found in runs.values() for run in found) else 1


if __name__ == "__main__":
    screen.show_any_letter()
    sys.exit(main())
