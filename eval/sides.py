"""One side of a report, the subject or its baseline: its runs, and from them scores and their noise per task."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from eval import intervals, metrics
from eval.curves import RunCurves
from eval.identity import Identity
from tasks.suite import Suite

Kind = Literal["runs", "single-task runs", "returns file", "published"]


@dataclass(frozen=True)
class RunData:
    """One run, or one file.

    label: folder, file or name. returns: task -> raw returns of whole games. tasks: those it was about. seed: of the
    training. budget: frames, task_frames, evaluation_frames (per task), updates, seconds. folder: the run folder.
    train_returns: of training episodes, where games were played. settings: all of the training. curves: from its files.
    """

    label: str
    returns: Mapping[str, np.ndarray]
    tasks: tuple[str, ...]
    seed: int | None = None
    budget: Mapping[str, Any] = field(default_factory=dict)
    folder: Path | None = None
    train_returns: Mapping[str, np.ndarray] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    curves: RunCurves | None = None


@dataclass(frozen=True)
class Side:
    """suite: with the score table of the report, cut to the tasks compared. identity: what all its runs share.

    fixed: published normalised scores without a raw return, in percent. stated_suite: as the source itself states it, where
    that is not `suite`. forced: what makes its runs no seeds of one experiment, and --force let pass.
    """

    label: str
    kind: Kind
    suite: Suite
    identity: Identity
    runs: tuple[RunData, ...]
    fixed: Mapping[str, float] = field(default_factory=dict)
    stated_suite: Suite | None = None
    forced: tuple[str, ...] = ()

    @property
    def own_suite(self) -> Suite:
        """The suite as the source states it."""
        return self.stated_suite or self.suite

    def runs_of(self, task: str) -> list[RunData]:
        """The runs that were about this task."""
        return [run for run in self.runs if task in run.tasks]


@dataclass(frozen=True)
class SideScores:
    """tasks: every task of the suite. sd: of raw returns of single games. num_runs: with a game of the task.

    missing: tasks for which some run has no game: their score is of the other runs, and nothing is made of it. scored:
    the other tasks with a score, in the suite's order: N. means [N] and noise are of these, in percent, uncapped.
    covers: what the noise is of.
    """

    tasks: dict[str, metrics.TaskScore]
    sd: dict[str, float | None]
    num_runs: dict[str, int]
    missing: tuple[str, ...]
    scored: tuple[str, ...]
    means: np.ndarray
    noise: intervals.Noise
    covers: str

    @property
    def errors(self) -> dict[str, float]:
        """Standard error per scored task in percent, NaN where unknown."""
        return dict(zip(self.scored, intervals.standard_errors(self.noise).tolist(), strict=True))

    @property
    def degrees(self) -> dict[str, float]:
        """Degrees of freedom per scored task."""
        spread = np.broadcast_to(self.noise.degrees, len(self.scored))
        return dict(zip(self.scored, spread.tolist(), strict=True))


RUNS, EPISODES, NOTHING = "run to run and episode to episode", "episode to episode only, within one run", "nothing"
NO_SCORE = "nothing: no task has a score"
MIXED = "run to run where a task has several runs, else episode to episode only"


def score(side: Side, wanted: Sequence[str] | None = None) -> SideScores:
    """Scores and noise of a side. wanted: of no other tasks, as for what is compared with a side that lacks some.

    Raises ValueError on returns that are not finite.
    """
    suite, tasks, sd, num_runs, missing = side.suite, {}, {}, {}, []
    for task in suite.task_names:
        runs = [run.returns.get(task, np.empty(0)) for run in side.runs_of(task)]
        tasks[task] = metrics.score_runs(suite, task, runs)
        if task in side.fixed:
            hns = side.fixed[task]
            tasks[task] = metrics.TaskScore(1, None, hns, min(hns, metrics.CAP_PERCENT))
        elif not runs or any(len(values) == 0 for values in runs):
            missing.append(task)
        num_runs[task] = sum(len(values) > 0 for values in runs)
        games = np.concatenate([*runs, np.empty(0)])
        sd[task] = float(games.std(ddof=1)) if games.size > 1 else None
    known = [task for task in suite.task_names if tasks[task].hns is not None and task not in missing]
    scored = tuple(task for task in known if wanted is None or task in wanted)
    means = np.array([tasks[task].hns for task in scored], dtype=float)
    noise = _noise(side, scored)
    return SideScores(tasks, sd, num_runs, tuple(missing), scored, means, noise, _covers(side, num_runs, scored))


def _noise(side: Side, scored: tuple[str, ...]) -> intervals.Noise:
    if side.kind == "runs" and len(side.runs) > 1:
        rows = [[_percent(side.suite, task, run.returns[task]).mean() for task in scored] for run in side.runs]
        return intervals.noise_of_runs(np.array(rows))
    errors, degrees = [], []
    for task in scored:
        # Published numbers are means of games that nobody else has seen: one number says nothing of its noise.
        runs = [] if side.kind == "published" else [_percent(side.suite, task, r.returns[task]) for r in side.runs_of(task)]
        sample = np.array([values.mean() for values in runs]) if len(runs) > 1 else np.concatenate([*runs, np.empty(0)])
        errors.append(sample.std(ddof=1) / np.sqrt(sample.size) if sample.size > 1 else np.nan)
        degrees.append(sample.size - 1)
    return intervals.noise_of_strata(np.array(errors, dtype=float), np.array(degrees))


def _percent(suite: Suite, task: str, returns: np.ndarray) -> np.ndarray:
    """Raw returns [n] in percent."""
    zero = suite.normalise(task, 0.0)
    return zero + (suite.normalise(task, 1.0) - zero) * np.asarray(returns, dtype=float)


def absent(side: Side, scores: SideScores) -> str:
    """Which tasks have no episode, and which have none in some of the runs; empty where none is missing."""
    whole = [task for task in scores.missing if not scores.num_runs[task]]
    found = []
    if whole:
        found.append(f"{len(whole)} of {len(scores.tasks)} tasks have no episode: {', '.join(whole)}")
    partly: dict[tuple[int, int], list[str]] = {}
    for task in scores.missing:
        if task not in whole:
            runs = len(side.runs_of(task))
            partly.setdefault((runs - scores.num_runs[task], runs), []).append(task)
    for (lacking, runs), tasks in partly.items():
        found.append(f"{lacking} of {runs} runs {'has' if lacking == 1 else 'have'} no episode of {', '.join(tasks)}")
    return "; ".join(found)


def _covers(side: Side, num_runs: dict[str, int], scored: tuple[str, ...]) -> str:
    counts = {num_runs[task] for task in scored}
    if not counts:
        return NO_SCORE
    if side.kind == "published":
        return NOTHING
    if min(counts) > 1:
        return RUNS
    return EPISODES if max(counts) == 1 else MIXED
