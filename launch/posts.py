"""Posts on a Ray cluster: hosts that Ray has placed, and how their children fare, as the driver sees them."""

import logging
import os
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from launch.host import Host, Report, Site
from launch.workers import describe_exit

POLL_SECONDS = 0.3
KILL_SECONDS = 5.0
CONNECT_SECONDS = 5.0


def connect() -> ModuleType:
    """Ray, connected to the cluster that RAY_ADDRESS names, or else to the one of this machine.

    Raises:
        ValueError: it is not installed, or there is no cluster; with the remedy.
    """
    try:
        import ray
    except ImportError as error:
        raise ValueError("--cluster ray needs Ray: pip install 'multitask-agents[cluster]', on all nodes") from error
    address = os.environ.get("RAY_ADDRESS") or "auto"
    try:
        if address != "auto":  # Ray itself takes minutes to notice that nobody is there
            host, _, port = address.rpartition(":")
            socket.create_connection((host, int(port)), CONNECT_SECONDS).close()
        ray.init(address=address, log_to_driver=False, logging_level=logging.WARNING)
    except (OSError, RuntimeError, ValueError) as error:
        raise ValueError(
            f"no Ray cluster at RAY_ADDRESS={address} ({first_line(error)}): start one with `ray start --head --port=6379`, "
            "and run this command on one of its nodes, where RAY_ADDRESS may be left out, or is HOST:6379 of the head"
        ) from error
    return ray


@dataclass
class Post:
    """A host on a node and its child: a learner rank or a group of actors.

    Attributes:
        ray: connected.
        title: for people.
        host: the Ray actor.
        site: where it is.
        reply: the report that is awaited.
        feeds: the rank that a group's unrolls go to.
        fate: why it is over, if it is.
        code: exit code of the child, if it has ended.
    """

    ray: ModuleType
    title: str
    host: Any
    site: Site
    reply: Any
    feeds: int = 0
    began: float = field(default_factory=time.monotonic)
    last_line: str = ""
    fate: str | None = None
    code: int | None = None

    def poll(self) -> list[str]:
        """New lines of the child; notes if it is over. Never waits."""
        if self.fate is not None or not self.ray.wait([self.reply], timeout=0)[0]:
            return []
        try:
            report = Report(*self.ray.get(self.reply))
        except self.ray.exceptions.RayError as error:
            alive = [node["NodeID"] for node in self.ray.nodes() if node["Alive"]]
            self.fate = f"was lost ({first_line(error)})" if self.site.node in alive else "was lost: its node has gone"
            return []
        if report.code is None:
            self.reply = self.host.poll.remote()
        else:
            self.code, self.fate = report.code, describe_exit(report.code)
        self.last_line = report.lines[-1] if report.lines else self.last_line
        return report.lines


def make_host(ray: ModuleType, name: str, **needs: Any) -> Any:
    """A host where Ray finds what it needs. It is not made again when it dies: its driver decides."""
    return ray.remote(Host).options(max_restarts=0, **needs).remote(name)


def kill(ray: ModuleType, posts: Sequence[Post]) -> None:
    """End children that are left, and all hosts."""
    left = [post.host.kill.remote() for post in posts if post.fate is None]
    if left:
        ray.wait(left, num_returns=len(left), timeout=KILL_SECONDS)
    for post in posts:
        ray.kill(post.host)


def first_line(error: Exception) -> str:
    """Of an error of Ray's, which has many."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
