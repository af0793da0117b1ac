"""One of several learner ranks for tests: `python tests/agent_ranks.py RANK SIZE FOLDER` plays scenes and saves what came out.

The test plays the same scenes with one rank that sees all columns.
"""

import copy
import os
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import agent_reference as reference
from agent.checkpoint import parameter_hash
from agent.conflict import task_gradients
from agent.distributed import LostRankError, Ranks, UnequalRanksError
from agent.learner import Learner, NonFiniteError
from agent.losses import LossSettings
from agent.optimisers import OptimiserSettings
from agent.unroll import Batch, take_columns

SPEC = reference.small_spec({"a": 3, "b": 3, "late": 3, "never": 3}, instruction_length=3, input_normalisation="pixel")
LOSS = LossSettings(reward_transform="none", value_normalisation="popart", advantage_normalisation="task", ratio_clip=0.3)
COLUMNS = 4  # of each of two ranks
UPDATES = 20
# Tasks of the eight columns: on both ranks, on one only (`late` on rank 1, from the third update on), on none.
LAYOUTS = ([0, 1, 0, 1, 1, 0, 0, 1], [0, 0, 0, 0, 1, 1, 1, 1], [0, 0, 1, 0, 2, 2, 1, 2])


def batch_of(update: int) -> Batch:
    """All eight columns of an update."""
    batch = reference.random_batch(np.random.default_rng(update), SPEC, 5, 2 * COLUMNS)
    batch["task"][:] = LAYOUTS[update % 3]
    return reference.tensors(batch)


def share(batch: Batch, rank: int, size: int) -> tuple[Batch, list[int]]:
    """A rank's columns, with their tasks."""
    count = 2 * COLUMNS // size
    part = take_columns(batch, torch.arange(rank * count, (rank + 1) * count))
    return part, part["task"].tolist()


def make(ranks: Ranks, **optimiser: Any) -> Learner:
    """A learner from the same start on all ranks; `late` would be clipped without a limit, the limit is often reached."""
    settings = OptimiserSettings(learning_rate=1e-3, max_gradient_norm=5.0, **optimiser)
    return Learner(reference.make_network(SPEC), LOSS, settings, 10_000, ranks)


def state(learner: Learner) -> dict[str, torch.Tensor]:
    """Parameters, optimiser and statistics by name."""
    assert learner.popart is not None
    statistics = {f"statistics {task}": torch.tensor(row) for task, row in learner.popart.state().items()}
    squares = {f"square {name}": value.clone() for name, value in learner.optimiser_state().items()}
    return {**{n: v.clone() for n, v in learner.network.state_dict().items()}, **squares, **statistics}


def spoilt(batch: Batch) -> Batch:
    """A reward of the last column, which rank 1 has, is no number."""
    batch["first"][2, -1] = False
    batch["reward"][2, -1] = torch.nan
    return batch


def learn(ranks: Ranks) -> dict[str, Any]:
    """20 updates: the state's hash after each, the state before and after the first of `late`, and at the end."""
    learner = make(ranks)
    found: dict[str, Any] = {"hashes": [], "results": [], "states": []}
    for update in range(UPDATES):
        result = learner.update(*share(batch_of(update), ranks.rank, ranks.size))
        found["hashes"].append(parameter_hash(state(learner)))
        found["results"].append({name: torch.as_tensor(value) for name, value in result.items()})
        found["states"].append(state(learner))
    found["counters"] = vars(learner.counters)
    gradients = task_gradients(
        learner.network, *share(batch_of(2), ranks.rank, ranks.size), [0, 1, 2], LOSS, learner.popart, ranks
    )
    found["norms"], found["cosines"] = torch.from_numpy(gradients.norms), torch.from_numpy(gradients.cosines)
    return found


def convolve(ranks: Ranks) -> dict[str, Any]:
    """Adam on convolutions, whose weights lie channels last while what the ranks send each other does not."""
    spec = reference.small_spec({"a": 3, "b": 3}, (12, 12, 2), "uint8", torso="small", core="none")
    optimiser = OptimiserSettings(name="adam", learning_rate=1e-2, epsilon=0.1)
    learner = Learner(reference.make_network(spec), LossSettings(advantage_normalisation="task"), optimiser, 10_000, ranks)
    for update in range(3):
        batch = reference.random_batch(np.random.default_rng(update), spec, 5, 2 * COLUMNS)
        learner.update(*share(reference.tensors(batch), ranks.rank, ranks.size))
    return {"state": {name: value.clone() for name, value in learner.network.state_dict().items()}}


def skip(ranks: Ranks) -> dict[str, Any]:
    """A good update, two that are not finite on one rank, of which the second is one too many."""
    learner = make(ranks, max_skipped_updates=2)
    learner.update(*share(batch_of(0), ranks.rank, ranks.size))
    before = state(learner)
    result = learner.update(*share(spoilt(batch_of(1)), ranks.rank, ranks.size))
    found = {"before": before, "after": state(learner), "skipped": result["skipped"]}
    try:
        learner.update(*share(spoilt(batch_of(2)), ranks.rank, ranks.size))
    except NonFiniteError as error:
        found["error"] = str(error)
    return {**found, "counters": vars(learner.counters)}


def compare(ranks: Ranks) -> dict[str, Any]:
    """Bytes of rank 0 on all; equal digests pass, one that differs is told on all."""
    found: dict[str, Any] = {"bytes": [ranks.broadcast(b"of rank 0" * 10**5 if ranks.rank == 0 else b""), ranks.broadcast(b"")]}
    ranks.check_equal(b"the same", "number")
    try:
        ranks.check_equal(b"unequal%d" % ranks.rank, "number")
    except UnequalRanksError as error:
        found["error"] = str(error)
    return found


def lose(ranks: Ranks) -> dict[str, Any]:
    """The last rank is killed; the others' next update changes nothing and says who is missing."""
    learner = make(ranks)
    learner.update(*share(batch_of(0), ranks.rank, ranks.size))
    before, counters = state(learner), copy.copy(learner.counters)
    if ranks.rank == ranks.size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        learner.update(*share(batch_of(1), ranks.rank, ranks.size))
    except LostRankError as error:
        return {"error": str(error), "before": before, "after": state(learner), "same": counters == learner.counters}
    return {}


def main() -> None:
    """Each scene's findings into FOLDER/SCENE-RANK.pt."""
    rank, size, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    ranks = Ranks(rank, size, dist.FileStore(str(folder / "store"), size), 100.0)
    for scene in (learn, convolve, skip, compare, lose):
        torch.save(scene(ranks), folder / f"{scene.__name__}-{rank}.pt")


if __name__ == "__main__":
    main()
