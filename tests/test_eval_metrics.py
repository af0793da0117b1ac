"""Scores by value (published tables) and by law: mean first, cap after it, every task weighs the same."""

from fractions import Fraction
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eval import metrics, published
from tasks.registry import load_suite
from tasks.suite import Suite, Task

RETURN = st.floats(-1e4, 1e4)
TASK_RETURNS = st.lists(st.lists(RETURN, min_size=1, max_size=6), min_size=1, max_size=12)


def suite_of(num_tasks: int, random: float = 0.0, human: float = 10.0) -> Suite:
    tasks = tuple(Task(f"t{i}", "m:f", "m:f", random, human) for i in range(num_tasks))
    return Suite("mine", "custom", "own", tasks)


def aggregate(suite: Suite, returns: dict[str, list[float]]) -> dict[str, float]:
    scores = metrics.score_tasks(suite, returns)
    return metrics.aggregate([score.hns for score in scores.values() if score.hns is not None])


@pytest.mark.parametrize(
    ("agent", "mean_capped", "iqm"),
    [("impala_experts_deep", 44.4416, 45.72), ("impala_multitask_deep_pbt", 49.3448, 47.99)],
)
def test_published_impala_scores_come_out_with_the_papers_table(agent: str, mean_capped: float, iqm: float) -> None:
    raw = published.find(agent, "dmlab30").raw
    scores = aggregate(load_suite("dmlab30", score_table="paper_b1"), {task: [value] for task, value in raw.items()})
    assert scores["mean_capped"] == pytest.approx(mean_capped, abs=5e-5)
    assert scores["iqm"] == pytest.approx(iqm, abs=5e-3)


def test_published_brain_agent_aggregates_come_out() -> None:
    scores = metrics.aggregate(list(published.find("brain_agent").hns.values()))
    assert scores["mean_capped"] == pytest.approx(91.2497, abs=5e-5)
    assert scores["p10"] == pytest.approx(74.3290, abs=5e-5)


def test_aggregates_of_a_case_small_enough_to_do_by_hand() -> None:
    scores = metrics.aggregate([300.0, -20.0, 10.0, 30.0, 50.0, 70.0, 90.0, 110.0, 130.0, 20.0, 0.0])
    # Sorted: -20 0 10 20 30 50 70 90 110 130 300; the capped ones end in 100 100 100; floor(11/4) = 2, ceil(11/10) = 2.
    assert scores == pytest.approx(
        {
            "mean_capped": 550 / 11,
            "mean": 790 / 11,
            "median": 50.0,
            "iqm": (10 + 20 + 30 + 50 + 70 + 90 + 110) / 7,
            "optimality_gap": 50.0,
            "p5": -10.0,
            "p10": 0.0,
            "p25": 15.0,
            "worst_tenth": -10.0,
            "below_5": 2,
            "below_25": 4,
            "at_100": 3,
        }
    )
    assert tuple(scores) == metrics.AGGREGATES
    assert [metrics.aggregate([150.0, 300.0])[name] for name in ("p5", "p10", "p25", "worst_tenth")] == [100.0] * 4


def test_the_cap_comes_after_averaging_and_there_is_no_floor() -> None:
    assert metrics.score_task(suite_of(1), "t0", [0.0, 19.0]) == metrics.TaskScore(2, 9.5, 95.0, 95.0)
    assert metrics.score_task(suite_of(1), "t0", [0.0, 30.0]) == metrics.TaskScore(2, 15.0, 150.0, 100.0)
    assert metrics.score_task(suite_of(1), "t0", [-30.0]).capped == -300.0


@given(TASK_RETURNS)
def test_scores_equal_exact_arithmetic(returns: list[list[float]]) -> None:
    scores = metrics.score_tasks(suite_of(len(returns), -3.0, 7.0), {f"t{i}": r for i, r in enumerate(returns)})
    for values, score in zip(returns, scores.values(), strict=True):
        mean = sum(map(Fraction, values), Fraction(0)) / len(values)
        exact = 100 * (mean + 3) / 10
        assert score.n == len(values)
        assert score.raw_mean == pytest.approx(float(mean), abs=1e-9)
        assert score.hns == pytest.approx(float(exact), abs=1e-8)
        assert score.capped == pytest.approx(float(min(exact, Fraction(100))), abs=1e-8)


@given(TASK_RETURNS, st.randoms(use_true_random=False))
def test_the_order_of_tasks_does_not_change_a_bit(returns: list[list[float]], random: Random) -> None:
    hns = [sum(values) for values in returns]
    shuffled = list(hns)
    random.shuffle(shuffled)
    assert metrics.aggregate(shuffled) == metrics.aggregate(hns)


@given(TASK_RETURNS, st.integers(2, 5))
def test_more_episodes_of_a_task_give_it_no_more_weight(returns: list[list[float]], times: int) -> None:
    suite = suite_of(len(returns))
    plain = {f"t{i}": values for i, values in enumerate(returns)}
    assert aggregate(suite, {**plain, "t0": returns[0] * times}) == pytest.approx(aggregate(suite, plain), abs=1e-7)


@given(TASK_RETURNS, st.floats(-1e3, 1e3))
def test_a_shift_of_returns_and_score_table_changes_nothing(returns: list[list[float]], shift: float) -> None:
    plain = aggregate(suite_of(len(returns)), {f"t{i}": values for i, values in enumerate(returns)})
    moved = {f"t{i}": [value + shift for value in values] for i, values in enumerate(returns)}
    assert aggregate(suite_of(len(returns), shift, shift + 10.0), moved) == pytest.approx(plain, abs=1e-6)


def test_no_episode_is_no_number_and_no_warning(recwarn: pytest.WarningsRecorder) -> None:
    scores = metrics.score_tasks(suite_of(2), {"t1": [5.0]})
    assert scores == {"t0": metrics.TaskScore(0, None, None, None), "t1": metrics.TaskScore(1, 5.0, 50.0, 50.0)}
    assert not recwarn.list


def test_an_unscored_task_has_a_raw_mean_only() -> None:
    suite = Suite("mine", "custom", "own", (Task("t0", "m:f", "m:f"),))
    assert metrics.score_task(suite, "t0", [1.0, 2.0]) == metrics.TaskScore(2, 1.5, None, None)


def test_what_has_no_score_is_an_error_that_names_it() -> None:
    with pytest.raises(ValueError, match=r"'t0': return 1 is nan"):
        metrics.score_task(suite_of(1), "t0", [1.0, np.nan])
    with pytest.raises(ValueError, match="t0 has random_score = human_score"):
        metrics.score_task(suite_of(1, 5.0, 5.0), "t0", [1.0])
    with pytest.raises(ValueError, match=r"\[\] have no aggregate"):
        metrics.aggregate([])


def test_several_runs_weigh_the_same_whatever_their_number_of_games() -> None:
    score = metrics.score_runs(suite_of(1), "t0", [[0.0], [10.0, 10.0, 10.0]])
    assert score == metrics.TaskScore(4, 5.0, 50.0, 50.0)


def test_rows_are_aggregated_each_for_itself() -> None:
    rows = np.random.default_rng(0).normal(50, 60, (7, 30))
    one_by_one = [list(metrics.aggregate(row).values()) for row in rows]
    assert np.array_equal(metrics.aggregate_rows(rows), np.array(one_by_one))
