"""What the benchmark makes of its measurements: bounds and sizes, by hand."""

import pytest

from launch.benchmark import bound_of, sentence, summarise

SECONDS = {"environment": 0.5e-3, "inference": 0.1e-3, "learner": 0.3e-3, "transport": 0.1e-3}


def test_a_learner_on_the_cpu_shares_the_cores_and_one_on_a_gpu_does_not():
    assert bound_of(SECONDS, 2, "cpu") == pytest.approx(2 / 1e-3)
    assert bound_of(SECONDS, 2, "cuda") == pytest.approx(2 / 0.7e-3)
    assert bound_of(SECONDS, 64, "cuda") == pytest.approx(1 / 0.3e-3), "then the learner is what limits"


def test_sizes_for_a_long_run():
    result = summarise([{"seconds_per_step": SECONDS, "steps_per_second": 1000.0}], 2, 4, "cpu")
    assert result["ratio"] == pytest.approx(0.5)
    size = result["sizing"]
    assert size["actor_cores_per_learner"] == pytest.approx(2.0)
    assert size["days_at_this_speed"] == pytest.approx(1e10 / 4000 / 86400)
    assert size["days_with_enough_actors"] == pytest.approx(1e10 / 4 * 0.3e-3 / 86400)
    assert "keeps up with 2.0 cores of actors; 10,000,000,000 frames take 28.9 days" in sentence(result)
