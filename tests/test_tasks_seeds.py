"""Laws of seeds: all differ within a run, neighbours share none, evaluation is disjoint from training."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.seeds import HALF, MAX_BASE, environment_seed, evaluation_seed

BASES = st.integers(0, MAX_BASE)
INDICES = st.integers(0, HALF - 1)


@given(BASES, INDICES, INDICES)
def test_all_seeds_of_a_run_differ(base: int, i: int, j: int) -> None:
    first, second = environment_seed(base, i), environment_seed(base, j)
    assert (first == second) == (i == j)
    assert type(first) is int and 0 <= first < 2**30


def window_gap(base: int, other: int) -> int:
    """Smallest distance on the circle of 2^30 seeds between the starts of two bases."""
    gap = (environment_seed(base, 0) - environment_seed(other, 0)) % HALF
    return min(gap, HALF - gap)


@given(st.one_of(BASES, st.integers(1, 2**33 - 1).map(lambda k: k * 2**30 - 1)), st.integers(1, 1000))
def test_neighbouring_bases_share_no_seed(base: int, difference: int) -> None:
    other = base + difference if base + difference <= MAX_BASE else base - difference
    assert window_gap(base, other) >= 2**18


@pytest.mark.parametrize("base", [0, 2**30 - 1, 2**30 - 500, 5 * 2**30 - 1, MAX_BASE - 1000])
def test_every_neighbour_also_across_a_boundary(base: int) -> None:
    assert min(window_gap(base, base + d) for d in range(1, 1001)) >= 2**18


@given(BASES, st.sampled_from(["pong", "breakout", "café"]), INDICES, INDICES)
def test_evaluation_is_disjoint_from_training(base: int, task: str, i: int, j: int) -> None:
    first, second = evaluation_seed(base, task, i), evaluation_seed(base, task, j)
    assert 2**30 <= first < 2**31 and type(first) is int
    assert (first == second) == (i == j)


def test_evaluation_seeds_by_task() -> None:
    assert evaluation_seed(0, "pong", 0) != evaluation_seed(0, "breakout", 0)
    assert evaluation_seed(0, "cafe\u0301", 3) == evaluation_seed(0, "caf\u00e9", 3)


def test_values_stay_the_same_for_ever() -> None:
    assert [environment_seed(0, i) for i in (0, 1, 2)] == [0, 1, 2]
    assert environment_seed(1, 0) == 663_608_941
    assert environment_seed(MAX_BASE, 7) == 36_423_725
    assert evaluation_seed(0, "pong", 0) == 1_633_173_839


@pytest.mark.parametrize("base", [-1, 2**63, True, 1.0, "1", None])
def test_what_is_no_base(base: Any) -> None:
    with pytest.raises(ValueError, match=r"seed: .* use an integer from 0 to 9223372036854775807"):
        environment_seed(base, 0)
    with pytest.raises(ValueError, match="seed: "):
        evaluation_seed(base, "pong", 0)


@pytest.mark.parametrize("index", [-1, 2**30, True, 0.5])
def test_what_is_no_index(index: Any) -> None:
    with pytest.raises(ValueError, match=r"index: .* is out of range"):
        environment_seed(0, index)
    with pytest.raises(ValueError, match=r"episode: .* is out of range"):
        evaluation_seed(0, "pong", index)
