"""The core with resets against one call of the library's LSTM without any: what the resets cost on the learner's device."""

import statistics
import time
from collections.abc import Callable

import numpy as np
import torch

from agent.core import Core
from agent.network import Network, NetworkSpec

ROUNDS = 20
RESETS_PER_ROW = 0.01


def measure_recurrence(spec: NetworkSpec, device: torch.device, length: int = 100, columns: int = 32) -> dict[str, float]:
    """Milliseconds of forward and backward over [T, B], in turn, medians; `ratio` is library / core: 1 = resets are free."""
    core = Network(spec).core.to(device)
    assert isinstance(core, Core)
    library = torch.nn.LSTM(core.input.in_features, core.recurrent.in_features).to(device)
    rng = np.random.default_rng(0)
    host_first = rng.random((length, columns)) < RESETS_PER_ROW
    first = torch.from_numpy(host_first).to(device)
    features = torch.randn(length, columns, core.input.in_features, device=device, requires_grad=True)
    state = torch.zeros(columns, 2, core.recurrent.in_features, device=device)
    calls: dict[str, Callable[[], torch.Tensor]] = {
        "core": lambda: core(features, first, state, host_first)[0],
        "library": lambda: library(features)[0],
    }
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(ROUNDS + 1):
        for name, call in calls.items():
            seconds[name].append(_time(call, device))
    medians = {name: 1000 * statistics.median(times[1:]) for name, times in seconds.items()}  # the first warmed up
    return {f"{name}_milliseconds": value for name, value in medians.items()} | {"ratio": medians["library"] / medians["core"]}


def _time(call: Callable[[], torch.Tensor], device: torch.device) -> float:
    """Seconds of one forward and backward, all work of the device included."""
    module = torch.get_device_module(device)
    module.synchronize(device)
    began = time.perf_counter()
    call().sum().backward()
    module.synchronize(device)
    return time.perf_counter() - began
