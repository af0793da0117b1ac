"""The actor against a counting environment: every field of the row contract, both halves, versions, refusals."""

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import gymnasium
import numpy as np
import pytest
import torch

import agent_reference as reference
from agent.actor import Actor, HalfGroup, Member, RefusedDataError
from agent.inference import LocalPolicy
from agent.unroll import Arrays

SPEC = reference.small_spec({"a": 2, "b": 3})
FRAMES_PER_STEP, FRAMES_OF_LAST_STEP = 4, 3


class Game(NamedTuple):
    """How a game goes: it ends after `length` steps, truncated or terminated, loses a life at some steps, or is itself lost
    (its engine died) instead of ending."""

    length: int
    truncated: bool = False
    lives_lost: tuple[int, ...] = ()
    lost: bool = False


SCHEDULES = (
    (Game(3), Game(5, truncated=True), Game(1)),
    (Game(7, lives_lost=(2, 3, 6)), Game(4, truncated=True, lives_lost=(1,))),
    (Game(1, truncated=True),),
    (Game(10**6),),
    (Game(4), Game(2, lives_lost=(1,)), Game(3, lost=True), Game(1, lost=True), Game(2), Game(2, lost=True)),
    (Game(9, truncated=True),),
)


class Counting(gymnasium.vector.VectorEnv[Any, Any, Any]):
    """Observation = (environment, step index), reward = 100 * index + action; keeps the rules of tasks/contract.py.

    Its arrays are overwritten when the next step begins, as the contract allows.
    """

    def __init__(self, environments: Sequence[int], num_actions: int, log: list[str] | None = None, name: str = "") -> None:
        self.num_envs = len(environments)
        self.environments, self.num_actions = list(environments), num_actions
        self.games = [itertools.cycle(SCHEDULES[e % len(SCHEDULES)]) for e in environments]
        self.now = [next(games) for games in self.games]
        self.index = [0] * self.num_envs
        self.over = [False] * self.num_envs
        self.frame = np.zeros((self.num_envs, 2, 1, 1), np.float32)
        self.reward = np.zeros(self.num_envs)
        self.actions: np.ndarray | None = None
        self.log, self.name = log if log is not None else [], name
        self.spoil: Callable[[Counting], None] = lambda env: None

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        return self._observe(), {}

    def _observe(self) -> dict[str, np.ndarray]:
        self.frame[:, 0, 0, 0] = self.environments
        self.frame[:, 1, 0, 0] = self.index
        return {"frame": self.frame}

    def step_async(self, actions: np.ndarray) -> None:
        assert self.actions is None, "step_async twice"
        assert actions.min() >= 0 and actions.max() < self.num_actions, "illegal action"
        self.actions = actions.copy()
        self.frame[...], self.reward[...] = -1, -1
        self.log.append(f"begin {self.name}")

    def step_wait(self) -> Any:
        assert self.actions is not None, "step_wait without step_async"
        self.log.append(f"end {self.name}")
        terminated, truncated, reset, lost = (np.zeros(self.num_envs, bool) for _ in range(4))
        frames = np.zeros(self.num_envs, np.int32)
        for e in range(self.num_envs):
            if self.over[e]:
                reset[e], self.over[e], self.now[e], self.index[e], self.reward[e] = True, False, next(self.games[e]), 0, 0
                continue
            self.reward[e] = 100 * self.index[e] + self.actions[e]
            self.index[e] += 1
            if self.now[e].lost and self.index[e] == self.now[e].length:
                reset[e], lost[e], self.now[e], self.index[e], self.reward[e] = True, True, next(self.games[e]), 0, 0
                continue
            self.over[e] = self.index[e] == self.now[e].length
            frames[e] = FRAMES_OF_LAST_STEP if self.over[e] else FRAMES_PER_STEP
            truncated[e] = self.over[e] and self.now[e].truncated
            terminated[e] = (self.over[e] and not truncated[e]) or self.index[e] in self.now[e].lives_lost
        self.actions = None
        observation = self._observe()
        self.spoil(self)
        infos = {"frames": frames, "reset": reset, "lost": lost}
        return observation, self.reward, terminated, truncated, infos if lost.any() else {"frames": frames, "reset": reset}


def stream(environment: int, actions: np.ndarray) -> Iterator[dict[str, Any]]:
    """The row contract in plain Python: the rows that an environment must give when these actions are done."""
    games = itertools.cycle(SCHEDULES[environment % len(SCHEDULES)])
    nothing = {"reward": 0, "terminated": False, "truncated": False, "frames": 0}
    no_game = {"episode_return": np.nan, "episode_frames": 0, "episode_steps": 0}
    start = {"index": 0, "first": True, "last_action": -1, **nothing}
    row: dict[str, Any] = {**start, **no_game}
    game, returned, frames, steps = next(games), 0, 0, 0
    for action in actions:
        yield row
        ended = row["terminated"] or row["truncated"]
        if row["index"] == game.length:
            row = {**start, "episode_return": returned, "episode_frames": frames, "episode_steps": steps}
            game, returned, frames, steps = next(games), 0, 0, 0
            continue
        index = row["index"] + 1
        reward = 100 * (index - 1) + action
        over = index == game.length
        if over and game.lost:  # no last row, no statistics
            row = {**start, **no_game}
            game, returned, frames, steps = next(games), 0, 0, 0
            continue
        row = {
            "index": index,
            "first": ended,  # a life was lost: a new episode for the learner within the same game
            "last_action": -1 if ended else action,
            "reward": 0 if ended else reward,
            "terminated": (over and not game.truncated) or index in game.lives_lost,
            "truncated": over and game.truncated,
            "frames": FRAMES_OF_LAST_STEP if over else FRAMES_PER_STEP,
            **no_game,
        }
        returned, frames, steps = returned + reward, frames + row["frames"], steps + 1


class Scene(NamedTuple):
    actor: Actor
    environments: list[Counting]
    events: list[str]
    network: Any


def make_scene(length: int, sizes: Sequence[Sequence[tuple[int, int]]], pull: Callable[[], int] | None = None) -> Scene:
    """sizes: per half, (task, number of environments) of its members; environments are numbered through."""
    spec = reference.unroll_spec(SPEC, length)
    network = reference.make_network(SPEC)
    events: list[str] = []
    environments, halves, number = [], [], itertools.count()
    for index, members in enumerate(sizes):
        offset = sum(count for half in sizes[:index] for _, count in half)
        group = []
        for task, count in members:
            legal = list(SPEC.legal_actions.values())[task]
            environments.append(Counting([next(number) for _ in range(count)], legal, events, str(index)))
            group.append(Member(task, environments[-1]))
        halves.append(
            HalfGroup(group, partial(LocalPolicy, network), network.task_names, spec, 7, offset, np.random.default_rng(index))
        )
    versions = itertools.count(10, 10)

    def default_pull() -> int:
        events.append("pull")
        return next(versions)

    actor = Actor(halves, pull or default_pull, lambda n: events.append(f"space {n}"), lambda: events.append("beat"))
    return Scene(actor, environments, events, network)


def play(scene: Scene, count: int) -> list[Arrays]:
    """Copies of the next unrolls, one column each."""
    unrolls = []
    for rows, column in itertools.islice(scene.actor.unrolls(), count):
        per_row = reference.unroll_spec(SPEC, scene.actor.halves[0].length).fields()
        unrolls.append({n: (rows[n][:, column] if f.per_row else rows[n][column]).copy() for n, f in per_row.items()})
    return unrolls


TWO_HALVES = ([(0, 2), (1, 1)], [(1, 2), (0, 1)])  # several tasks in each half
TASKS = (0, 0, 1, 1, 1, 0)


@pytest.mark.parametrize("length", [1, 2, 5, 8])
def test_every_field_of_the_row_contract(length: int) -> None:
    rounds = 40 // length
    unrolls = play(make_scene(length, TWO_HALVES), 6 * rounds)
    for environment, task in enumerate(TASKS):
        own = [unroll for unroll in unrolls if unroll["environment"] == environment]
        assert len(own) == rounds
        assert all(unroll["task"] == task and unroll["actor"] == 7 for unroll in own)
        for before, after in itertools.pairwise(own):
            for name, field in reference.unroll_spec(SPEC, length).fields().items():
                if field.per_row:
                    np.testing.assert_array_equal(after[name][0], before[name][length], err_msg=f"row 0 repeats row T: {name}")
        rows = [
            {n: v[t] for n, v in unroll.items() if n not in ("core_state",) and v.ndim} for unroll in own for t in range(length)
        ]
        expected = list(stream(environment, np.array([row["action"] for row in rows])))
        for t, (row, want) in enumerate(zip(rows, expected, strict=True)):
            assert row["frame"][:, 0, 0].tolist() == [environment, want["index"]], t
            for name in ("first", "last_action", "reward", "terminated", "truncated", "frames"):
                assert row[name] == want[name], (environment, t, name)
            for name in ("episode_return", "episode_frames", "episode_steps"):
                np.testing.assert_equal(row[name], want[name], err_msg=f"{environment} {t} {name}")
            legal = list(SPEC.legal_actions.values())[task]
            assert 0 <= row["action"] < legal
            assert np.exp(row["log_probs"][:legal]).sum() == pytest.approx(1, abs=1e-5)
            assert (np.exp(row["log_probs"][legal:]) == 0).all()


def test_the_schedules_show_what_they_are_for() -> None:
    """Ends, truncations, lost lives and several whole games are really in the rows that the contract test compares."""
    unrolls = play(make_scene(8, TWO_HALVES), 6 * 5)
    rows = {
        name: np.concatenate([unroll[name][1:] for unroll in unrolls])
        for name in ("first", "frames", "truncated", "terminated")
    }
    assert (rows["first"] & (rows["frames"] == 0)).sum() > 10, "resets"
    assert (rows["first"] & (rows["frames"] > 0)).sum() > 5, "lost lives"
    assert rows["truncated"].sum() > 5 and rows["terminated"].sum() > 5
    assert len({int(unroll["action"].sum()) for unroll in unrolls}) > 1, "actions vary"


def test_returns_are_raw_and_of_whole_games() -> None:
    """Environment 1 loses lives within its games: their return is still 100 * (0 + ... + 6) + actions, in 7 steps."""
    unrolls = [unroll for unroll in play(make_scene(8, TWO_HALVES), 6 * 6) if unroll["environment"] == 1]
    actions = np.concatenate([unroll["action"][:8] for unroll in unrolls])
    returns = np.concatenate([unroll["episode_return"][:8] for unroll in unrolls])
    steps = np.concatenate([unroll["episode_steps"][:8] for unroll in unrolls])
    ends = np.flatnonzero(~np.isnan(returns))
    assert ends[:3].tolist() == [8, 13, 21], "7 steps and a reset, 4 and a reset, again"
    assert returns[8] == 100 * sum(range(7)) + actions[:7].sum()
    assert returns[13] == 100 * sum(range(4)) + actions[8:12].sum()
    assert steps[ends[:3]].tolist() == [7, 4, 7]


def test_the_halves_take_turns() -> None:
    """While one half's engines work, the other half is received and acts; one beat per step."""
    scene = make_scene(3, ([(0, 2)], [(1, 3)]))
    play(scene, 5 * 4)
    moves = [event for event in scene.events if event.startswith(("begin", "end"))]
    assert moves[:2] == ["begin 0", "begin 1"]
    for start in range(2, len(moves) - 4, 4):
        assert moves[start : start + 4] == ["end 0", "begin 0", "end 1", "begin 1"]
    received = moves.count("end 0") * 2 + moves.count("end 1") * 3
    assert scene.actor.steps == received
    assert scene.events.count("beat") == moves.count("end 0") + moves.count("end 1")


def test_parameters_are_taken_once_per_round_after_there_is_space() -> None:
    scene = make_scene(3, TWO_HALVES)
    unrolls = play(scene, 6 * 5)
    for index, unroll in enumerate(unrolls):
        assert unroll["version"] == 10 + 10 * (index // 6), (
            "every unroll of a round carries the version pulled before its row 0"
        )
    calls = [event for event in scene.events if event == "pull" or event.startswith("space")]
    assert calls[:7] == ["pull", "space 3", "pull", "space 3", "space 3", "pull", "space 3"]


def test_one_half_alone_works() -> None:
    unrolls = play(make_scene(4, ([(1, 2)],)), 8)
    assert [int(unroll["environment"]) for unroll in unrolls] == [0, 1] * 4
    assert [int(unroll["version"]) for unroll in unrolls] == [10, 10, 20, 20, 30, 30, 40, 40]


def test_policies_that_take_their_own_parameters_stamp_the_oldest_that_acted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every row may come from newer parameters than the one before: the version of row 0 counts, and nobody pulls."""
    scene = make_scene(4, [[(1, 2)], [(1, 2)]])
    scene.actor._pull = None
    act = LocalPolicy.act

    def newer(policy: LocalPolicy, *row: Any) -> tuple[np.ndarray, np.ndarray]:
        policy.version += 1
        return act(policy, *row)

    monkeypatch.setattr(LocalPolicy, "act", newer)
    assert [int(unroll["version"]) for unroll in play(scene, 12)] == [1] * 4 + [5] * 4 + [9] * 4
    assert "pull" not in scene.events


def test_the_time_of_row_t_is_stamped_and_stages_are_timed() -> None:
    started = time.time()
    scene = make_scene(3, TWO_HALVES)
    stamps = [float(unroll["acted_at"]) for unroll in play(scene, 18)]
    ended = time.time()
    assert stamps == sorted(stamps) and started <= stamps[0] and stamps[-1] <= ended
    assert set(scene.actor.seconds) == {"environment", "inference", "waiting", "transport"}
    assert all(seconds > 0 for seconds in scene.actor.seconds.values())
    assert sum(scene.actor.seconds.values()) <= ended - started + 0.01


def spoil_reward(value: float) -> Callable[[Counting], None]:
    def spoil(env: Counting) -> None:
        if env.environments[-1] == 5 and env.index[-1] == 2:
            env.reward[-1] = value

    return spoil


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, pytest.param(1e39, id="too large for float32")])
def test_a_reward_that_is_not_finite_is_refused(value: float) -> None:
    """Environment 5 plays task a; its first game's second step (step 1, counted from 0) gives the bad reward."""
    scene = make_scene(8, TWO_HALVES)
    scene.environments[-1].spoil = spoil_reward(value)
    with pytest.raises(RefusedDataError, match=r"rewards are not finite: task a, environment 5, episode 0, step 1;"):
        play(scene, 6)


def test_a_bad_reward_later_names_its_episode_and_nothing_of_its_unroll_is_sent() -> None:
    """Environment 0: games of 3, 5 and 1 steps. The fourth step of the second game is in the second unroll of 6 steps."""
    scene = make_scene(6, ([(0, 1)],))
    seen = 0

    def spoil(env: Counting) -> None:
        if env.now[0].length == 5 and env.index[0] == 4:
            env.reward[0] = np.nan

    scene.environments[0].spoil = spoil
    with pytest.raises(RefusedDataError, match="task a, environment 0, episode 1, step 3;"):
        for rows, column in scene.actor.unrolls():
            assert np.isfinite(rows["reward"][:, column]).all()
            seen += 1
    assert seen == 1


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_an_observation_that_is_not_finite_is_refused(value: float) -> None:
    scene = make_scene(8, TWO_HALVES)

    def spoil(env: Counting) -> None:
        if env.index[1] == 3:
            env.frame[1, 1] = value

    scene.environments[2].spoil = spoil  # environments 3 and 4 of task b; 4 plays games of 4 steps
    with pytest.raises(RefusedDataError, match="observations are not finite: task b, environment 4, episode 0, step 2;"):
        play(scene, 6)


def test_log_probabilities_that_are_not_finite_are_refused() -> None:
    scene = make_scene(8, TWO_HALVES)
    with torch.no_grad():
        scene.network.policy_heads["task_b"].bias[0] = torch.nan
    with pytest.raises(RefusedDataError, match="log-probabilities of the policy are not finite: task b, environment 2,"):
        play(scene, 6)


def test_a_bad_first_observation_is_refused() -> None:
    """The observation of reset() passes the same gate as all others: NaN there must not reach the learner either."""
    scene = make_scene(2, ([(0, 1)],))
    scene.environments[0].environments = [np.nan]  # type: ignore[list-item]
    scene.environments[0].spoil = lambda env: env.frame.fill(0)  # all later ones are fine
    with pytest.raises(RefusedDataError, match="task a, environment 0, episode 0, step 0;"):
        play(scene, 1)
