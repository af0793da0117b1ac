"""Intervals of 95 percent for scores per task and for what is made of them: a multiplier bootstrap with Student's t.

With several runs of one experiment the unit is a whole run: tasks of one network share its luck, so they are not drawn
apart. With runs of one task each, or with one run only, each task is a stratum of its own, drawn apart from the others.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import special

REPLICATES = 4000
SEED = 20180204
LEVEL = 0.95
# Two-sided: what a normal distribution needs for LEVEL.
NORMAL = float(special.ndtri(0.5 + LEVEL / 2))


@dataclass(frozen=True)
class Noise:
    """By how much the means of N tasks would differ another time: mean + weights [K] @ rows, weights normal(0, 1).

    rows: [K, N] percent. group: [K] which rows belong together. degrees: [G] degrees of freedom per group.
    unknown: indices of the tasks about whose noise nothing is known (one number only): their columns are 0.
    """

    rows: np.ndarray
    group: np.ndarray
    degrees: np.ndarray
    unknown: tuple[int, ...] = ()


def noise_of_strata(standard_errors: np.ndarray, degrees: np.ndarray) -> Noise:
    """Noise of N tasks drawn apart: standard errors [N] in percent (NaN = unknown), degrees of freedom [N]."""
    unknown = tuple(np.flatnonzero(~np.isfinite(standard_errors)).tolist())
    known = np.where(np.isfinite(standard_errors), standard_errors, 0.0)
    return Noise(np.diag(known), np.arange(known.size), np.maximum(degrees, 1).astype(float), unknown)


def noise_of_runs(scores: np.ndarray) -> Noise:
    """Noise of the mean over R >= 2 whole runs, scores [R, N] in percent: normal weights on each run's deviation."""
    count = scores.shape[0]
    rows = (scores - scores.mean(0)) / np.sqrt(count * (count - 1))
    return Noise(rows, np.zeros(count, int), np.array([count - 1.0]))


def standard_errors(noise: Noise) -> np.ndarray:
    """Standard error [N] of each task's mean in percent; NaN where unknown."""
    errors = np.sqrt(np.square(noise.rows).sum(0))
    errors[list(noise.unknown)] = np.nan
    return errors


def combine(first: Noise, second: Noise) -> Noise:
    """Noise of two sides beside each other, [K1 + K2, N1 + N2]: independent of each other."""
    (k1, n1), (k2, n2) = first.rows.shape, second.rows.shape
    rows = np.zeros((k1 + k2, n1 + n2))
    rows[:k1, :n1], rows[k1:, n1:] = first.rows, second.rows
    group = np.concatenate([first.group, second.group + first.degrees.size])
    unknown = (*first.unknown, *(n1 + index for index in second.unknown))
    return Noise(rows, group, np.concatenate([first.degrees, second.degrees]), unknown)


def shrunken(values: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Three guesses [3, N] at the truth behind `values` [N]: as they are, pulled together until their variance over tasks is
    that of the truth, and further, until each is closest to its truth on average (empirical Bayes).

    rows: [K, N], the noise of these values as in Noise. Noise alone makes equal tasks differ: their variance over tasks less
    that of the noise is what the truth has. Noise that all tasks share does not drive them apart and is left out.
    """
    spread, apart = values.var(), np.var(rows, axis=1).sum()
    share = max(0.0, 1 - apart / spread) if spread > 0 else 1.0
    return values.mean() + np.array([[1.0], [np.sqrt(share)], [share]]) * (values - values.mean())


def intervals(
    means: np.ndarray,
    noise: Noise,
    statistics: Callable[[np.ndarray], np.ndarray],
    rough: Sequence[int] = (),
    truths: np.ndarray | None = None,
) -> np.ndarray:
    """Low and high [2, S] of `statistics`: [R, N] scores in percent -> [R, S], at `means` [N].

    Percentiles of REPLICATES draws around the statistic, their distance from it stretched from the normal distribution
    to Student's t. Its degrees of freedom are Welch and Satterthwaite's, from the share of each group in the statistic's
    variance.

    Columns in `rough` are extremes and counts of tasks, which noise alone moves: the worst of 30 equal tasks looks bad, and
    some of 30 unchanged ones look lost. For these, noise is drawn around each of `truths` [G, N] (see `shrunken`; the means if
    None), and by as much as it leads astray there the statistic is corrected. The interval holds what comes of all guesses,
    and the statistic itself.
    """
    generator = np.random.default_rng(SEED)
    weights = generator.standard_normal((REPLICATES, noise.rows.shape[0]))
    centre, errors = statistics(means[None])[0], weights @ noise.rows
    drawn = statistics(means + errors)
    stretch = student(_degrees(drawn, weights, noise)) / NORMAL
    percentiles = [50 * (1 - LEVEL), 50 * (1 + LEVEL)]
    ends = centre + stretch * (np.percentile(drawn, percentiles, axis=0) - centre)
    if len(rough):
        found = [centre[rough]]
        for at in means[None] if truths is None else truths:
            astray = (statistics(at + errors) - statistics(at[None]))[:, rough]
            bias = np.median(astray, axis=0)
            found += list(centre[rough] - bias - stretch[rough] * (np.percentile(astray, percentiles, axis=0) - bias))
        ends[:, rough] = np.min(found, axis=0), np.max(found, axis=0)
    return ends


def student(degrees: np.ndarray | float) -> np.ndarray:
    """The factor of a two-sided interval of LEVEL for these degrees of freedom; 4.30 for 2, 1.96 for infinitely many."""
    return special.stdtrit(degrees, 0.5 + LEVEL / 2)


def _degrees(drawn: np.ndarray, weights: np.ndarray, noise: Noise) -> np.ndarray:
    """Satterthwaite's degrees of freedom [S] of statistics drawn [R, S] with weights [R, K]."""
    covariance = (drawn - drawn.mean(0)).T @ weights / drawn.shape[0]
    # A covariance that is nothing but chance is about sd / sqrt(R): taken off, or many strata would pass for many degrees.
    squares = np.maximum(np.square(covariance) - drawn.var(0)[:, None] / drawn.shape[0], 0.0)
    groups = np.zeros((drawn.shape[1], noise.degrees.size))
    np.add.at(groups.T, noise.group, squares.T)
    total, parts = np.square(groups.sum(1)), (np.square(groups) / noise.degrees).sum(1)
    return np.where(parts > 0, total / np.where(parts > 0, parts, 1.0), noise.degrees.min(initial=np.inf))
