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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from rich.console import Console
from rich.table import Table

from agent.inference import LocalPolicy
from agent.learner import Learner
from agent.network import Network
from agent.transport.board import Board, num_parameters
from agent.transport.ring import Ring
from launch import scaling
from launch.config import RunFiles, load_config, suite_of
from launch.plan import Plan, groups, make_plan, network_spec
from launch.process import memory_root
from launch.records import METRICS, last_line, read_lines
from launch.scaling import random_batch
from launch.training import choose_device
from launch.workers import PIDS
from tasks.environment import check_suite, make_vector_env, suite_spaces

# After a pause the run needs so long until its queues are as before.
SETTLE_SECONDS = 2.0
START_SECONDS = 300.0


class Stages:
    """Measures each stage alone on one core, with a run's own sizes.

    Args:
        run, plan: what is measured.
        folder: for mapped files.
        environments: measure them too; engines that are processes work on all cores at once.
    """

    def __init__(self, run: RunFiles, plan: Plan, folder: Path, environments: bool = True) -> None:
        torch.set_num_threads(1)
        torch.set_flush_denormal(True)
        rng = np.random.default_rng(0)
        learner = run.config.learner
        first = {group.task: group for actor in reversed(plan.actors) for group in groups(actor)}
        self._environments = [_environment(run, task, group.count) for task, group in first.items() if environments]
        self._rng = rng
        self._num_steps = learner.batch_size * run.config.actor.unroll_length
        network = Network(plan.network)
        self._learner = Learner(network, run.config.loss, run.config.optimiser, run.config.total_frames)
        self._arrays = random_batch(plan.unroll, learner.batch_size, len(plan.task_names), rng)
        self._batch = {name: torch.from_numpy(array) for name, array in self._arrays.items()}
        half = plan.actors[0].halves[0]
        self._num_envs = sum(group.count for group in half)
        self._policy = LocalPolicy(network, [group.task for group in half for _ in range(group.count)])
        self._rows = {
            name: rng.integers(0, 255, (self._num_envs, *array.shape[2:])).astype(array.dtype)
            for name, array in self._arrays.items()
            if name in ("frame", "instruction")
        }
        self._ring = Ring(folder / "benchmark-ring", plan.unroll, 1, create=True)
        self._board = Board(folder / "benchmark-board", num_parameters(network), create=True)
        self._received = plan.unroll.empty(learner.batch_size)

    def measure(self, seconds: float) -> dict[str, float]:
        """Stage -> seconds per agent step, each measured for about `seconds`."""
        environments = [self._environment_cost(e, seconds) for e in self._environments]
        return {
            **({"environment": statistics.mean(environments)} if environments else {}),
            "inference": time_of(self._infer, seconds) / self._num_envs,
            "learner": time_of(self._update, seconds) / self._num_steps,
            "transport": time_of(self._transport, seconds) / self._num_steps,
        }

    def _environment_cost(self, environment: Any, seconds: float) -> float:
        def step() -> None:
            environment.step(self._rng.integers(0, environment.single_action_space.n, environment.num_envs))

        return time_of(step, seconds / len(self._environments)) / environment.num_envs

    def _infer(self) -> None:
        zeros = np.zeros(self._num_envs, np.float32)
        self._policy.act(self._rows["frame"], self._rows.get("instruction"), zeros, zeros > 0, self._rng.random(self._num_envs))

    def _update(self) -> None:
        self._learner.update(self._batch, self._arrays["task"].tolist())

    def _transport(self) -> None:
        """A batch down, parameters up: once posted, once read."""
        for column in range(len(self._arrays["task"])):
            self._ring.write(self._arrays, column)
            self._ring.spec.copy_in(self._received, column, self._ring.peek())
            self._ring.release()
        self._board.publish(self._learner.network, 1, 0)
        self._board.read(self._learner.network)


def time_of(call: Callable[[], None], seconds: float) -> float:
    """Mean seconds of a call, repeated for about `seconds` after one to warm up."""
    call()
    count, began = 0, time.perf_counter()
    while (spent := time.perf_counter() - began) < seconds or not count:
        call()
        count += 1
    return spent / count


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
    return summarise(measured, os.cpu_count() or 1, plan.frames_per_step)


def summarise(measured: Sequence[dict[str, Any]], cores: int, frames_per_step: int) -> dict[str, Any]:
    """Medians over the rounds; the ratio is taken within each round."""
    bounds = [cores / sum(one["seconds_per_step"].values()) for one in measured]
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
        "limited_by": max(seconds, key=lambda stage: seconds[stage]),
        "rounds": list(measured),
    }


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


def _environment(run: RunFiles, task: int, count: int) -> Any:
    environment = make_vector_env(run.suite, run.suite.tasks[task], count, run.config.environment, list(range(count)))
    environment.reset()
    return environment


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
    parser.add_argument("--ranks", metavar="1,2", help="measure so many learner ranks on random batches, and nothing else")
    parser.add_argument("--json", action="store_true", help="print JSON only")
    parser.add_argument("settings", nargs="*", metavar="key=value", help="any setting of multitask.py")
    options = parser.parse_intermixed_args(arguments)
    settings = [*([f"tasks=[{options.tasks}]"] if options.tasks else []), *options.settings]
    try:
        config = load_config(options.suite, None, settings)
        suite = suite_of(config)
        check_suite(suite, config.environment)
        spaces = suite_spaces(suite, config.environment)
        sizes = _sizes(options.ranks)
        for size in sizes:
            choose_device(config.learner.device, 0, size)
    except ValueError as error:
        print(f"benchmark: {error}", file=sys.stderr)
        return 2
    run = RunFiles(config, suite, network_spec(config, suite, spaces), spaces.frames_per_step)
    if sizes:
        scaled = scaling.measure(run, sizes, options.rounds, options.stage_seconds)
        console = Console(width=None if sys.stdout.isatty() else 100)
        console.print_json(data=scaled) if options.json else console.print(scaling.table(scaled))
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
    return 0


if __name__ == "__main__":
    sys.exit(main())
