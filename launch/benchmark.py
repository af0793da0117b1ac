"""How fast a configuration trains on this machine, stage by stage, against its bound.

Each stage (environment, inference, learner, transport) is measured alone on one core. A real run cannot do more than
cores / (sum of the stages' seconds per agent step). Machines drift, so stages and run are measured in turn, the run paused
meanwhile; figures are medians over the rounds.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import torch
from rich.console import Console
from rich.table import Table

from agent.device import allow_tf32
from launch import scaling, screen
from launch.config import RunFiles, load_config, suite_of
from launch.learners import choose_device
from launch.plan import make_plan, network_spec
from launch.process import memory_root
from launch.records import METRICS, last_line, read_lines
from launch.recurrence import measure_recurrence
from launch.stages import Stages
from launch.workers import PIDS
from tasks.environment import check_suite, suite_spaces

# After a pause the run needs so long until its queues are as before.
SETTLE_SECONDS = 2.0
START_SECONDS = 300.0
# As many as published agents were trained on.
FRAMES = 1e10


def run_and_measure(
    run: RunFiles, arguments: Sequence[str], rounds: int, stage_seconds: float, run_seconds: float
) -> dict[str, Any]:
    """Start a real run and measure it and its stages in turn."""
    plan = make_plan(run)
    with tempfile.TemporaryDirectory() as scratch, tempfile.TemporaryDirectory(dir=memory_root()) as memory:
        run_dir = Path(scratch) / "run"
        stages = Stages(run, plan, Path(memory))
        command = [sys.executable, str(Path(__file__).with_name("multitask.py")), *arguments, "--run-dir", str(run_dir)]
        command += ["log.every_seconds=1", "log.tensorboard=false", f"total_frames={10**12}"]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        try:
            _wait_for_update(process, run_dir)
            measured = []
            for _ in range(rounds):
                with _paused(run_dir):
                    seconds = stages.measure(stage_seconds)
                time.sleep(SETTLE_SECONDS)
                measured.append({"seconds_per_step": seconds, "steps_per_second": _run_speed(run_dir, run_seconds)})
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait()
    return summarise(measured, os.cpu_count() or 1, plan.frames_per_step, stages.device.type)


def bound_of(seconds: Mapping[str, float], cores: int, device: str) -> float:
    """Agent steps per second that no run can exceed: all stages share the cores, but a learner on a GPU only bounds."""
    if device == "cpu":
        return cores / sum(seconds.values())
    return min(1 / seconds["learner"], cores / sum(cost for stage, cost in seconds.items() if stage != "learner"))


def summarise(measured: Sequence[dict[str, Any]], cores: int, frames_per_step: int, device: str) -> dict[str, Any]:
    """Medians over the rounds; the ratio is taken within each round."""
    bounds = [bound_of(one["seconds_per_step"], cores, device) for one in measured]
    ratios = [one["steps_per_second"] / bound for one, bound in zip(measured, bounds, strict=True)]
    seconds = {
        stage: statistics.median(one["seconds_per_step"][stage] for one in measured)
        for stage in measured[0]["seconds_per_step"]
    }
    steps = statistics.median(one["steps_per_second"] for one in measured)
    bound = statistics.median(bounds)
    return {
        "cores": cores,
        "frames_per_step": frames_per_step,
        "stages": {
            stage: {
                "milliseconds_per_step": 1000 * cost,
                "steps_per_second": 1 / cost,
                "frames_per_second": frames_per_step / cost,
                "share": cost / sum(seconds.values()),
            }
            for stage, cost in seconds.items()
        },
        "run": {"steps_per_second": steps, "frames_per_second": steps * frames_per_step},
        "bound": {"steps_per_second": bound, "frames_per_second": bound * frames_per_step},
        "ratio": statistics.median(ratios),
        "device": device,
        "sizing": sizing(seconds, steps, frames_per_step),
        "limited_by": max(seconds, key=lambda stage: seconds[stage]),
        "rounds": list(measured),
    }


def sizing(seconds: Mapping[str, float], steps_per_second: float, frames_per_step: int) -> dict[str, float]:
    """What follows for a long run: cores of actors that one learner keeps up with; days for FRAMES at this speed, and with as
    many actors as this learner can take."""
    acting = sum(seconds.get(stage, 0.0) for stage in ("environment", "inference"))
    days = FRAMES / frames_per_step / 86_400
    return {
        "actor_cores_per_learner": acting / seconds["learner"],
        "days_at_this_speed": days / steps_per_second,
        "days_with_enough_actors": days * seconds["learner"],
    }


def sentence(result: Mapping[str, Any]) -> str:
    """The sizing for a person."""
    size = result["sizing"]
    return (
        f"one learner ({result['device']}) keeps up with {size['actor_cores_per_learner']:.1f} cores of actors; "
        f"{FRAMES:,.0f} frames take {size['days_at_this_speed']:,.1f} days at this speed, "
        f"{size['days_with_enough_actors']:,.1f} days with as many actors as the learner can take"
    )


def table(result: dict[str, Any]) -> Table:
    """The result for a person."""
    rows = Table(title=f"{result['cores']} cores, {result['frames_per_step']} frames per agent step; stages on one core each")
    for column in ("", "ms/step", "steps/s", "frames/s", "share of a step"):
        rows.add_column(column, justify="left" if column == "" else "right")
    for name, stage in result["stages"].items():
        numbers = [f"{stage['milliseconds_per_step']:.3f}", f"{stage['steps_per_second']:,.0f}"]
        rows.add_row(name, *numbers, f"{stage['frames_per_second']:,.0f}", f"{100 * stage['share']:.0f}%")
    rows.add_section()
    for name in ("bound", "run"):
        rows.add_row(name, "", f"{result[name]['steps_per_second']:,.0f}", f"{result[name]['frames_per_second']:,.0f}")
    return rows


def _wait_for_update(process: subprocess.Popen[bytes], run_dir: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while (record := last_line(run_dir / METRICS)) is None or record["updates"] < 1:
        if process.poll() is not None or time.monotonic() > deadline:
            message = process.stderr.read().decode() if process.stderr and process.poll() is not None else "it did not start"
            raise RuntimeError(f"the run to be measured ended: {message}")
        time.sleep(0.5)


@contextmanager
def _paused(run_dir: Path) -> Iterator[None]:
    pids = json.loads((run_dir / PIDS).read_text(encoding="utf-8"))
    processes = []
    for pid in [*pids["learners"], *pids["workers"].values()]:
        processes += [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    for process in processes:
        process.suspend()
    try:
        yield
    finally:
        for process in processes:
            process.resume()


def _run_speed(run_dir: Path, seconds: float) -> float:
    """Agent steps per second that the learner consumed, between two records at least `seconds` apart."""
    number = sum(1 for _ in read_lines(run_dir / METRICS))
    while True:
        records = list(read_lines(run_dir / METRICS))[number:]
        if records and records[-1]["seconds"] - records[0]["seconds"] >= seconds:
            return (records[-1]["steps"] - records[0]["steps"]) / (records[-1]["seconds"] - records[0]["seconds"])
        time.sleep(0.2)


def _sizes(text: str | None) -> list[int]:
    """Numbers of ranks, smallest first; ValueError if they are none."""
    parts = text.split(",") if text is not None else []
    if any(not part.isdecimal() or int(part) < 1 for part in parts):
        raise ValueError(f"--ranks {text} is no list of numbers of at least 1: write --ranks 1,2")
    return sorted({int(part) for part in parts})


def main(arguments: Sequence[str] | None = None) -> int:
    """The command. Exit code 2 if the configuration is refused."""
    parser = argparse.ArgumentParser(prog="benchmark.py", description=__doc__, allow_abbrev=False)
    parser.add_argument("--suite", required=True, metavar="NAME|FILE.yaml")
    parser.add_argument("--tasks", metavar="A,B", help="only these tasks of the suite")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="of stages and run in turn (default 5)")
    parser.add_argument("--stage-seconds", type=float, default=2.0, metavar="S", help="per stage and round (default 2)")
    parser.add_argument("--run-seconds", type=float, default=15.0, metavar="S", help="of the run per round (default 15)")
    parser.add_argument("--recurrence", action="store_true", help="measure the core LSTM only, on learner.device")
    parser.add_argument("--ranks", metavar="1,2", help="measure so many learner ranks on random batches, and nothing else")
    parser.add_argument("--json", action="store_true", help="print JSON only")
    parser.add_argument("settings", nargs="*", metavar="key=value", help="any setting of multitask.py")
    options = parser.parse_intermixed_args(arguments)
    settings = [*([f"tasks=[{options.tasks}]"] if options.tasks else []), *options.settings]
    try:
        config = load_config(options.suite, None, settings)
        if options.recurrence and config.network.core == "none":
            raise ValueError("--recurrence: network.core=none has no resets to measure, add network.core=lstm")
        suite = suite_of(config)
        check_suite(suite, config.environment)
        spaces = suite_spaces(suite, config.environment)
        sizes = _sizes(options.ranks)
        for size in sizes or [1]:
            device = choose_device(config.learner.device, 0, size)
    except ValueError as error:
        print(f"benchmark: {error}", file=sys.stderr)
        return 2
    run = RunFiles(config, suite, network_spec(config, suite, spaces), spaces.frames_per_step)
    if sizes:
        scaled = scaling.measure(run, sizes, options.rounds, options.stage_seconds)
        console = Console(width=None if sys.stdout.isatty() else 100)
        console.print_json(data=scaled) if options.json else console.print(scaling.table(scaled))
        return 0
    if options.recurrence:
        torch.set_num_threads(config.learner.threads)
        allow_tf32(config.learner.tf32)
        found = measure_recurrence(run.network, device)
        print(json.dumps({"device": str(device), **found}, indent=2))
        return 0
    flags = ["--suite", options.suite, *settings]
    result = run_and_measure(run, flags, options.rounds, options.stage_seconds, options.run_seconds)
    if options.json:
        print(json.dumps(result, indent=2))
        return 0
    Console(width=None if sys.stdout.isatty() else 100).print(table(result))
    print(
        f"the run reaches {100 * result['ratio']:.0f}% of its bound (median of {options.rounds}); "
        f"the {result['limited_by']} costs most"
    )
    print(sentence(result))
    return 0


if __name__ == "__main__":
    screen.show_any_letter()
    sys.exit(main())
