"""How much faster several learner ranks are than one: updates on random batches, without environments. For benchmark.py.

`python -m launch.scaling RUN_DIR MEMORY RANK SECONDS` is one rank; rank 0 prints what it measured as JSON.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.table import Table

from agent.unroll import Arrays, UnrollSpec
from launch.config import RunFiles, read_run, write_run
from launch.learners import choose_device, make_learner
from launch.plan import unroll_spec
from launch.ranks import join

LIMIT_SECONDS = 300.0  # of one measurement, beyond what it was asked for


def random_batch(spec: UnrollSpec, batch_size: int, num_tasks: int, rng: np.random.Generator) -> Arrays:
    """A batch like those of a run: random frames, uniform behaviour, no ends of episodes."""
    arrays = spec.empty(batch_size)
    if spec.frame_dtype == "uint8":
        arrays["frame"][...] = rng.integers(0, 256, arrays["frame"].shape, np.uint8)
    arrays["log_probs"][...] = -np.log(spec.num_actions)
    arrays["frames"][...] = 1
    arrays["task"][...] = np.arange(batch_size) % num_tasks
    return arrays


def measure(run: RunFiles, sizes: Sequence[int], rounds: int, seconds: float) -> dict[str, Any]:
    """Each number of ranks in turn, `rounds` times; medians. Weak scaling: every rank has learner.batch_size unrolls."""
    found: dict[int, list[dict[str, float]]] = {size: [] for size in sizes}
    for _ in range(rounds):
        for size in sizes:
            found[size].append(_measure_once(run, size, seconds))
    medians = {size: {key: statistics.median(one[key] for one in rows) for key in rows[0]} for size, rows in found.items()}
    first = min(sizes)
    for numbers in medians.values():
        numbers["efficiency"] = numbers["updates_per_second"] / medians[first]["updates_per_second"]
    learner = run.config.learner
    return {
        "cores": os.cpu_count() or 1,
        "gpus": torch.cuda.device_count(),
        "threads": learner.threads,
        "batch_size": learner.batch_size,
        "compared_with": first,
        "ranks": {str(size): numbers for size, numbers in medians.items()},
    }


def table(result: dict[str, Any]) -> Table:
    """The result for a person."""
    rows = Table(
        title=f"{result['cores']} cores, {result['gpus']} GPUs, {result['threads']} threads and "
        f"{result['batch_size']} unrolls per rank"
    )
    for column in ("ranks", "updates/s", "unrolls/s", "waiting for other ranks", "efficiency"):
        rows.add_column(column, justify="right")
    for size, numbers in result["ranks"].items():
        unrolls = int(size) * result["batch_size"] * numbers["updates_per_second"]
        speed = [f"{numbers['updates_per_second']:.2f}", f"{unrolls:,.1f}"]
        rows.add_row(size, *speed, f"{100 * numbers['waiting_share']:.1f}%", f"{100 * numbers['efficiency']:.0f}%")
    return rows


def _measure_once(run: RunFiles, size: int, seconds: float) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        write_run(Path(folder), run._replace(config=replace(run.config, learner=replace(run.config.learner, ranks=size))))
        command = [sys.executable, "-P", "-m", "launch.scaling", folder, folder]
        processes = [
            subprocess.Popen([*command, str(rank), str(seconds)], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
            for rank in range(size)
        ]
        try:
            outputs = [process.communicate(timeout=seconds + LIMIT_SECONDS) for process in processes]
        finally:
            for process in processes:
                process.kill()
    for process, (_, errors) in zip(processes, outputs, strict=True):
        if process.returncode != 0:
            raise RuntimeError(f"a rank ended: {errors.decode()}")
    return json.loads(outputs[0][0])


def main() -> int:
    """One rank."""
    run_dir, memory, rank, seconds = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
    run = read_run(run_dir)
    config = run.config
    torch.set_num_threads(config.learner.threads)
    torch.set_flush_denormal(True)
    torch.manual_seed(config.seed)
    device = choose_device(config.learner.device, rank, config.learner.ranks)
    ranks = join(None, config, rank, memory, device)
    learner = make_learner(run, device, ranks)
    num_tasks = len(run.suite.tasks)
    spec = unroll_spec(run.network, config.actor.unroll_length)
    arrays = random_batch(spec, config.learner.batch_size, num_tasks, np.random.default_rng(rank))
    batch = {name: torch.from_numpy(array).to(device) for name, array in arrays.items()}
    tasks = arrays["task"].tolist()
    learner.update(batch, tasks)
    began = time.perf_counter()
    learner.update(batch, tasks)
    wished = max(2, int(seconds / (time.perf_counter() - began)))
    count = int.from_bytes(ranks.broadcast(wished.to_bytes(8, "little")), "little")
    waited, began = ranks.seconds, time.perf_counter()
    for _ in range(count):
        learner.update(batch, tasks)
    spent = time.perf_counter() - began
    ranks.close()
    if rank == 0:
        print(json.dumps({"updates_per_second": count / spent, "waiting_share": (ranks.seconds - waited) / spent}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
