"""The command eval/score.py: exit codes, what the terminal shows, and report.json."""

import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from eval import metrics, score
from eval_runs import TINY, main, read_report, save_checkpoint, start_run
from launch.config import load_config

ROOT = Path(__file__).parent.parent
TOY_RETURNS = {"catch": [1, -1], "memory": [1], "instruction": [5, 0], "large_rewards": [-36.4736]}


def command(*arguments: str | Path, locale: str = "C.UTF-8") -> subprocess.CompletedProcess[str]:
    """The command as a user runs it, with its output into a pipe."""
    call = [sys.executable, "eval/score.py", *map(str, arguments)]
    environment = {**os.environ, "LC_ALL": locale, "FORCE_COLOR": "", "COLUMNS": "40"}
    return subprocess.run(call, cwd=ROOT, env=environment, capture_output=True, encoding="utf-8", check=False)


def write_returns(folder: Path, content: dict[str, Any]) -> Path:
    path = folder / "returns.json"
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


def known(score: dict[str, Any]) -> dict[str, Any]:
    """The names of a task's score that do not need an interval or a baseline."""
    return {name: score[name] for name in ("n", "raw_mean", "hns", "capped")}


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the toy suite as it looks while it trains: two checkpoints of fresh networks, 7 episodes a task."""
    folder = tmp_path_factory.mktemp("run")
    run = start_run(folder, load_config("toy", None, TINY))
    for frames in (1000, 2000):
        save_checkpoint(folder, run, frames)
    lines = [
        json.dumps({"task": task, "return": i - 1.0, "frames": 4, "steps": 4, "total_frames": 16 * (i + 1)})
        for i in range(7)
        for task in run.suite.task_names
    ]
    (folder / "episodes.jsonl").write_text("\n".join(lines) + '\n{"task": "catch", "ret', encoding="utf-8")
    return folder


def test_a_file_of_returns_is_scored(tmp_path: Path) -> None:
    done = command(write_returns(tmp_path, TOY_RETURNS), "--suite", "toy", "--out", tmp_path / "new" / "folder")
    assert (done.returncode, done.stderr) == (0, "")
    for text in ("score table", "exact", "split", "unstated", "after averaging over episodes", "large_rewards"):
        assert text in done.stdout
    assert re.search(r"^mean_capped +42\.71 %$", done.stdout, re.MULTILINE)
    assert "\x1b" not in done.stdout
    report = read_report(tmp_path / "new" / "folder")
    assert known(report["tasks"]["catch"]) == {"n": 2, "raw_mean": 0.0, "hns": 37.5, "capped": 37.5}
    assert known(report["tasks"]["memory"]) == {"n": 1, "raw_mean": 1.0, "hns": 100.0, "capped": 100.0}
    assert report["aggregates"]["mean_capped"]["value"] == pytest.approx((37.5 + 100 + 100 / 3 + 0) / 4)
    assert set(report["aggregates"]) == set(metrics.AGGREGATES)
    assert report["identity"]["suite"] == "toy" and report["identity"]["score_table"] == "exact"
    assert report["budget"]["frames"] is None


def test_a_missing_task_refuses_the_aggregate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    some = {task: values for task, values in TOY_RETURNS.items() if task != "memory"}
    code, out, err = main(capsys, write_returns(tmp_path, some), "--suite", "toy", "--out", tmp_path)
    assert (code, err) == (1, "")
    assert "no aggregate: 1 of 4 tasks have no episode: memory" in out
    assert "catch" in out and "mean_capped" not in out
    report = read_report(tmp_path)
    assert known(report["tasks"]["memory"]) == {"n": 0, "raw_mean": None, "hns": None, "capped": None}
    assert report["aggregates"]["iqm"] == {"value": None, "low": None, "high": None}
    assert report["missing"] == ["memory"]


def test_nonsense_is_exit_code_2_and_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = main(capsys, write_returns(tmp_path, {"cach": [1.0]}), "--suite", "toy")
    assert (code, out) == (2, "")
    assert err.count("\n") == 1 and "'cach'" in err and "catch" in err


def test_unscored_tasks_have_no_aggregate_and_that_is_no_error(tmp_path: Path) -> None:
    suite = tmp_path / "mine.yaml"
    suite.write_text(
        "name: mine\ntasks:\n  - {name: café, env: 'm:f'}\n  - {name: known, env: 'm:f', random_score: 0, human_score: 10}\n",
        encoding="utf-8",
    )
    returns = write_returns(tmp_path, {"café": [3.0], "known": [5.0]})
    done = command(returns, "--suite", suite, "--out", tmp_path, locale="C")
    assert (done.returncode, done.stderr) == (0, "")
    assert "no aggregate: 1 task has no scores: café" in done.stdout
    row = next(line for line in done.stdout.splitlines() if "│ café" in line)
    assert row.replace(" ", "") == "│café│1│3.00│-│-│-│"
    report = read_report(tmp_path)
    assert known(report["tasks"]["café"]) == {"n": 1, "raw_mean": 3.0, "hns": None, "capped": None}
    assert report["tasks"]["known"]["hns"] == 50.0
    assert report["unscored"] == ["café"]
    assert "mean_capped" not in done.stdout
    assert {aggregate["value"] for aggregate in report["aggregates"].values()} == {None}


def test_a_run_is_scored_by_its_last_training_episodes(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = main(capsys, run_dir, "--last", "3", "--out", tmp_path)
    report = read_report(tmp_path)
    assert code == 0
    assert report["tasks"]["catch"]["n"] == 3 and report["tasks"]["catch"]["raw_mean"] == 4.0
    assert report["budget"]["frames"] == 16 * 7 and report["budget"]["tasks"]["catch"]["frames"] == 28
    assert report["identity"]["split"] == "train"
    assert "last 3 training episodes" in out
    main(capsys, run_dir, "--out", tmp_path)
    assert read_report(tmp_path)["tasks"]["catch"]["n"] == 7


def test_games_are_played_with_a_checkpoint_whatever_the_number_of_environments(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reports = []
    for num_envs in ("1", "8"):
        shutil.rmtree(run_dir / "evaluations", ignore_errors=True)  # or the second time nothing would be played
        code, out, _ = main(capsys, run_dir, "--episodes", "6", "--num-envs", num_envs, "--out", tmp_path)
        assert code == 0 and "sampled" in out and "6 whole games of each task" in out
        reports.append(read_report(tmp_path))
    assert reports[0] == reports[1]
    texts = [out, *((tmp_path / f"report.{ending}").read_text(encoding="utf-8") for ending in ("md", "html"))]
    for text in texts:
        assert "catch 3, memory " in text  # the action set
        assert f"checkpoint checkpoint-000000000002000.pt, parameters {reports[0]['identity']['parameter_hash']}" in text
        assert ": seed 0, 2,000 frames" in text
    identity, tasks = reports[0]["identity"], reports[0]["tasks"]
    assert {score["n"] for score in tasks.values()} == {6}
    assert reports[0]["budget"]["frames"] == 2000 and reports[0]["budget"]["tasks"]["catch"]["frames"] == 500
    assert identity["checkpoint"].endswith("checkpoint-000000000002000.pt") and identity["split"] == "test"
    older = run_dir / "checkpoints" / "checkpoint-000000000001000.pt"
    main(capsys, run_dir, "--episodes", "6", "--checkpoint", older, "--seed", "5", "--split", "train", "--out", tmp_path)
    report = read_report(tmp_path)
    assert report["budget"]["frames"] == 1000
    assert report["identity"]["split"] == "train" and report["identity"]["seed"] == 5
    assert report["identity"]["parameter_hash"] != identity["parameter_hash"]
    assert report["tasks"] != tasks


def test_code_that_a_run_folder_names_is_not_run_unless_the_user_says_so(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As somebody else's folder might."""
    run_dir = shutil.copytree(run_dir, tmp_path / "theirs")
    (tmp_path / "evil_worlds.py").write_text("from pathlib import Path\nPath(__file__ + '.ran').touch()\n", encoding="utf-8")
    resolved = yaml.safe_load((run_dir / "resolved.yaml").read_text(encoding="utf-8"))
    resolved["suite"] |= {"adapter": "custom", "import_path": str(tmp_path)}
    for task in resolved["suite"]["tasks"]:
        task |= {"train_level": "evil_worlds:make", "test_level": "evil_worlds:make"}
    (run_dir / "resolved.yaml").write_text(yaml.safe_dump(resolved), encoding="utf-8")
    ran = tmp_path / "evil_worlds.py.ran"
    assert main(capsys, run_dir)[0] == 0
    code, _, err = main(capsys, run_dir, "--episodes", "1")
    assert code == 2 and f"evil_worlds:make in {tmp_path}" in err and "add --trust" in err
    assert not ran.exists()
    code, _, err = main(capsys, run_dir, "--episodes", "1", "--trust")
    assert code == 2 and "evil_worlds has no make" in err
    assert ran.exists(), "the test shows nothing if nothing could run"


def test_another_score_table_changes_the_report_and_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    run.mkdir()
    start_run(run, dataclasses.replace(load_config("atari57", None, []), tasks=["video_pinball"]))
    line = {"task": "video_pinball", "return": 17667.9, "frames": 4, "total_frames": 4}
    (run / "episodes.jsonl").write_text(json.dumps(line) + "\n" + json.dumps({**line, "return": 0.0}) + "\n", "utf-8")
    hns = {}
    for table in ("dqn_zoo", "agent57"):
        code, out, _ = main(capsys, run, "--score-table", table, "--out", tmp_path)
        assert code == 0 and table in out and "impala" in out
        report = read_report(tmp_path)
        assert report["identity"]["score_table"] == table
        assert report["identity"]["environment"]["action_repeat"] == report["identity"]["frames_per_step"] == 4
        hns[table] = report["tasks"]["video_pinball"]["hns"]
    assert hns["agent57"] == pytest.approx(50.0) and hns["dqn_zoo"] < -400


def test_a_run_without_an_episode_yet_lists_all_tasks_as_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    start_run(tmp_path, load_config("toy", None, []))
    code, out, err = main(capsys, tmp_path)
    assert (code, err) == (1, "")
    assert "no aggregate: 4 of 4 tasks have no episode: catch, memory, instruction, large_rewards" in out
    code, _, err = main(capsys, tmp_path, "--episodes", "1")
    assert code == 2 and "no checkpoint in" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "nowhere does not exist"),
        (["empty"], "empty is no run folder"),
        (["run", "--split", "test"], "--split does not apply to .*run: it needs --episodes"),
        (["run", "--checkpoint", "x"], "--checkpoint does not apply to .*run: it needs --episodes"),
        (["run", "--episodes", "1", "--last", "5"], "--last does not apply to .*run: games are played"),
        (["run", "--suite", "toy"], "--suite does not apply to .*run: a run says its suite"),
        pytest.param(
            ["run", "--episodes", "1", "--device", "cuda"],
            "--device cuda cannot be used",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU"),
        ),
        (["run", "--episodes", "1", "--seed", "-1"], "seed: -1 is no seed"),
        (["run", "--score-table", "exakt"], "exakt"),
        (["returns.json"], "returns.json does not say its suite"),
        (["returns.json", "--suite", "toi"], "there is no suite 'toi'"),
        (["returns.json", "--suite", "toy", "--episodes", "1"], "--episodes does not apply to .*returns.json"),
    ],
)
def test_what_is_wrong_is_named(
    run_dir: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "run").symlink_to(run_dir)
    write_returns(tmp_path, TOY_RETURNS)
    code, out, err = main(capsys, *arguments)
    assert (code, out) == (2, "")
    assert re.search(message, err), err


@pytest.mark.parametrize("flag", ["--episodes", "--last", "--num-envs"])
def test_counts_below_one_are_refused(run_dir: Path, capsys: pytest.CaptureFixture[str], flag: str) -> None:
    with pytest.raises(SystemExit) as stop:
        score.main([str(run_dir), flag, "0"])
    assert stop.value.code == 2
    assert flag in capsys.readouterr().err


def test_files_are_written_although_nobody_reads_the_terminal(tmp_path: Path) -> None:
    returns = write_returns(tmp_path, TOY_RETURNS)
    call = [sys.executable, "eval/score.py", str(returns), "--suite", "toy", "--out", str(tmp_path / "out")]
    reading, writing = os.pipe()
    os.close(reading)
    subprocess.run(call, cwd=ROOT, stdout=writing, stderr=subprocess.DEVNULL, check=False)
    os.close(writing)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "report.csv", "report.html", "report.json", "report.md"
    ]  # fmt: skip
