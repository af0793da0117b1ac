"""Intervals cover a known truth as often as they say: by simulation, and exactly where theory gives the answer."""

from typing import Any

import numpy as np
import pytest
from scipy import stats

from eval import compare, intervals, metrics
from eval.compare import CHANGES
from eval.sides import SideScores

ROUGH = [metrics.AGGREGATES.index(name) for name in metrics.ROUGH]


def of_aggregates(means: np.ndarray, noise: intervals.Noise) -> np.ndarray:
    """As a report has them."""
    return intervals.intervals(means, noise, metrics.aggregate_rows, ROUGH, intervals.shrunken(means, noise.rows))


def coverage(num_tasks: int, num_runs: int, shared: float, simulations: int, equal: bool = False) -> dict[str, float]:
    """Percent of simulations in which each aggregate's interval held the truth. Scores of a run: the truth, a part of
    the luck that all its tasks share, and the rest for each task alone. equal: all tasks are equally good."""
    generator = np.random.default_rng(1000 * num_tasks + 10 * num_runs + int(10 * shared))
    hits = np.zeros(len(metrics.AGGREGATES))
    for _ in range(simulations):
        truth = np.full(num_tasks, 50.0) if equal else generator.uniform(0, 120, num_tasks)
        luck = np.sqrt(shared) * generator.standard_normal((num_runs, 1))
        luck = luck + np.sqrt(1 - shared) * generator.standard_normal((num_runs, num_tasks))
        scores = truth + 10 * generator.uniform(0.5, 1.5, num_tasks) * luck
        low, high = of_aggregates(scores.mean(0), intervals.noise_of_runs(scores))
        right = metrics.aggregate_rows(truth[None])[0]
        hits += (low <= right + 1e-9) & (right <= high + 1e-9)
    return dict(zip(metrics.AGGREGATES, (100 * hits / simulations).tolist(), strict=True))


@pytest.mark.parametrize("num_runs", [3, 5, 10])
@pytest.mark.parametrize("shared", [0.0, 0.5])
def test_intervals_of_few_runs_cover_the_truth(num_runs: int, shared: float) -> None:
    found = coverage(8, num_runs, shared, 150)
    # 95 expected; 150 simulations have a standard deviation of 1.8.
    for name in ("mean_capped", "mean", "median", "iqm", "p25"):
        assert 90.0 <= found[name] <= 99.5, found
    for name in ("p5", "p10", "worst_tenth", *metrics.COUNTS):
        assert found[name] >= 78.0, found


@pytest.mark.parametrize("num_runs", [3, 10])
def test_the_worst_of_equal_tasks_is_seen_through(num_runs: int) -> None:
    """Noise drives equal tasks apart: the lowest percentiles of 30 look bad though no task is."""
    found = coverage(30, num_runs, 0.0, 60, equal=True)
    for name in ("p5", "p10", "p25", "worst_tenth"):
        assert found[name] >= 85.0, found


@pytest.mark.parametrize("num_runs", [3, 10])
def test_chance_alone_is_not_shown_as_loss(num_runs: int) -> None:
    """Two sides of the same truth: intervals of what was lost and gained hold 0, and the worst changes hold none."""
    generator, hits, names = np.random.default_rng(11), np.zeros(len(CHANGES)), tuple(f"t{i}" for i in range(30))
    for _ in range(60):
        sides = []
        truth, size = generator.uniform(0, 90, 30), 10 * generator.uniform(0.5, 1.5, 30)
        for _ in range(2):
            scores = truth + size * generator.standard_normal((num_runs, 30))
            sides.append((scores.mean(0), intervals.noise_of_runs(scores)))
        values, ends = aggregates_of_change(sides, names)
        for i, name in enumerate(CHANGES):
            low, high = ends[name]
            assert low <= values[name] <= high, name
            hits[i] += low <= 0 <= high
    assert (hits >= 0.85 * 60).all(), dict(zip(CHANGES, hits, strict=True))


def aggregates_of_change(sides: list[tuple[np.ndarray, intervals.Noise]], names: tuple[str, ...]) -> Any:
    scores = []
    for means, noise in sides:
        scores.append(SideScores({}, {}, {}, (), names, means, noise, ""))
    return compare._aggregates(scores[0], scores[1], list(names), 5.0, (False, False))


@pytest.mark.slow
@pytest.mark.parametrize("num_runs", [3, 5, 10])
@pytest.mark.parametrize("shared", [0.0, 0.5])
def test_intervals_of_few_runs_cover_the_truth_in_93_to_97_of_100(num_runs: int, shared: float) -> None:
    found = coverage(30, num_runs, shared, 2000)
    for name in ("mean_capped", "mean"):
        assert 93.0 <= found[name] <= 97.0, found


def test_without_the_t_distribution_three_runs_would_cover_far_less(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intervals, "student", lambda degrees: np.full(np.shape(degrees), intervals.NORMAL))
    assert coverage(8, 3, 0.0, 100)["mean"] < 90.0


def test_of_one_run_the_episodes_cover_its_own_mean() -> None:
    generator, hits = np.random.default_rng(3), 0
    for _ in range(300):
        truth = generator.uniform(0, 90, 6)
        # Skewed returns, as of games that are mostly lost: exponential with the truth as mean.
        games = generator.exponential(truth, (20, 6))
        errors = games.std(0, ddof=1) / np.sqrt(20)
        noise = intervals.noise_of_strata(errors, np.full(6, 19))
        low, high = of_aggregates(games.mean(0), noise)
        hits += int(low[1] <= truth.mean() <= high[1])
    assert 91.0 <= hits / 3 <= 99.0


def test_the_interval_of_a_mean_over_runs_is_students() -> None:
    scores = np.random.default_rng(4).normal(50, 10, (4, 5))
    low, high = intervals.intervals(scores.mean(0), intervals.noise_of_runs(scores), lambda rows: rows.mean(-1)[:, None])
    exact = stats.t.interval(0.95, 3, scores.mean(), stats.sem(scores.mean(1)))
    assert (low[0], high[0]) == pytest.approx(exact, abs=0.05 * (exact[1] - exact[0]))


def test_degrees_of_freedom_of_strata_add_up() -> None:
    noise = intervals.noise_of_strata(np.ones(8), np.full(8, 2))
    low, high = intervals.intervals(np.full(8, 50.0), noise, lambda rows: rows.mean(-1)[:, None])
    # Eight strata of 2 degrees each and equal variance have 16 together.
    assert (high[0] - low[0]) / 2 == pytest.approx(stats.t.ppf(0.975, 16) / np.sqrt(8), rel=0.06)


def test_intervals_are_the_same_every_time_and_shrink_to_a_point_without_noise() -> None:
    scores = np.random.default_rng(5).normal(50, 10, (3, 7))
    noise = intervals.noise_of_runs(scores)
    both = [intervals.intervals(scores.mean(0), noise, metrics.aggregate_rows) for _ in range(2)]
    assert np.array_equal(*both)
    still = intervals.intervals(scores.mean(0), intervals.noise_of_runs(scores[[0, 0, 0]]), metrics.aggregate_rows)
    assert still[0] == pytest.approx(still[1])


def test_what_is_not_known_has_no_standard_error() -> None:
    noise = intervals.noise_of_strata(np.array([1.0, np.nan]), np.array([3, 0]))
    assert noise.unknown == (1,)
    assert intervals.standard_errors(noise).tolist() == pytest.approx([1.0, np.nan], nan_ok=True)
    both = intervals.combine(noise, intervals.noise_of_runs(np.array([[1.0, 2.0], [3.0, 6.0]])))
    assert both.unknown == (1,) and both.rows.shape == (4, 4)
    assert intervals.standard_errors(both)[2:].tolist() == pytest.approx([1.0, 2.0])
