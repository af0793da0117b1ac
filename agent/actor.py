"""Play T steps in E environments, again and again: an iterator of finished unrolls, without process or socket.

The environments are two half-groups: while the engines of one half work, the policy runs for the other. Vector environments
keep the contract at the top of tasks/contract.py: gymnasium's VectorEnv with `step_async` and `step_wait`.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np

from agent.inference import BatchedPolicy, LocalPolicy
from agent.unroll import NO_ACTION, Arrays, UnrollSpec


@dataclass(frozen=True)
class ActorSettings:
    """Acting.

    Attributes:
        num_actors: processes; 0 = as `automatic` says.
        automatic: cores = one per core, and one per task while there are at most four tasks per core; fewest = as few as can
            hold all tasks, and one per learner rank: samples are younger, which pays where the learner is what limits.
        num_envs: E, environments of one actor, even.
        unroll_length: T, agent steps (IMPALA: 100 on DMLab, 20 on Atari).
        slots: unrolls that an actor may have waiting for the learner; 0 = E.
        weights: task -> weight of its share of actors; empty = equal actors.
        wait_seconds: an actor that waits so long for the learner, or for inference, ends with an error.
        inference: local = every actor runs the network itself, on one core; batched = one process runs it for all actors of
            the machine, which pays where that process has a GPU.
        inference_device: of that process; as learner.device.
    """

    num_actors: int = field(default=0, metadata={"min": 0})
    automatic: Literal["cores", "fewest"] = "cores"
    num_envs: int = field(default=32, metadata={"min": 2})
    unroll_length: int = field(default=20, metadata={"min": 1})
    slots: int = field(default=0, metadata={"min": 0})
    weights: dict[str, float] = field(default_factory=dict)
    wait_seconds: float = field(default=600.0, metadata={"min": 1})
    inference: Literal["local", "batched"] = "local"
    inference_device: str = "auto"


class Member(NamedTuple):
    """One task's vector environment within a half-group."""

    task: int  # index into the network's task names
    environment: Any  # gymnasium VectorEnv with step_async and step_wait


class RefusedDataError(RuntimeError):
    """An environment or the policy returned something that must never reach the learner."""


class HalfGroup:
    """Environments that step together, their policy, and the rows of the unroll in progress.

    Args:
        members: vector environments of one or several tasks.
        make_policy: from the task index of each environment, [E], to the policy.
        task_names: for messages.
        spec: sizes of an unroll.
        actor: index of the actor, stamped on unrolls.
        offset: index of this half's first environment within the actor.
        rng: of the action sampling.
    """

    def __init__(
        self,
        members: Sequence[Member],
        make_policy: Callable[[list[int]], LocalPolicy | BatchedPolicy],
        task_names: Sequence[str],
        spec: UnrollSpec,
        actor: int,
        offset: int,
        rng: np.random.Generator,
    ) -> None:
        tasks = [member.task for member in members for _ in range(member.environment.num_envs)]
        self.num_envs = len(tasks)
        self.policy = make_policy(tasks)
        self._task_names = tuple(task_names)
        self.length = spec.unroll_length
        self.rows: Arrays = spec.empty(self.num_envs)
        self.rows["task"][:] = tasks
        self.rows["actor"][:] = actor
        self.rows["environment"][:] = offset + np.arange(self.num_envs)
        self.t = 0
        self._row_fields = [name for name, row in spec.fields().items() if row.per_row]
        self._rng = rng
        self._members: list[tuple[Any, slice]] = []
        start = 0
        for member in members:
            self._members.append((member.environment, slice(start, start + member.environment.num_envs)))
            start += member.environment.num_envs
        self._ended = np.zeros(self.num_envs, bool)  # the newest row ended an episode
        self._games = np.zeros(self.num_envs, np.int64)
        self._return = np.zeros(self.num_envs)
        self._frames = np.zeros(self.num_envs, np.int64)
        self._steps = np.zeros(self.num_envs, np.int64)

    def start(self) -> None:
        """Reset the environments: row 0 of the first unroll is seen."""
        for environment, part in self._members:
            observation, _ = environment.reset()
            self._refuse("observations", observation["frame"], part)
            self._see(part, observation)
        self.rows["first"][0] = True
        self.rows["episode_return"][0] = np.nan

    def act(self) -> None:
        """Decide on the newest row and send the actions to the engines."""
        t, rows, policy = self.t, self.rows, self.policy
        rows["last_action"][t] = np.where(rows["first"][t], NO_ACTION, policy.last_action)
        instruction = rows["instruction"][t] if "instruction" in rows else None
        action, log_probs = policy.act(
            rows["frame"][t], instruction, rows["reward"][t], rows["first"][t], self._rng.random(self.num_envs)
        )
        self._refuse("log-probabilities of the policy", log_probs, slice(0, self.num_envs))
        rows["action"][t], rows["log_probs"][t] = action, log_probs
        if t == 0:
            rows["version"][:] = policy.version
        for environment, part in self._members:
            environment.step_async(action[part])

    def receive(self) -> None:
        """Take what the engines return: one more row is seen."""
        self.t += 1
        t, rows = self.t, self.rows
        rows["first"][t] = self._ended
        for environment, part in self._members:
            observation, reward, terminated, truncated, info = environment.step_wait()
            with np.errstate(over="ignore"):  # too large for float32 is infinite, and refused
                seen_reward = reward.astype(np.float32)
            self._refuse("rewards", seen_reward, part)
            self._refuse("observations", observation["frame"], part)
            self._see(part, observation)
            lost = info.get("lost", False)  # the game broke off: this row is the first of another
            rows["first"][t, part] |= lost
            rows["reward"][t, part] = np.where(rows["first"][t, part], 0, seen_reward)
            rows["terminated"][t, part], rows["truncated"][t, part] = terminated, truncated
            rows["frames"][t, part] = info["frames"]
            self._count(part, reward, info["frames"], info["reset"], lost)
        self._ended = rows["terminated"][t] | rows["truncated"][t]

    def next_unroll(self, core_state: np.ndarray) -> None:
        """Row T becomes row 0 of the next unroll. core_state: [E, 2, K] before that row."""
        for name in self._row_fields:
            self.rows[name][0] = self.rows[name][self.length]
        self.rows["core_state"][...] = core_state
        self.rows["version"][:] = self.policy.version  # that of row 0, and versions only grow
        self.t = 0

    def _see(self, part: slice, observation: dict[str, np.ndarray]) -> None:
        self.rows["frame"][self.t, part] = observation["frame"]
        if "instruction" in self.rows:
            self.rows["instruction"][self.t, part] = observation["instruction"]

    def _count(self, part: slice, reward: np.ndarray, frames: np.ndarray, reset: np.ndarray, lost: np.ndarray | bool) -> None:
        """Returns and lengths are those of whole games, raw: a lost life does not split them, a lost game does not count."""
        rows, t = self.rows, self.t
        whole = reset & ~np.asarray(lost)
        rows["episode_return"][t, part] = np.where(whole, self._return[part], np.nan)
        rows["episode_frames"][t, part] = np.where(whole, self._frames[part], 0)
        rows["episode_steps"][t, part] = np.where(whole, self._steps[part], 0)
        self._return[part] = np.where(reset, 0, self._return[part] + reward)
        self._frames[part] = np.where(reset, 0, self._frames[part] + frames)
        self._steps[part] = np.where(reset, 0, self._steps[part] + 1)
        self._games[part] += reset

    def _refuse(self, what: str, values: np.ndarray, part: slice) -> None:
        """Raise if anything in values [e, ...] is not finite; rows of `part` are what they belong to."""
        if values.dtype == np.uint8:
            return
        finite = np.isfinite(values)
        if not finite.all():
            column = part.start + int(np.argmin(finite.reshape(len(values), -1).all(1)))
            task = self._task_names[self.policy.tasks[column]]
            raise RefusedDataError(
                f"{what} are not finite: task {task}, environment {self.rows['environment'][column]}, "
                f"episode {self._games[column]}, step {self._steps[column]}; nothing of it was sent to the learner"
            )


class Actor:
    """Two half-groups in turn.

    Args:
        halves: the half-groups; one is allowed.
        pull: load the newest parameters into the network of the policies and return their version; None = they take their own.
        wait_for_space: block until so many unrolls can be handed over.
        beat: called at every step: "I live".
    """

    def __init__(
        self,
        halves: Sequence[HalfGroup],
        pull: Callable[[], int] | None,
        wait_for_space: Callable[[int], None],
        beat: Callable[[], None],
    ) -> None:
        self.halves = list(halves)
        self.seconds = {"environment": 0.0, "inference": 0.0, "waiting": 0.0, "transport": 0.0}
        self.steps = 0
        self._pull, self._wait_for_space, self._beat = pull, wait_for_space, beat

    def unrolls(self) -> Iterator[tuple[Arrays, int]]:
        """Rows [T+1, E, ...] and the column of one finished unroll in them, without end. Copy it before the next one.

        Parameters of local policies are taken once per round, after there is space for the unrolls and before row T, which is
        row 0 of the next unroll, is acted on: all actions that an unroll trains on come from the version that is stamped on
        it. Where the policies take their own, later rows may come from newer parameters than row 0.
        """
        self._take_parameters()
        for half in self.halves:
            half.start()
            half.act()
        while True:
            for half in self.halves:
                with self._timed("environment"):
                    half.receive()
                self.steps += half.num_envs
                self._beat()
                if half.t < half.length:
                    with self._timed("inference"):
                        half.act()
                    continue
                with self._timed("waiting"):
                    self._wait_for_space(half.num_envs)
                if half is self.halves[0]:
                    with self._timed("transport"):
                        self._take_parameters()
                before = half.policy.state()
                with self._timed("inference"):
                    half.act()
                half.rows["acted_at"][:] = time.time()
                with self._timed("transport"):
                    for column in range(half.num_envs):
                        yield half.rows, column
                    half.next_unroll(before)

    def _take_parameters(self) -> None:
        if self._pull is not None:
            version = self._pull()
            for half in self.halves:
                half.policy.version = version

    def _timed(self, stage: str) -> "_Timer":
        return _Timer(self.seconds, stage)


class _Timer:
    """Add the seconds of a with-block to a stage."""

    def __init__(self, seconds: dict[str, float], stage: str) -> None:
        self._seconds, self._stage = seconds, stage

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self._seconds[self._stage] += time.perf_counter() - self._start
