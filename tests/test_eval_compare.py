"""The change against a baseline: Welch's test, Holm's correction, the margin, the cap, and losses apart from gains."""

from itertools import combinations
from typing import Any

import numpy as np
import pytest
from scipy import stats

from eval import compare, sides
from eval.identity import Identity
from tasks.suite import Suite, Task


def side(*runs: dict[str, list[float]], kind: Any = "runs") -> sides.SideScores:
    names = list(dict.fromkeys(task for run in runs for task in run))
    suite = Suite("mine", "custom", "own", tuple(Task(name, "m:f", "m:f", 0.0, 100.0) for name in names))
    data = tuple(
        sides.RunData(f"run{i}", {task: np.array(values, float) for task, values in run.items()}, tuple(run))
        for i, run in enumerate(runs)
    )
    return sides.score(sides.Side("side", kind, suite, Identity("side"), data))


def around(mean: float, spread: float = 1.0, n: int = 20) -> list[float]:
    return (mean + spread * np.linspace(-1, 1, n)).tolist()


def test_the_test_of_one_run_each_is_welchs_over_games() -> None:
    now, before = around(40, 9, 12), around(46, 5, 30)
    change = compare.compare(side({"a": now}), side({"a": before})).tasks["a"]
    expected = stats.ttest_ind(now, before, equal_var=False)
    assert change.p_value == pytest.approx(expected.pvalue, rel=1e-9)
    low, high = expected.confidence_interval(0.95)
    assert (change.uncapped_low, change.uncapped_high) == pytest.approx((low, high))
    assert (change.low, change.high) == pytest.approx((low, high))  # far below the cap both are Welch's


def test_the_test_of_several_runs_is_welchs_over_their_means() -> None:
    now = [{"a": around(mean, 30)} for mean in (40, 42, 47)]
    before = [{"a": around(mean, 30)} for mean in (50, 51, 55, 49)]
    change = compare.compare(side(*now), side(*before)).tasks["a"]
    expected = stats.ttest_ind([40, 42, 47], [50, 51, 55, 49], equal_var=False)
    assert change.p_value == pytest.approx(expected.pvalue, rel=1e-9)


def test_a_published_number_is_tested_against_as_exact() -> None:
    values = around(40, 9, 12)
    change = compare.compare(side({"a": values}), side({"a": [46.0]}, kind="published"), (False, True)).tasks["a"]
    assert change.p_value == pytest.approx(stats.ttest_1samp(values, 46.0).pvalue, rel=1e-9)
    both = compare.compare(side({"a": [40.0]}, kind="published"), side({"a": [46.0]}, kind="published"), (True, True))
    assert both.tasks["a"].verdict == compare.NOT_TESTED and both.tasks["a"].p_value is None
    assert both.values["lost"] == 1 and both.intervals["mean"] is None


def test_one_game_is_not_tested() -> None:
    change = compare.compare(side({"a": [40.0]}), side({"a": around(46)}))
    assert change.tasks["a"].verdict == compare.NOT_TESTED and change.tasks["a"].low is None
    assert change.intervals["mean"] is None


def test_holms_correction_by_hand() -> None:
    found = compare.holm_correct([0.04, 0.01, None, 0.03])
    # Sorted 0.01, 0.03, 0.04 times 3, 2, 1; never below the one before.
    assert found == pytest.approx([0.06, 0.03, None, 0.06])
    assert compare.holm_correct([0.9, 0.8]) == [1.0, 1.0]


def test_verdicts_need_the_margin_and_the_corrected_test() -> None:
    before = side({name: around(50) for name in "abcd"})
    now = side({"a": around(30), "b": around(70), "c": around(46), "d": around(40, 300)})
    change = compare.compare(now, before)
    assert {task: found.verdict for task, found in change.tasks.items()} == {
        "a": compare.LOST, "b": compare.GAINED, "c": compare.NO_EVIDENCE, "d": compare.NO_EVIDENCE
    }  # fmt: skip
    assert change.tasks["c"].p_holm is not None and change.tasks["c"].p_holm < 1e-6  # real, but within the margin
    assert change.fallen() == ["a", "d"] and change.named(compare.LOST) == ["a"]
    assert compare.compare(now, before, margin=3.0).tasks["c"].verdict == compare.LOST


def test_the_correction_is_over_tasks() -> None:
    """A change that one task alone would call significant is none among forty."""
    now, before = around(44, 10, 12), around(50.5, 10, 12)
    p_value = stats.ttest_ind(now, before, equal_var=False).pvalue
    assert 0.05 / 40 < p_value < 0.05
    rest = {f"t{i}": around(50, 10, 12) for i in range(39)}
    assert compare.compare(side({"a": now}), side({"a": before})).tasks["a"].verdict == compare.LOST
    many = compare.compare(side({"a": now, **rest}), side({"a": before, **rest}))
    assert many.tasks["a"].verdict == compare.NO_EVIDENCE


def test_what_falls_above_the_cap_is_said() -> None:
    change = compare.compare(side({"a": around(120), "b": around(50)}), side({"a": around(400), "b": around(50)}))
    assert change.tasks["a"].capped == 0.0 and change.tasks["a"].verdict == compare.NO_EVIDENCE
    assert (change.tasks["a"].low, change.tasks["a"].high) == (0.0, 0.0)
    assert change.hidden_by_cap == ("a",) and change.values["mean"] == change.values["sum_losses"] == 0.0


def test_games_that_all_end_alike_are_no_division_by_zero(recwarn: pytest.WarningsRecorder) -> None:
    change = compare.compare(side({"a": [10.0] * 5, "b": [1.0] * 5}), side({"a": [90.0] * 5, "b": [1.0] * 5}))
    assert change.tasks["a"].verdict == compare.LOST and change.tasks["b"].verdict == compare.NO_EVIDENCE
    assert change.values["sum_losses"] == -80.0 and not recwarn.list


def test_the_change_over_tasks_keeps_losses_and_gains_apart() -> None:
    changes = [-40.0, -6.0, -5.0, -1.0, 0.0, 5.0, 6.0, 30.0, 2.0, 3.0, 4.0]
    before = side({f"t{i}": around(50) for i in range(11)})
    now = side({f"t{i}": around(50 + points) for i, points in enumerate(changes)})
    values = compare.compare(now, before).values
    assert values["lost"] == 2 and values["gained"] == 2  # 5 is not beyond 5
    assert values["mean"] == pytest.approx(-2 / 11)
    assert (values["sum_losses"], values["sum_gains"]) == pytest.approx((-52.0, 50.0))
    assert values["worst_tenth"] == pytest.approx(-23.0)  # ceil(11 / 10) = 2
    assert [values[name] for name in ("p5", "p10", "p25", "p50")] == pytest.approx(
        np.percentile(changes, [5, 10, 25, 50]).tolist()
    )


def test_intervals_of_the_change_cover_a_known_truth() -> None:
    generator, hits = np.random.default_rng(6), 0
    for _ in range(200):
        truth = generator.uniform(10, 80, (2, 5))
        runs = [
            [{f"t{i}": [score] for i, score in enumerate(row)} for row in mean + generator.normal(0, 8, (3, 5))]
            for mean in truth
        ]
        change = compare.compare(side(*runs[0]), side(*runs[1]))
        ends = change.intervals["mean"]
        assert ends is not None
        hits += int(ends[0] <= (truth[0] - truth[1]).mean() <= ends[1])
    assert 90.5 <= hits / 2 <= 99.5


def permutation_p(now: list[float], before: list[float]) -> float:
    """Twice the share of all ways to deal the games to two sides whose first is at least as far below the second."""
    every, seen = [*now, *before], np.mean(before) - np.mean(now)
    splits = list(combinations(range(len(every)), len(now)))
    picked = [np.isin(np.arange(len(every)), split) for split in splits]
    games = np.array(every)
    return min(1.0, 2 * float(np.mean([games[~mask].mean() - games[mask].mean() >= seen - 1e-9 for mask in picked])))


@pytest.mark.parametrize(("n1", "n2"), [(2, 2), (2, 3), (3, 3), (4, 4)])
def test_few_games_that_all_end_alike_are_tested_by_permutation(n1: int, n2: int) -> None:
    now, before = [10.1] * n1, [90.3] * n2
    for subject, baseline in (
        (side({"a": now}), side({"a": before})),
        (side(*({"a": [value] * 7} for value in now)), side(*({"a": [value] * 5} for value in before))),  # runs are the units
    ):
        change = compare.compare(subject, baseline).tasks["a"]
        assert change.p_value == pytest.approx(permutation_p(now, before))
        assert (change.verdict == compare.LOST) == (n1 == 4)


def test_one_side_that_ends_alike_is_no_more_evidence_than_its_number_of_games() -> None:
    """Welch's test alone calls two equal games against three others p < 0.001."""
    now, before = [10.0, 10.0], [90.0, 91.0, 92.0]
    assert stats.ttest_ind([10.0, 10.0 + 1e-6], before, equal_var=False).pvalue < 1e-3
    for subject, baseline in ((now, before), (before, now)):
        change = compare.compare(side({"a": subject}), side({"a": baseline})).tasks["a"]
        assert change.p_value == pytest.approx(permutation_p(now, before)) and change.verdict == compare.NO_EVIDENCE
    published = side({"a": [90.0]}, kind="published")
    change = compare.compare(side({"a": now}), published, (False, True)).tasks["a"]
    assert change.p_value == pytest.approx(stats.binomtest(0, 2).pvalue) and change.verdict == compare.NO_EVIDENCE
    assert compare.compare(side({"a": [10.0] * 9}), published, (False, True)).tasks["a"].verdict == compare.LOST
