"""Curves of a run and the page that shows them: right values, one file, nothing from the network, readable by all."""

import json
import re
import time
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from eval import curves, score
from eval.episodes import Columns, read_columns
from eval_runs import fake_run
from tasks.registry import load_suite

TOY = load_suite("toy")


def record(updates: int, **more: Any) -> dict[str, Any]:
    tasks = {
        task: {
            "frames": 100 * updates,
            "share": 0.25,
            "entropy": updates / 10,
            "gradient_norm": 2.0,
            "sample_age_versions_mean": 7.5,
            "policy_gradient_loss": -0.5,
        }
        for task in TOY.task_names
    }
    return {
        "frames": 400 * updates, "updates": updates, "seconds": 2.0 * updates, "frames_per_second": 200.0,
        "sample_age_versions_mean": 5.0, "tasks": tasks, **more,
    }  # fmt: skip


COSINES = {
    "tasks": ["catch", "memory"],
    "matrix": [[1.0, -0.25], [-0.25, None]],
    "share_negative": 1.0,
    "measurements": 7,
    "cost_percent": 1.2,
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`memory` was learned and half forgotten; gradients were measured."""
    folder = tmp_path_factory.mktemp("page") / "run"
    learned = np.concatenate([np.linspace(0, 1, 300), np.full(200, 1.0), np.linspace(1, 0.5, 100), np.full(400, 0.5)])
    returns = {"catch": [0.2] * 1000, "memory": learned.tolist(), "instruction": [2.0] * 1000, "large_rewards": [50.0] * 1000}
    records = [record(i) for i in range(1, 21)] + [record(21, gradient_cosines=COSINES)]
    return fake_run(folder, returns, records=records)


def read(run: Path) -> curves.RunCurves:
    return curves.read_curves(run, TOY, read_columns(run / "episodes.jsonl", TOY))


def test_forgetting_is_best_so_far_minus_now(run: Path) -> None:
    found = read(run)
    assert curves.forgetting(found.tasks["memory"], TOY, "memory") == pytest.approx(50.0)
    assert curves.forgetting(found.tasks["catch"], TOY, "catch") == pytest.approx(0.0, abs=1e-9)


def test_a_point_of_a_curve_is_the_mean_of_the_games_before_it(run: Path) -> None:
    columns = read_columns(run / "episodes.jsonl", TOY)["memory"]
    curve = curves.task_curve(columns)
    for frames, value in zip(curve.task_frames[::20], curve.returns[::20], strict=True):
        last = int(frames) // 4
        assert value == pytest.approx(columns.returns[last - 100 : last].mean())
    assert curve.task_frames[-1] == 4000 and curve.total_frames[-1] > curve.task_frames[-1]
    few = curves.task_curve(Columns(columns.returns[:5], columns.frames[:5], columns.total_frames[:5], columns.seconds[:5]))
    assert few.returns.tolist() == pytest.approx(columns.returns[:5].tolist())
    none = curves.task_curve(Columns())
    assert none.best is None and not none.returns.size


def test_the_mean_curve_is_of_capped_scores_over_all_tasks(run: Path) -> None:
    found = read(run)
    now = [min(100.0, TOY.normalise(task, curve.now or 0.0)) for task, curve in found.tasks.items()]
    assert found.mean_capped[-1] == pytest.approx(np.mean(now))
    columns = read_columns(run / "episodes.jsonl", TOY)
    middle = int(np.argmin(np.abs(found.mean_frames - 0.58 * found.mean_frames[-1])))  # while `memory` falls
    scores = []
    for task, column in columns.items():
        finished = int((column.total_frames <= found.mean_frames[middle]).sum())
        scores.append(min(100.0, TOY.normalise(task, float(column.returns[finished - 100 : finished].mean()))))
    assert found.mean_capped[middle] == pytest.approx(np.mean(scores))
    assert found.mean_seconds[-1] == pytest.approx(found.mean_frames[-1] / 100, rel=0.01)


def test_a_record_being_written_is_left_out_and_a_damaged_one_is_named(run: Path, tmp_path: Path) -> None:
    folder = fake_run(tmp_path / "run", {"catch": [1.0]}, records=[record(1)])
    with (folder / "metrics.jsonl").open("a") as stream:
        stream.write('{"frames": 3')
    assert read(folder).seconds.tolist() == [2.0]
    with (folder / "metrics.jsonl").open("a") as stream:
        stream.write("\n{}\n")
    with pytest.raises(ValueError, match=r"line 2 of .*metrics\.jsonl is damaged"):
        read(folder)


def test_the_page_is_one_file_that_everybody_can_read(run: Path, tmp_path: Path) -> None:
    assert score.main([str(run), "--out", str(tmp_path)]) == 0
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    body = re.sub(r'xmlns(:\w+)?="[^"]*"', "", text)
    assert "<script" not in text and "http" not in body and "@import" not in text
    assert 'name="viewport"' in text and "prefers-color-scheme: dark" in text and "@media print" in text
    pictures = re.findall(r"<figure.*?</figure>", text, re.DOTALL)
    assert len(pictures) == 9
    for picture in pictures:
        assert re.search(r'role="img" aria-label="[^"]{20,}"', picture) and "<figcaption>" in picture
        svg = ElementTree.fromstring(picture[picture.index("<svg") : picture.index("</figure>")])
        assert "viewBox" in svg.attrib and "currentColor" in picture
    ids = re.findall(r'\bid="([^"]+)"', text)
    assert len(ids) == len(set(ids))
    for reference in re.findall(r'(?:xlink:href="#|url\(#)([^")]+)', text):
        assert reference in ids
    for label in ("frames of the whole run, thousands", "wall time of training, seconds", "frames per second",
                  "sample age, updates", "normalised score, percent", "mean capped score, percent"):  # fmt: skip
        assert label in text
    assert "50 % (-50)" in text  # memory now, and what it lost since its best


def test_the_mechanism_is_reported_and_what_was_not_measured_is_null(run: Path, tmp_path: Path) -> None:
    assert score.main([str(run), "--out", str(tmp_path)]) == 0
    report = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    assert report["mechanism"]["gradient_cosines"] == {**COSINES, "runs": 1}
    memory = report["mechanism"]["tasks"]["memory"]
    assert memory["entropy"] == pytest.approx(np.mean(np.arange(12, 22) / 10)) and memory["gradient_norm"] == 2.0
    assert memory["kl_behaviour_target"] is None and memory["sample_age_versions_mean"] == 7.5
    assert report["mechanism"]["sample_age_versions_mean"] == 5.0
    assert report["budget"]["updates"] == 21 and report["budget"]["seconds"] == 42.0
    assert report["budget"]["tasks"]["memory"]["policy_gradient_loss"] == -0.5
    assert report["tasks"]["memory"]["forgetting"] == pytest.approx(50.0)


def test_names_are_escaped(tmp_path: Path) -> None:
    folder = fake_run(tmp_path / "a<b>&c", {task: [1.0, 0.5] for task in TOY.task_names})
    assert score.main([str(folder), "--out", str(tmp_path / "out")]) == 0
    text = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert "a&lt;b&gt;&amp;c" in text and "a<b>" not in text


def test_thirty_levels_three_seeds_a_hundred_games_take_seconds(tmp_path: Path) -> None:
    suite, generator = load_suite("dmlab30"), np.random.default_rng(0)
    runs = []
    for seed in range(3):
        returns = {task: generator.normal(10, 3, 100).tolist() for task in suite.task_names}
        runs.append(str(fake_run(tmp_path / str(seed), returns, f"seed={seed}", suite="dmlab30")))
    began = time.process_time()
    assert score.main([*runs, "--out", str(tmp_path / "out")]) == 0
    assert time.process_time() - began < 10.0  # processor time: the machine may be busy with other things


def test_each_run_is_listed_but_many_of_them_in_the_files_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [str(fake_run(tmp_path / f"r{i}", {task: [1.0, 2.0] for task in TOY.task_names}, f"seed={i}")) for i in range(11)]
    assert score.main([runs[0], "--baseline", *runs[1:], "--out", str(tmp_path / "out")]) == 0
    out = capsys.readouterr().out
    assert f"{runs[0]}: seed 0, 32 frames, games of the training" in out and f"{runs[10]}: seed 10, 32 frames" in out
    assert score.main([*runs, "--out", str(tmp_path / "out")]) == 0
    out = capsys.readouterr().out
    assert "11, listed in the files of --out" in out and "seed 10," not in out
    for ending in ("md", "html"):
        assert f"{runs[10]}: seed 10, 32 frames" in (tmp_path / "out" / f"report.{ending}").read_text(encoding="utf-8")


def test_cosines_of_several_runs_are_their_mean_per_pair(tmp_path: Path) -> None:
    returns = {task: [1.0, 2.0] for task in TOY.task_names}
    other = {
        "tasks": ["memory", "catch", "instruction"],  # another order, and a task more
        "matrix": [[1.0, 0.75, None], [0.75, 1.0, -0.5], [None, -0.5, 1.0]],
        "share_negative": 0.5, "measurements": 1, "cost_percent": 0.8,
    }  # fmt: skip
    runs = [
        fake_run(tmp_path / "a", returns, "seed=1", records=[record(1, gradient_cosines=COSINES)]),
        fake_run(tmp_path / "b", returns, "seed=2", records=[record(1)]),
        fake_run(tmp_path / "c", returns, "seed=3", records=[record(1, gradient_cosines=other)]),
    ]
    out = tmp_path / "out"
    assert score.main([*map(str, runs), "--out", str(out)]) == 0
    found = json.loads((out / "report.json").read_text(encoding="utf-8"))["mechanism"]["gradient_cosines"]
    assert found == {
        "tasks": ["catch", "memory", "instruction"],
        "matrix": [[1.0, 0.25, -0.5], [0.25, 1.0, None], [-0.5, None, 1.0]],
        "share_negative": 0.5, "measurements": 8, "cost_percent": 1.0, "runs": 2,
    }  # fmt: skip
    assert "(8 measurements in 2 runs; 50 percent" in (out / "report.html").read_text(encoding="utf-8")
    assert score.main([str(runs[2]), "--out", str(out)]) == 0
    assert "(1 measurement in 1 run; 50 percent" in (out / "report.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "line",
    [
        '{"seconds": "x", "tasks": []}',
        '{"seconds": "x"}',
        '{"tasks": {"catch": {"entropy": [1]}}}',
        '{"tasks": {"catch": 3}}',
        "[1]",
    ],
)
def test_a_record_of_something_else_is_named(tmp_path: Path, line: str) -> None:
    folder = fake_run(tmp_path / "run", {"catch": [1.0]}, records=[record(1)])
    with (folder / "metrics.jsonl").open("a") as stream:
        stream.write(line + "\n")
    with pytest.raises(ValueError, match=r"line 2 of .*metrics\.jsonl is damaged"):
        read(folder)


@pytest.mark.parametrize("value", ["true", '"3"', "null"])
def test_a_return_that_is_no_number_is_named(tmp_path: Path, value: str) -> None:
    folder = fake_run(tmp_path / "run", {"catch": [1.0, 2.0]})
    path = folder / "episodes.jsonl"
    path.write_text(path.read_text(encoding="utf-8").replace("2.0", value), encoding="utf-8")
    with pytest.raises(ValueError, match=r"line 2 of .*episodes\.jsonl.*remove it"):
        read(folder)


def test_the_readme_names_all_that_is_in_a_report(run: Path, tmp_path: Path) -> None:
    other = fake_run(tmp_path / "other", {task: [1.0, 0.5] for task in TOY.task_names}, "seed=5")
    assert score.main([str(run), "--baseline", str(other), "--out", str(tmp_path / "out")]) == 0
    report = json.loads((tmp_path / "out" / "report.json").read_text(encoding="utf-8"))
    parts = [report, report["identity"], report["identity"]["runs"][0], report["method"], report["change"], report["mechanism"]]
    parts += [report["mechanism"]["gradient_cosines"], report["mechanism"]["tasks"]["catch"], report["tasks"]["catch"]]
    text = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
    names = {name for part in parts for name in part if not name.startswith("baseline_")}
    assert sorted(name for name in names if not re.search(rf"`{name}(\.<\w+>)?`", text)) == []


def test_the_page_shows_what_the_network_is_like(tmp_path: Path) -> None:
    """Live units of a layer that dies, lengths of steps, and how much of the gradient is the value's; old records have none."""
    found = {
        "live_units": {"hidden": 77},
        "units": {"hidden": 256},
        "relative_steps": {"torso.output": 0.0123},
        "value_gradient_share": 0.81,
    }
    returns = {task: [1.0, 0.5] for task in TOY.task_names}
    for name, more, shown in (("new", found, True), ("old", {}, False)):
        folder = fake_run(tmp_path / name, returns, records=[record(1) | more])
        assert score.main([str(folder), "--out", str(tmp_path / f"{name}-out")]) == 0
        html = (tmp_path / f"{name}-out" / "report.html").read_text(encoding="utf-8")
        for text in ("77 of 256", "1.23e-02", "share of the gradient's norm: 81%"):
            assert (text in html) == shown, (name, text)
        report = json.loads((tmp_path / f"{name}-out" / "report.json").read_text(encoding="utf-8"))
        assert (report["mechanism"]["network"] is not None) == shown
