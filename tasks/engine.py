"""Engines that need a process each, as one vector environment: DeepMind Lab ends its process on a missing map, holds Python's
lock for seconds while it builds one, and may not stand twice in a process.

A child is a command line (tasks/engine_worker.py) with a socket and a piece of mapped memory; neither has a name in the file
system, so nothing is left behind. An engine that dies or hangs is replaced. Its game is lost, and said to be: the next row
has `infos["lost"]` and `infos["reset"]`, is the first of a new game, and the step that never came back counts for nothing.

Why not gymnasium's AsyncVectorEnv: it cannot replace one member, and a measured start of 8 took 1.6 times the CPU seconds and
1.3 times the memory, a step 1.2 to 1.9 times the time, before its children also load the main program with torch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import mmap
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from gymnasium import spaces

from tasks.contract import ENGINE_COUNTS, EnvironmentSettings, Observations, Step, TaskVectorEnv
from tasks.dmlab import ACTION_SETS, HALF_OF_SEEDS
from tasks.engine_worker import REPLY, REQUEST, observation_bytes, observation_views
from tasks.suite import Task

THREADED = ("OMP", "OPENBLAS", "MKL")  # libraries that would start a thread per core in each engine
# For a new process to load its modules, build the engine and a map, beside all others of the run that do the same.
START_SECONDS = 600.0
MAX_FAILURES = 3  # in a row, of one engine, without one step between


class EngineError(RuntimeError):
    """An engine died, hung or raised; the text names level and seed."""


class Reply(NamedTuple):
    """As REPLY of engine_worker."""

    reward: float
    terminated: bool
    truncated: bool
    reset: bool
    frames: int
    cache: tuple[float, ...]


class Engine:
    """One child. `seed` is that of the first episode since its start or its last reset by `ask`."""

    def __init__(self, spec: dict[str, Any], memory: int, wait_seconds: float) -> None:
        self._spec, self._memory, self._wait_seconds = spec, memory, wait_seconds
        self._process: subprocess.Popen[bytes] | None = None
        self._folder = ""  # for the engine's temporary files, which it leaves behind when it dies
        self._deadline = 0.0
        self.seed = 0

    def start(self) -> None:
        """Start the process; the engine itself is built at the first request."""
        self._folder = tempfile.mkdtemp(prefix="engine-")
        self._connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        spec = self._spec | {"parent": os.getpid(), "socket": theirs.fileno(), "memory": self._memory}
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "tasks.engine_worker", json.dumps(spec)],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(), self._memory),
                env=os.environ | {f"{library}_NUM_THREADS": "1" for library in THREADED} | {"TMPDIR": self._folder},
            )

    def ask(self, kind: bytes, value: int, wait_seconds: float = 0.0) -> None:
        """Send a request; one reply is due within the waiting time, or within `wait_seconds` where that is longer."""
        if kind == b"r":
            self.seed = value
        self._deadline = time.monotonic() + max(self._wait_seconds, wait_seconds)
        with contextlib.suppress(OSError):  # its death shows when the reply is read
            self._connection.send(REQUEST.pack(kind, value))

    def reply(self) -> Reply:
        """Wait for the reply. EngineError if there is none, or if the engine raised."""
        self._connection.settimeout(max(0.001, self._deadline - time.monotonic()))
        try:
            message = self._connection.recv(8192)
        except TimeoutError:
            raise self._error("gave no answer in time") from None
        except OSError:
            message = b""
        if not message:
            raise self._error(self._how_it_ended())
        if len(message) != REPLY.size:
            raise self._error(f"raised {message[1:].decode(errors='replace').strip()}")
        reward, terminated, truncated, reset, frames, *cache = REPLY.unpack(message)
        return Reply(reward, terminated, truncated, reset, frames, tuple(cache))

    def _error(self, what: str) -> EngineError:
        return EngineError(f"the engine of level {self._spec['level']}, first seed {self.seed}, {what}")

    def _how_it_ended(self) -> str:
        assert self._process is not None
        try:
            code = self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            return "closed its connection"
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"

    def hang_up(self) -> None:
        """Close the connection: a healthy child then ends."""
        if self._process is not None:
            self._connection.close()

    def end(self, grace_seconds: float) -> None:
        """Wait for the child's end, and kill it after the grace."""
        if self._process is None:
            return
        try:
            self._process.wait(grace_seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None
        shutil.rmtree(self._folder, ignore_errors=True)


class EngineVectorEnv(TaskVectorEnv):
    """E engines of one level, each in a process of its own, stepping at the same time."""

    def __init__(
        self, task: Task, level: str, settings: EnvironmentSettings, seeds: Sequence[int], training: bool, test: bool
    ) -> None:
        """Start a process per seed. In training a lost engine is replaced; otherwise it is an EngineError, because a game
        with a fixed seed must not turn into another."""
        lab = settings.dmlab
        shape, words = (lab.height, lab.width, 3), settings.instruction_length
        super().__init__(spaces.Box(0, 255, shape, np.uint8), words, len(ACTION_SETS[lab.action_set]), seeds)
        part = observation_bytes(shape, words)
        self._memory = os.memfd_create("engines")
        os.truncate(self._memory, part * self.num_envs)
        mapped = mmap.mmap(self._memory, part * self.num_envs)
        self._views = [observation_views(mapped, part * i, shape, words) for i in range(self.num_envs)]
        spec = {
            "level": level,
            "task": task.name,
            "settings": dataclasses.asdict(lab),
            "action_repeat": settings.action_repeat,
            "test": test,
            "frame_shape": shape,
            "words": words,
        }
        self._engines = [Engine(spec | {"offset": part * i}, self._memory, lab.wait_seconds) for i in range(self.num_envs)]
        self._training = training
        self._over = np.zeros(self.num_envs, np.bool_)
        self._failures = [0] * self.num_envs
        self._new_seeds = np.random.default_rng([seeds[0], 1])  # not the stream that the engine itself draws from
        self._observation: Observations = {
            "frame": np.zeros((self.num_envs, *shape), np.uint8),
            "instruction": np.zeros((self.num_envs, words), np.int32),
        }
        self._counts = np.zeros(len(ENGINE_COUNTS))
        self._cache = np.zeros((self.num_envs, len(ENGINE_COUNTS) - 1))  # as each engine last said, since its start
        for engine in self._engines:
            engine.start()

    def new_counts(self) -> np.ndarray:
        """See TaskVectorEnv."""
        counts, self._counts = self._counts, np.zeros(len(ENGINE_COUNTS))
        return counts

    def close_extras(self, **kwargs: Any) -> None:
        """End all engines."""
        for engine in self._engines:
            engine.hang_up()
        for engine in self._engines:
            engine.end(grace_seconds=2.0)
        os.close(self._memory)

    def _start(self, seeds: tuple[int, ...]) -> Observations:
        for engine, seed in zip(self._engines, seeds, strict=True):
            engine.ask(b"r", seed, START_SECONDS)
        self._over = np.zeros(self.num_envs, np.bool_)
        self._collect()
        return self._observation

    def _begin(self, actions: np.ndarray) -> None:
        for engine, action in zip(self._engines, actions, strict=True):
            engine.ask(b"s", int(action))

    def _finish(self) -> Step:
        replies, lost = self._collect()
        lost &= ~self._over  # a game that had ended was whole, also if its engine died on the way to the next
        rewards, terminated, truncated, reset, frames, _ = zip(*replies, strict=True)
        infos = {"frames": np.array(frames, np.int32), "reset": np.array(reset, np.bool_), "lost": lost}
        ends = np.array(terminated, np.bool_), np.array(truncated, np.bool_)
        self._over = ends[0] | ends[1]
        return self._observation, np.array(rewards, np.float64), *ends, infos

    def _collect(self) -> tuple[list[Reply], np.ndarray]:
        """One reply per engine, and which of them [E] come from a replaced one."""
        replies: dict[int, Reply] = {}
        lost = np.zeros(self.num_envs, np.bool_)
        while len(replies) < self.num_envs:
            failed = []
            for index, engine in enumerate(self._engines):
                if index in replies:
                    continue
                try:
                    replies[index] = self._take(index, engine)
                except EngineError as error:
                    self._fail(index, error)
                    failed.append(index)
            lost[failed] = True
            for index in failed:
                self._replace(index)
        return [replies[index] for index in range(self.num_envs)], lost

    def _take(self, index: int, engine: Engine) -> Reply:
        reply = engine.reply()
        for name, view in self._views[index].items():
            self._observation[name][index] = view
        self._counts[1:] += np.subtract(reply.cache, self._cache[index])
        self._cache[index] = reply.cache
        if not reply.reset:
            self._failures[index] = 0
        return reply

    def _fail(self, index: int, error: EngineError) -> None:
        self._failures[index] += 1
        if not self._training or self._failures[index] >= MAX_FAILURES:
            raise error
        game = "its game was over" if self._over[index] else "its game is lost"
        print(f"{error}: {game}, another engine takes its place", file=sys.stderr, flush=True)

    def _replace(self, index: int) -> None:
        """A new process with a new seed of the same half; its first reply is due."""
        engine = self._engines[index]
        engine.hang_up()
        engine.end(grace_seconds=0.0)
        self._counts[0] += 1
        self._cache[index] = 0
        engine.start()
        half = HALF_OF_SEEDS * (engine.seed // HALF_OF_SEEDS)
        engine.ask(b"r", half + int(self._new_seeds.integers(HALF_OF_SEEDS)), START_SECONDS)
