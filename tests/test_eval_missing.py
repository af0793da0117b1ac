"""Tasks without games, and what else must not be said: aggregates over the same tasks on both sides, and true sentences."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from eval import metrics
from eval_runs import TOY, fake_run, games, main, read_report, toy_returns


def test_missing_tasks_are_aggregated_only_when_allowed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    some = {task: values for task, values in toy_returns(1).items() if task != "memory"}
    run = fake_run(tmp_path / "a", some, "seed=1")
    code, out, _ = main(capsys, run, "--out", tmp_path / "out")
    assert code == 1 and "no aggregate: 1 of 4 tasks have no episode: memory" in out
    assert read_report(tmp_path / "out")["aggregates"]["mean_capped"]["value"] is None
    code, out, _ = main(capsys, run, "--allow-missing", "--out", tmp_path / "out")
    assert code == 0 and "aggregates leave out 1 of 4 tasks" in out
    lines = [line for line in out.splitlines() if line.partition(" ")[0] in metrics.AGGREGATES]
    assert len(lines) == 12 and all("(1 of 4 tasks missing)" in line for line in lines)
    report = read_report(tmp_path / "out")
    assert report["missing"] == ["memory"] and report["aggregates"]["mean_capped"]["value"] is not None
    other = fake_run(tmp_path / "b", toy_returns(2), "seed=2")
    code, out, _ = main(capsys, run, "--baseline", other, "--out", tmp_path / "out")
    change = read_report(tmp_path / "out")["change"]
    assert code == 1 and change["mean"] is None and change["lost"] is None


@pytest.mark.parametrize("lacking", ["run", "baseline"])
def test_two_sides_are_aggregated_over_the_tasks_that_both_have(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], lacking: str
) -> None:
    """Else the difference of the means would be that of other tasks, and no change at all could look like one."""
    now = {"catch": 80.0, "memory": 70.0, "instruction": 60.0, "large_rewards": 10.0}
    sides: dict[str, dict[str, list[float]]] = {}
    generator = np.random.default_rng(3)
    for name, shift in (("run", 5.0), ("baseline", 0.0)):
        sides[name] = {task: games(percent + shift, task, generator) for task, percent in now.items()}
    del sides[lacking]["large_rewards"]
    for name, values in sides.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(values), encoding="utf-8")
    arguments = [tmp_path / "run.json", "--suite", "toy", "--baseline", tmp_path / "baseline.json", "--allow-missing"]
    code, out, _ = main(capsys, *arguments, "--out", tmp_path / "out")
    assert code == 0
    said = re.search(r"rises by ([\d.]+) points \(([\d.]+) to ([\d.]+) %\)", out.splitlines()[0])
    assert said is not None
    points, before, after = map(float, said.groups())
    assert points == pytest.approx(after - before, abs=0.011) and 2.0 < points < 8.0
    report = read_report(tmp_path / "out")
    for side, prefix in (("run", ""), ("baseline", "baseline_")):
        mean = np.mean([report["tasks"][task][f"{prefix}capped"] for task in list(now)[:3]])
        assert report[f"{prefix}aggregates"]["mean_capped"]["value"] == pytest.approx(mean), side
        assert report[f"{prefix}aggregates"]["below_25"]["value"] == 0  # large_rewards would be one
    beside = [line for line in out.splitlines() if line.endswith("(1 of 4 tasks missing)")]
    assert len(beside) == len(metrics.AGGREGATES) + 10
    assert "aggregates leave out 1 of 4 tasks: large_rewards" in out
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert page.count("(1 of 4 tasks missing)") == len(metrics.AGGREGATES) + 10
    profiles = [page]
    for name, values in sides.items():
        kept = {task: found for task, found in values.items() if task != "large_rewards"}
        (tmp_path / f"{name}.json").write_text(json.dumps(kept), encoding="utf-8")
    assert main(capsys, *arguments, "--out", tmp_path / "out")[0] == 0
    profiles.append((tmp_path / "out" / "report.html").read_text(encoding="utf-8"))
    first, second = (re.search(r'<figure id="profile">.*?</figure>', text, re.DOTALL) for text in profiles)
    assert first is not None and second is not None and first[0] == second[0], "the profile is over the same tasks, too"


def test_a_task_that_some_runs_lack_is_missing_and_said_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = fake_run(tmp_path / "whole", toy_returns(1), "seed=1")
    gap = fake_run(tmp_path / "gap", {**toy_returns(2), "memory": []}, "seed=2")
    code, out, _ = main(capsys, whole, gap, "--out", tmp_path / "out")
    assert code == 1 and "no aggregate: 1 of 2 runs has no episode of memory" in out
    assert "have no episode" not in out
    code, out, _ = main(capsys, whole, gap, "--allow-missing", "--out", tmp_path / "out")
    assert code == 0 and "aggregates leave out 1 of 4 tasks: memory" in out and "1 of 2 runs has no episode of memory" in out
    report = read_report(tmp_path / "out")
    assert report["missing"] == ["memory"] and report["tasks"]["memory"]["n"] == 60
    others = [report["tasks"][task]["capped"] for task in TOY.task_names if task != "memory"]
    assert report["aggregates"]["mean_capped"]["value"] == pytest.approx(np.mean(others))
    other = fake_run(tmp_path / "other", toy_returns(3), "seed=3")
    code, _, err = main(capsys, other, "--baseline", whole, gap)
    assert code == 2 and "1 of 2 runs has no episode of memory" in err
    code, out, _ = main(capsys, other, "--baseline", whole, gap, "--allow-missing", "--out", tmp_path / "out")
    report = read_report(tmp_path / "out")
    assert code == 0 and report["tasks"]["memory"]["verdict"] is None and report["change"]["mean"] is not None


def test_what_is_not_so_is_not_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No change is not "by 0.00 points", a run is no published number, four single-task runs are not one run."""
    run = fake_run(tmp_path / "run", toy_returns(1), "seed=1")
    file = tmp_path / "returns.json"
    file.write_text(json.dumps(toy_returns(1)), encoding="utf-8")
    _, out, _ = main(capsys, run, "--baseline", file)
    mean = out.splitlines()[0].rpartition(" - ")[2]
    assert re.fullmatch(r"and the mean capped score stays \(([\d.]+) to \1 %\)\.", mean)
    assert "protocol" not in out.partition("note:")[2]
    assert "tasks worse by more than 5 " in out and "tasks better by more than 5 " in out
    empty = fake_run(tmp_path / "empty", dict.fromkeys(TOY.task_names, ()))
    _, out, _ = main(capsys, empty)
    assert "no task has a score" in out and "published" not in out
    singles = [fake_run(tmp_path / t, {t: v}, f"tasks=[{t}]") for t, v in toy_returns(2).items()]
    _, out, _ = main(capsys, *singles)
    assert "each task has one run" in out and "there is one run" not in out
