"""Where a learner rank stands: alone with the others on this machine, or started by torchrun on one of several.

Under torchrun each process supervises one rank and that rank's actors. Rank 0 chooses the run folder and the configuration,
and tells the others through torchrun's store; nobody starts before all have agreed, and a refusal of one is that of all.
"""

import contextlib
import json
import os
import socket
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from agent.distributed import Ranks
from launch.config import Config

# Until all ranks have loaded and checked what they need; reading the levels of a large suite takes minutes.
AGREE_SECONDS = 600.0
HEARD_SECONDS = 10.0


class Place(NamedTuple):
    """What torchrun's environment variables say."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    host: str
    port: int
    is_store_ours: bool  # rank 0 opens the store itself: not under torchrun, but started by hand or by srun
    attempt: str

    def store(self, is_supervisor: bool) -> dist.Store:
        """The store that all processes of the job share."""
        is_master = self.is_store_ours and is_supervisor and self.rank == 0
        limit = timedelta(seconds=AGREE_SECONDS)
        store = dist.TCPStore(self.host, self.port, None, is_master, limit, wait_for_workers=False)
        return dist.PrefixStore(f"multitask-{self.attempt}", store)


def find_place(variables: Mapping[str, str]) -> Place | None:
    """This process's place if torchrun (or whoever sets its variables) started several; None for a process on its own.

    Raises:
        ValueError: a variable is missing or no number.
    """
    if variables.get("WORLD_SIZE", "1") == "1":
        return None
    needed = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT")
    for name in (*needed, "MASTER_ADDR"):
        if not variables.get(name) or (name in needed and not variables[name].isdecimal()):
            raise ValueError(
                f"WORLD_SIZE={variables['WORLD_SIZE']} asks for several ranks, but {name}={variables.get(name, '')!r} does not "
                "say which: start them with torchrun, or unset WORLD_SIZE"
            )
    rank, size, local_rank, local_size, port = (int(variables[name]) for name in needed)
    for name, number, count in (("RANK", rank, "WORLD_SIZE"), ("LOCAL_RANK", local_rank, "LOCAL_WORLD_SIZE")):
        if number >= int(variables[count]):
            raise ValueError(f"{name}={number} does not fit {count}={variables[count]}: ranks are counted from 0")
    is_store_ours = variables.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    attempt = variables.get("TORCHELASTIC_RESTART_COUNT", "0")
    return Place(rank, size, local_rank, local_size, variables["MASTER_ADDR"], port, is_store_ours, attempt)


def local_place(place: Place | None, rank: int, size: int) -> tuple[int, int]:
    """Number of this rank among those on this machine, and how many there are."""
    return (place.local_rank, place.local_size) if place else (rank, size)


def ranks_here(place: Place | None, num_ranks: int) -> Sequence[int]:
    """Ranks whose actors this process's supervisor has."""
    return range(num_ranks) if place is None or num_ranks == 1 else [place.rank]


def rank_folder(run_dir: Path, rank: int) -> Path:
    """Where a rank under torchrun keeps its logs: rank 0 in the run folder itself."""
    return run_dir if rank == 0 else run_dir / f"rank-{rank}"


def join(place: Place | None, config: Config, rank: int, memory: Path, device: torch.device) -> Ranks:
    """The group of a learner process; on one machine its ranks meet in a file of the run's memory folder.

    Raises:
        LostRankError: not all came.
    """
    size = config.learner.ranks
    if size == 1:
        return Ranks()
    if place is None and "lo" in (name for _, name in socket.if_nameindex()):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # nobody outside has to reach them
    store = place.store(is_supervisor=False) if place else dist.FileStore(str(memory / "ranks"), size)
    timeout, start = config.distributed.timeout_seconds, config.supervisor.start_seconds
    return Ranks(rank, size, dist.PrefixStore("learners", store), timeout, device, start)


class Talk:
    """What supervisors say to each other before a start under torchrun.

    Args:
        place: of this one.
    """

    def __init__(self, place: Place) -> None:
        self.place = place
        try:
            self._store = place.store(is_supervisor=True)
        except RuntimeError as error:
            raise ValueError(f"rank {place.rank} cannot reach the store of rank 0 at {place.host}:{place.port}") from error

    def say(self, topic: str, **facts: Any) -> None:
        """This rank's word on a topic."""
        self._store.set(f"{topic}/{self.place.rank}", json.dumps(facts))

    def refuse(self, topic: str, reason: str) -> None:
        """This rank's word that nobody shall start. Whoever has the store waits a little until all have heard: it ends now."""
        self.say(topic, refused=reason)
        self._store.set(f"heard/{self.place.rank}", "1")
        if self.place.is_store_ours and self.place.rank == 0:
            with contextlib.suppress(RuntimeError):
                self._store.wait([f"heard/{rank}" for rank in range(self.place.size)], timedelta(seconds=HEARD_SECONDS))

    def hear(self, topic: str, rank: int) -> dict[str, Any]:
        """Another rank's word.

        Raises:
            ValueError: it refused, with its reason, or said nothing.
        """
        try:
            facts = json.loads(self._store.get(f"{topic}/{rank}"))
        except RuntimeError as error:
            raise ValueError(f"rank {rank} did not answer for {AGREE_SECONDS:.0f} s: look at its output") from error
        if "refused" in facts:
            self._store.set(f"heard/{self.place.rank}", "1")
            raise ValueError(f"rank {rank} refused: {facts['refused']}")
        return facts
