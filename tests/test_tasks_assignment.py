"""Laws of the assignment of tasks to actors."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.assignment import assign

NAMES = [f"task{i}" for i in range(60)]


@given(st.integers(1, 60), st.integers(0, 300))
def test_equal_numbers(num_tasks: int, more: int) -> None:
    actors = assign(NAMES[:num_tasks], num_tasks + more, 1)
    assert len(actors) == num_tasks + more and all(len(tasks) == 1 for tasks in actors)
    counts = Counter(tasks[0] for tasks in actors)
    assert set(counts) == set(range(num_tasks))
    assert max(counts.values()) - min(counts.values()) <= 1
    assert [tasks[0] for tasks in actors[:num_tasks]] == list(range(num_tasks))


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=20).filter(lambda w: sum(w) > 0), st.integers(0, 100))
def test_weights(weights: list[float], more: int) -> None:
    names, num_actors = NAMES[: len(weights)], len(weights) + more
    actors = assign(names, num_actors, 1, dict(zip(names, weights, strict=True)))
    counts = Counter(tasks[0] for tasks in actors)
    assert sum(counts.values()) == num_actors and set(counts) == set(range(len(weights)))
    quotas = [num_actors * weight / sum(weights) for weight in weights]
    for i, quota in enumerate(quotas):
        assert counts[i] <= max(1, quota + 1)
        if min(quotas) >= 1:
            assert abs(counts[i] - quota) < 1 + 1e-6


def test_weights_by_value() -> None:
    def counts(num_actors: int, **weights: float) -> list[int]:
        actors = assign(["a", "b", "c"], num_actors, 4, weights)
        return [sum(tasks == (i,) for tasks in actors) for i in range(3)]

    assert counts(8, a=2, b=1, c=1) == [4, 2, 2]
    assert counts(8, a=2) == [4, 2, 2]
    assert counts(10, a=5, b=3, c=2) == [5, 3, 2]
    assert counts(7, a=0, b=1, c=1) == [1, 3, 3]
    assert counts(5, a=2.9, b=1.05, c=1.05) == [3, 1, 1]
    assert counts(7, a=1e308, b=1e-300, c=1e308) == [3, 1, 3]


@given(st.integers(2, 60), st.data())
def test_fewer_actors_than_tasks(num_tasks: int, data: st.DataObject) -> None:
    num_actors = data.draw(st.integers(1, num_tasks - 1))
    actors = assign(NAMES[:num_tasks], num_actors, 60)
    assert [task for tasks in actors for task in tasks] == list(range(num_tasks))
    sizes = [len(tasks) for tasks in actors]
    assert len(sizes) == num_actors and max(sizes) - min(sizes) <= 1


def test_refusals_give_the_number_needed() -> None:
    with pytest.raises(ValueError, match="use at least 4 actors"):
        assign(NAMES[:57], 2, 16)
    assert len(assign(NAMES[:57], 4, 16)) == 4
    with pytest.raises(ValueError, match="raise the number of actors to 3"):
        assign(NAMES[:3], 2, 16, {"task0": 2.0})


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"tusk1": 1.0}, "'tusk1' is no task of the suite, did you mean one of: task1"),
        ({"task1": -1.0}, "task1 has -1.0"),
        ({"task1": float("nan")}, "task1 has nan"),
        ({"task1": float("inf")}, "task1 has inf"),
        ({"task0": 0.0, "task1": 0.0, "task2": 0.0}, "all tasks have weight 0"),
    ],
)
def test_bad_weights(weights: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        assign(NAMES[:3], 9, 4, weights)


@pytest.mark.parametrize(("names", "num_actors", "envs"), [([], 1, 1), (["a"], 0, 1), (["a"], 1, 0)])
def test_nothing_to_assign(names: list[str], num_actors: int, envs: int) -> None:
    with pytest.raises(ValueError, match=r"use at least 1|at least one"):
        assign(names, num_actors, envs)
