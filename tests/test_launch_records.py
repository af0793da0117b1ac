"""Records: what a line holds, what a resume cuts off, and what is never written."""

import json

import numpy as np
import pytest

from agent.conflict import Conflict, Gradients
from agent.learner import Counters
from agent.unroll import UnrollSpec
from launch.display import Display, duration, plain_line
from launch.records import Lines, TaskRecords, last_line, read_lines, scalars
from launch.reporter import Reporter
from launch.status import Status
from tasks.registry import load_suite

SPEC = UnrollSpec(unroll_length=3, frame_shape=(2, 2, 1), frame_dtype="uint8", instruction_length=0, num_actions=2, core_size=1)


def batch_with(games: dict[tuple[int, int], float], tasks: list[int]) -> dict[str, np.ndarray]:
    """Arrays of a batch in which games end at (row, column) with these returns."""
    arrays = SPEC.empty(len(tasks))
    arrays["task"][:] = tasks
    arrays["frames"][:] = 4
    arrays["episode_return"][:] = np.nan
    for (t, b), value in games.items():
        arrays["episode_return"][t, b] = value
        arrays["frames"][t, b] = 0
    return arrays


def test_games_are_counted_once_although_rows_repeat():
    records = TaskRecords(["a", "b"], window=10)
    # Row 0 repeats the last row of the unroll before: its game was counted there.
    games = records.add(batch_with({(0, 0): 1.0, (3, 0): 2.0, (1, 1): 5.0}, [0, 1]), total_frames=7, seconds=1.0)
    assert [(game["task"], game["return"]) for game in games] == [("b", 5.0), ("a", 2.0)]
    assert records.episodes.tolist() == [1, 1]
    assert records.frames.tolist() == [8, 8], "3 rows of 4 frames, one of them a reset"
    assert records.steps.tolist() == [2, 2]


def test_state_follows_names():
    records = TaskRecords(["a", "b"], window=2)
    records.add(batch_with({(1, 0): 1.0, (2, 0): 2.0, (3, 0): 4.0}, [0, 1]), 7, 1.0)
    restored = TaskRecords(["c", "a"], window=2)
    restored.restore(json.loads(json.dumps(records.state())))
    assert restored.episodes.tolist() == [0, 3]
    assert list(restored.recent[1]) == [2.0, 4.0]


def reporter(tmp_path, records, suite, conflict=None):
    status = Status(tmp_path / "status", 1, 1, 0, len(suite.task_names), create=True)
    return Reporter(suite, records, status, Counters(), conflict or Conflict(suite.task_names, 1, 2.0, 0))


def test_a_task_without_a_game_has_no_score(tmp_path):
    suite = load_suite("toy", ["catch", "memory"])
    records = TaskRecords(suite.task_names, window=10)
    records.add(batch_with({(1, 0): 1.0}, [0, 1]), 7, 1.0)
    record = reporter(tmp_path, records, suite).record(1e-3, 0)
    assert record["tasks"]["catch"]["normalised_percent"] == 100
    assert "return_mean" not in record["tasks"]["memory"]
    assert record["tasks"]["memory"]["episodes"] == 0
    assert "mean_normalised_percent" not in record, "a mean over some tasks is no mean"
    json.dumps(record, allow_nan=False)
    assert "memory -" in plain_line(record, 100)
    assert not any("memory" in tag and "return" in tag for tag, _ in scalars(record))


def test_the_line_tells_of_other_machines(tmp_path):
    suite = load_suite("toy")
    record = reporter(tmp_path, TaskRecords(suite.task_names, 100), suite).record(0.1, 0)
    remote = {"machines": 2, "actors": 16, "unrolls_lost": 1200, "unrolls_refused": 1, "refused": {"size": 2}}
    line = plain_line(record | {"remote": remote}, 100)
    assert "waiting for unrolls of the actors | 16 actors on 2 other machines | 1,200 unrolls lost | 3 messages refused" in line
    assert plain_line(record | {"remote": remote, "frames_per_second": 5.0}, 100).count("16 actors on 2 other machines") == 1
    assert "other machines" not in plain_line(record, 100)


def test_the_line_tells_samples_from_steps_where_they_are_reused(tmp_path):
    suite = load_suite("toy")
    record = reporter(tmp_path, TaskRecords(suite.task_names, 100), suite).record(0.1, 0)
    record |= {"frames_per_second": 400.0, "steps_per_second": 100.0, "samples_per_second": 300.0}
    assert "400 frames/s | 300 samples/s learned | " in plain_line(record, 100)
    assert "samples" not in plain_line(record | {"samples_per_second": 100.0}, 100)


def test_a_warning_is_printed_once(tmp_path, capsys):
    suite = load_suite("toy")
    record = reporter(tmp_path, TaskRecords(suite.task_names, 100), suite).record(0.1, 0)
    display = Display(tmp_path, 100)
    for alive in (None, 77, 70):
        warning = {} if alive is None else {"warning": f"units die: 148 of 256 of layer hidden were alive, now {alive}"}
        with (tmp_path / "metrics.jsonl").open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(record | warning) + "\n")
        display._read = 0.0
        display.update()
    display.close()
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("warning")] == [
        "warning: units die: 148 of 256 of layer hidden were alive, now 77"
    ]


def test_speed_and_share_per_task(tmp_path):
    suite = load_suite("toy", ["catch", "memory"])
    records = TaskRecords(suite.task_names, window=10)
    making = reporter(tmp_path, records, suite)
    records.add(batch_with({}, [0, 0, 0, 1]), 7, 1.0)
    tasks = making.record(1e-3, 0)["tasks"]
    assert tasks["catch"]["share"] == 0.75
    assert tasks["catch"]["frames_per_second"] == pytest.approx(3 * tasks["memory"]["frames_per_second"])


def test_sample_age_per_task(tmp_path):
    suite = load_suite("toy", ["catch", "memory", "instruction"])
    making = reporter(tmp_path, TaskRecords(suite.task_names, window=10), suite)
    result = {"task_sums": 0.0, "last_sums": 0.0, "samples": 8.0, "loss": 1.0, "gradient_norm": 1.0}
    for versions, tasks in (([3, 5, 6], [0, 1, 0]), ([1, 7, 7], [1, 1, 0])):
        arrays = batch_with({}, tasks)
        arrays["version"][:] = versions
        making.add(arrays, result, 10, 0.1)
        arrays["task"][:] = 2  # the batch's memory is used again
    record = making.record(1e-3, 0)
    means = [numbers.get("sample_age_versions_mean") for numbers in record["tasks"].values()]
    assert means == [pytest.approx((7 + 4 + 3) / 3), pytest.approx((5 + 9 + 3) / 3), None]
    assert "sample_age_versions_mean" not in making.record(1e-3, 0)["tasks"]["catch"]


def test_conflict_between_tasks_is_reported_once_it_was_measured(tmp_path):
    suite = load_suite("toy", ["catch", "memory", "instruction"])
    conflict = Conflict(suite.task_names, 1, 100.0, 0)
    making = reporter(tmp_path, TaskRecords(suite.task_names, window=10), suite, conflict)
    before = making.record(1e-3, 0)
    assert "gradient_cosines" not in before
    assert "gradient_norm" not in before["tasks"]["catch"]
    conflict.add(Gradients([0, 2], np.array([3.0, 5.0]), np.array([[1.0, -0.5], [-0.5, 1.0]])), 1, 0.5)
    conflict.worked(50.0)
    record = making.record(1e-3, 0)
    assert record["gradient_cosines"] == {
        "tasks": ["catch", "instruction"],
        "matrix": [[1.0, -0.5], [-0.5, 1.0]],
        "share_negative": 1.0,
        "measurements": 1,
        "cost_percent": 1.0,
    }
    assert [numbers.get("gradient_norm") for numbers in record["tasks"].values()] == [3.0, None, 5.0]
    tags = dict(scalars(record))
    assert (tags["gradient_cosines/share_negative"], tags["gradient_cosines/cost_percent"]) == (1.0, 1.0)
    assert tags["gradient_norm/catch"] == 3.0


def test_only_finite_numbers_reach_tensorboard():
    record = {"frames": 1, "loss": float("nan"), "kl": float("inf"), "limited_by": "learner", "tasks": {"a": {"entropy": 0.5}}}
    assert dict(scalars(record)) == {"frames": 1, "entropy/a": 0.5}


def test_nan_is_no_json(tmp_path):
    stream = Lines(tmp_path / "x.jsonl")
    with pytest.raises(ValueError, match="JSON"):
        stream.write({"loss": float("nan")})


def test_resume_cuts_what_the_checkpoint_does_not_know(tmp_path):
    path = tmp_path / "x.jsonl"
    whole = b'{"frames": 1}\n{"frames": 2, "name": "caf\xc3\xa9"}\n'
    path.write_bytes(whole + b'{"frames": 3}\n{"frames": 2}\n{"fra')
    assert Lines(path, "frames", 2).dropped == 3
    assert path.read_bytes() == whole


def test_reading_while_it_is_written(tmp_path):
    path = tmp_path / "x.jsonl"
    assert last_line(path) is None
    assert list(read_lines(path)) == []
    path.write_bytes(b'{"a": 1}\n{"a": 2}\n{"a"')
    assert last_line(path) == {"a": 2}
    assert list(read_lines(path)) == [{"a": 1}, {"a": 2}]
    path.write_bytes(b'{"a": 1}\n{"a"\n{"a": 2}\n')
    with pytest.raises(ValueError, match=r"line 2 of .*x\.jsonl"):
        list(read_lines(path))


def test_durations():
    assert [duration(s) for s in (5, 125, 7500, 270_000)] == ["0 min 05 s", "2 min 05 s", "2 h 05 min", "3 d 03 h"]
