"""A run on a Ray cluster: Ray places command lines and tells who died. Unrolls and parameters do not pass through it.

The driver, this process, puts each learner rank on a node and a group of actors on every node with CPUs left, also on nodes
that come later. A group that dies is replaced, one whose node goes is forgotten; when a rank dies, all ranks and groups start
again from the newest checkpoint.
"""

import secrets
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

from launch.config import RunFiles, write_run
from launch.host import FILES, LOGS, Site
from launch.posts import POLL_SECONDS, Post, connect, first_line, kill, make_host
from launch.ranks import rank_folder
from launch.records import METRICS, Lines, last_line
from launch.start import claim
from launch.workers import MAX_BACKOFF_SECONDS, PATIENCE

# Of every run on a cluster: all actors join it over the network. The port is chosen when the ranks have their places.
SETTINGS = ["remote.only=true", "remote.listen=tcp://0.0.0.0:5555"]
EVENTS, LOCK = "cluster.jsonl", "cluster.lock"
# Between two sentences about the same wait.
TELL_SECONDS = 60.0
# A group of actors that has lived so long counts as one that works.
SETTLED_SECONDS = 120.0
GROUP_STOP_SECONDS = 5.0


def train(run_dir: Path, run: RunFiles, is_default: bool) -> int:
    """The command with --cluster ray. Exit codes as multitask.py.

    Raises:
        ValueError, OSError: refused before anything started.
    """
    ray = connect()
    try:
        run_dir, lock = claim(run_dir.absolute(), is_default, LOCK)
        with lock:
            write_run(run_dir, run)
            driver = Driver(ray, run_dir, run)
            try:
                return driver.run()
            except OSError as error:  # of the run folder
                print(f"multitask: {error}", file=sys.stderr)
                return 1
    finally:
        ray.shutdown()


@dataclass
class Patience:
    """With a node on which actors die: how often in a row, and when to try again."""

    failures: int = 0
    due: float = 0.0


class Driver:
    """Keeps a run alive on the nodes that there are.

    Args:
        ray: connected.
        run_dir: of the run, absolute, with its configuration; on storage that this process and the ranks' nodes share.
        run: of it.
    """

    def __init__(self, ray: ModuleType, run_dir: Path, run: RunFiles) -> None:
        self._ray, self.run_dir, self.config = ray, run_dir, run.config
        self._size = run.config.learner.ranks
        self._interrupts: list[int] = []
        self._ranks: list[Post] = []
        self._groups: dict[str, Post] = {}  # by node
        self._patience: dict[str, Patience] = {}
        self._events = Lines(run_dir / EVENTS)

    def run(self) -> int:
        """Everything from start to end. Returns the exit code of the command."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._interrupt)
        settings, failures = self.config.supervisor, 0
        try:
            while True:
                before = self._frames()
                why = self._attempt()
                if isinstance(why, int):
                    return why
                frames = self._frames()
                failures = 1 if frames > before else failures + 1
                if failures >= settings.max_start_failures * (PATIENCE if frames else 1):
                    self._say("end", f"the run ends: {why}, {failures} times in a row without progress")
                    return 1
                pause = min(settings.backoff_seconds * 2 ** (failures - 1), MAX_BACKOFF_SECONDS)
                self._say("restart", f"{why}: all ranks start again from the newest checkpoint in {pause:.0f} s")
                self._sleep(pause)
        finally:
            self._events.close()

    def _attempt(self) -> int | str:
        """One life of all ranks: the exit code of the command, or why they have to start again."""
        hosts = [make_host(self._ray, str(self.run_dir), **self._rank_needs()) for _ in range(self._size)]
        marker = self.run_dir / f".{secrets.token_hex(8)}"
        try:
            marker.touch()
            sites = self._await_sites(hosts, marker)
            if sites is None:
                return 128 + self._interrupts[0]
            blind = [site.address for site in sites if not site.sees]
            if blind:
                shared = "choose a --run-dir on storage that the learners' nodes and this one share"
                self._say("end", f"the node {blind[0]} does not see {self.run_dir}: {shared}")
                return 2
            self._start_ranks(hosts, sites)
            return self._watch()
        except self._ray.exceptions.RayError as error:  # a host was lost before its rank had started
            return f"a learner rank was lost ({first_line(error)})"
        finally:
            marker.unlink(missing_ok=True)
            self._end([*self._groups.values()], GROUP_STOP_SECONDS)
            self._end(self._ranks, self._rank_stop_seconds())
            self._ranks, self._groups = [], {}

    def _rank_stop_seconds(self) -> float:
        """A supervisor ends its learner first, and then itself."""
        return self.config.supervisor.stop_seconds + 5.0

    def _rank_needs(self) -> dict[str, int]:
        device = self.config.learner.device
        has_gpu = device == "cuda" or (device == "auto" and self._ray.cluster_resources().get("GPU", 0) > 0)
        return {"num_gpus": int(has_gpu), "num_cpus": self.config.cluster.cpus_per_rank}

    def _await_sites(self, hosts: Sequence[Any], marker: Path) -> list[Site] | None:
        """Where Ray has put the ranks; None after an interrupt."""
        replies, told = [host.look_around.remote(str(marker)) for host in hosts], time.monotonic()
        while not self._interrupts:
            _ready, waiting = self._ray.wait(replies, num_returns=len(replies), timeout=POLL_SECONDS)
            if not waiting:
                return [Site(*site) for site in self._ray.get(replies)]
            if time.monotonic() - told > TELL_SECONDS:
                told = time.monotonic()
                needs = " and ".join(f"{count} {name[4:]}" for name, count in self._rank_needs().items() if count)
                self._say("wait", f"{len(waiting)} of {len(replies)} learner ranks wait for a node with {needs} free")
        return None

    def _start_ranks(self, hosts: Sequence[Any], sites: Sequence[Site]) -> None:
        host, port = sites[0].address, sites[0].ports[0]
        # Each rank adds its number to the port.
        self._port = sites[0].ports[1]
        listen = ["--listen", f"tcp://0.0.0.0:{self._port}"]
        for rank, site in enumerate(sites):
            # Ray shows each rank its own GPU only, so every rank is the first of its node.
            variables = {
                **{"RANK": str(rank), "WORLD_SIZE": str(self._size), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"},
                **{"MASTER_ADDR": host, "MASTER_PORT": str(port)},
            }
            reply = hosts[rank].start.remote(["-m", "launch.multitask", "--resume", str(self.run_dir), *listen], variables, {})
            title = "the learner" if self._size == 1 else f"learner rank {rank}"
            self._ranks.append(Post(self._ray, title, hosts[rank], site, reply))
            self._say("place", f"{title} is on {_name(site)}")

    def _watch(self) -> int | str:
        while True:
            self._sleep(POLL_SECONDS)
            self._poll_ranks()
            if self._interrupts:
                self._end(self._ranks, self._rank_stop_seconds())
                return 128 + self._interrupts[0]
            if all(rank.code == 0 for rank in self._ranks):
                return 0
            failed = next((rank for rank in self._ranks if rank.fate is not None and rank.code != 0), None)
            if failed is not None:
                # The others notice: they write what they have, and end by themselves.
                self._await_end(self._ranks, self.config.distributed.timeout_seconds + self._rank_stop_seconds())
                return 2 if failed.code == 2 and not self._frames() else f"{failed.title} {failed.fate}"
            self._check_groups()
            self._fill_nodes()

    def _poll_ranks(self) -> None:
        """Show what rank 0 prints, and what others print with their number."""
        for number, rank in enumerate(self._ranks):
            for line in rank.poll():
                print(f"rank {number}: {line}" if number else line, flush=True)

    def _check_groups(self) -> None:
        """Forget groups of actors that are over."""
        for node, group in [*self._groups.items()]:
            group.poll()
            if group.fate is None:
                continue
            kill(self._ray, [group])
            del self._groups[node]
            patience = self._patience.setdefault(node, Patience())
            patience.failures = 1 if time.monotonic() - group.began > SETTLED_SECONDS else patience.failures + 1
            pause = min(self.config.supervisor.backoff_seconds * 2 ** (patience.failures - 1), MAX_BACKOFF_SECONDS)
            patience.due = time.monotonic() + pause
            self._say("loss", f"{group.title}: {group.fate}", last_line=group.last_line)

    def _fill_nodes(self) -> None:
        """Put actors on nodes that have none."""
        settings = self.config.cluster
        for node in self._ray.nodes():
            key = node["NodeID"]
            if not node["Alive"] or key in self._groups or time.monotonic() < self._patience.get(key, Patience()).due:
                continue
            cpus = int(node["Resources"].get("CPU", 0))
            cpus -= settings.cpus_per_rank * sum(rank.site.node == key for rank in self._ranks)
            if cpus > 0:
                self._start_group(key, node["NodeManagerAddress"], settings.actors_per_node or cpus, cpus)

    def _start_group(self, node: str, address: str, count: int, cpus: int) -> None:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        fed = [sum(group.feeds == rank for group in self._groups.values()) for rank in range(self._size)]
        feeds = fed.index(min(fed))
        folder = rank_folder(self.run_dir, feeds) / "keys"
        try:
            keys = {name: (folder / name).read_text(encoding="utf-8") for name in ("run.key", "actors.key_secret")}
        except FileNotFoundError:
            return  # the rank is still starting
        here = NodeAffinitySchedulingStrategy(node, soft=False)
        host = make_host(self._ray, str(self.run_dir), num_cpus=min(count, cpus), scheduling_strategy=here)
        connect_to = f"tcp://{self._ranks[feeds].site.address}:{self._port + feeds}"
        arguments = ["-m", "launch.actors", "--connect", connect_to, "--actors", str(count), "--keys", FILES, "--folder", LOGS]
        site = Site(node, address, (0, 0), False)
        title = f"a group of {count} actors on {_name(site)}"
        self._groups[node] = Post(self._ray, title, host, site, host.start.remote(arguments, {}, keys), feeds)
        self._say("place", f"{title} plays for {self._ranks[feeds].title}")

    def _await_end(self, posts: Sequence[Post], seconds: float) -> None:
        """Wait for children to end by themselves. A second interrupt cuts that short."""
        deadline = time.monotonic() + seconds
        while any(post.fate is None for post in posts) and len(self._interrupts) < 2 and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
            self._poll_ranks()
            for post in posts:
                post.poll()

    def _end(self, posts: Sequence[Post], seconds: float) -> None:
        """Ask children to end, and then make them."""
        for post in posts:
            post.host.stop.remote()
        self._await_end(posts, seconds)
        kill(self._ray, posts)

    def _frames(self) -> int:
        """How far the run is."""
        record = last_line(self.run_dir / METRICS)
        return int(record["frames"]) if record else 0

    def _say(self, event: str, sentence: str, **facts: str) -> None:
        print(f"cluster: {sentence}", file=sys.stderr, flush=True)
        self._events.write({"time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "event": event, "what": sentence, **facts})

    def _sleep(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not self._interrupts and time.monotonic() < deadline:
            time.sleep(min(POLL_SECONDS, seconds))

    def _interrupt(self, number: int, _: FrameType | None) -> None:
        self._interrupts.append(number)


def _name(site: Site) -> str:
    """A node, for people: in simulations several have one address."""
    return f"{site.address} (node {site.node[:8]})"
