"""Comparing through the command: losses are named first, whatever the baseline is, and what cannot be compared is refused."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from eval import score
from eval_runs import DMLAB, TINY, fake_run, games, main, read_report, save_checkpoint, start_run, toy_returns
from launch.config import load_config

FALLEN = {"rooms_watermaze": -40.0, "natlab_fixed_large_map": -25.0, "psychlab_visual_search": -12.0}


@pytest.fixture(scope="module")
def thirty(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Path], list[Path]]:
    """Three seeds of 30 levels and three of a baseline: the mean rises by about 9 points, three levels fall."""
    folder, generator = tmp_path_factory.mktemp("thirty"), np.random.default_rng(1)
    sides: tuple[list[Path], list[Path]] = ([], [])
    for seed in range(3):
        for side, runs in enumerate(sides):
            returns = {
                task: games(50 + (0 if side == 0 else FALLEN.get(task, 13.0)), task, generator) for task in DMLAB.task_names
            }
            runs.append(fake_run(folder / f"{side}-{seed}", returns, f"seed={seed}", "score_table=paper_b1", suite="dmlab30"))
    return sides[1], sides[0]


def test_a_rising_mean_does_not_hide_the_three_tasks_that_fall(
    thirty: tuple[list[Path], list[Path]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs, baseline = thirty
    code, out, err = main(capsys, *runs, "--baseline", *baseline, "--out", tmp_path)
    assert (code, err) == (0, "")
    first = out.splitlines()[0]
    assert first.startswith("3 of 30 tasks are lost, beyond 5 points and beyond chance: rooms_watermaze -")
    names = list(FALLEN)
    assert sorted(names, key=first.index) == names  # worst first
    assert first.index(names[-1]) < first.index("although the mean capped score rises by")
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    sentence = re.search(r'<p class="first alarm">(.*?)</p>', page)
    assert sentence is not None and sentence[1] == first
    assert page.index(sentence[0]) < page.index("<table")
    assert (tmp_path / "report.md").read_text(encoding="utf-8").splitlines()[2] == f"**{first}**"
    report = read_report(tmp_path)
    assert report["change"]["lost"] == 3 and report["change"]["lost_tasks"] == names
    assert report["change"]["mean"] == pytest.approx(9.1, abs=1.0)
    for task in names:
        row = report["tasks"][task]
        assert row["verdict"] == "lost" and row["change_low"] < row["change_capped"] < row["change_high"] < -5
        assert row["change_capped"] == pytest.approx(FALLEN[task], abs=3)
    assert "differences between 3 runs" in out and "the same frames per task" in out
    csv_rows = (tmp_path / "report.csv").read_text(encoding="utf-8").splitlines()
    assert len(csv_rows) == 31 and csv_rows[0].startswith("task,n,runs,raw_mean")


def test_the_published_loss_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = main(
        capsys, "--published", "impala_multitask_deep_pbt", "--baseline", "impala_experts_deep",
        "--score-table", "paper_b1", "--out", tmp_path,
    )  # fmt: skip
    assert code == 0 and out.startswith("7 of 30 tasks are worse by more than 5 points")
    assert "natlab_fixed_large_map -64.8" in out.splitlines()[0]
    report = read_report(tmp_path)
    value = {name: row["value"] for name, row in report["aggregates"].items()}
    before = {name: row["value"] for name, row in report["baseline_aggregates"].items()}
    assert (value["mean_capped"], before["mean_capped"]) == pytest.approx((49.3448, 44.4416), abs=5e-5)
    assert (value["iqm"], before["iqm"]) == pytest.approx((47.99, 45.72), abs=5e-3)
    change = report["change"]
    assert (change["mean"], change["p10"], change["p25"], change["p50"], change["worst_tenth"]) == pytest.approx(
        (4.9032, -22.6553, -2.6877, 5.6337, -40.6161), abs=5e-5
    )
    assert (change["lost"], change["gained"]) == (7, 15)
    assert {row["verdict"] for row in report["tasks"].values()} == {"not tested"}
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert page.count("<tr class=lost>") == 7, "rows stand out although they cannot be tested"


def test_the_published_brain_agent(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, _ = main(capsys, "--published", "brain_agent", "--out", tmp_path)
    value = {name: row["value"] for name, row in read_report(tmp_path)["aggregates"].items()}
    assert code == 0
    assert (value["mean_capped"], value["p10"]) == pytest.approx((91.2497, 74.3290), abs=5e-5)
    assert read_report(tmp_path)["identity"]["score_table"] == "released"


def test_single_task_runs_are_a_baseline_each_for_its_task(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [fake_run(tmp_path / f"multi{seed}", toy_returns(seed, -30), f"seed={seed}") for seed in (1, 2, 3)]
    singles = []
    for seed in (1, 2, 3):
        for task, values in toy_returns(10 + seed).items():
            folder = tmp_path / "single" / f"{task}-{seed}"
            singles.append(fake_run(folder, {task: values}, f"seed={seed}", f"tasks=[{task}]", "actor.num_actors=1"))
    code, out, err = main(capsys, *runs, "--baseline", *singles, "--out", tmp_path / "out")
    assert (code, err) == (0, "")
    assert out.startswith("1 of 4 tasks is lost, beyond 5 points and beyond chance: memory -3")
    report = read_report(tmp_path / "out")
    assert report["baseline_identity"]["kind"] == "single-task runs"
    assert report["tasks"]["memory"]["runs"] == 3 and report["tasks"]["memory"]["baseline_n"] == 180
    assert "same frames per task" in report["budget_comparison"]
    assert report["budget"]["frames"] == report["baseline_budget"]["frames"] == 4 * 60 * 4
    # A folder of run folders stands for all of them.
    again = main(capsys, *runs, "--baseline", tmp_path / "single")
    assert again[1].splitlines()[0] == out.splitlines()[0]
    code, _, err = main(capsys, *runs, "--baseline", *singles[:3])
    assert code == 2 and "1 of 4 tasks have no episode: large_rewards" in err and "--allow-missing" in err
    code, out, _ = main(capsys, *runs, "--baseline", *singles[:3], "--allow-missing")
    assert code == 0 and "of the baseline, 1 of 4 tasks have no episode: large_rewards" in out


def test_other_frames_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = fake_run(tmp_path / "a", toy_returns(1), "seed=1")
    other = fake_run(tmp_path / "b", toy_returns(2), "seed=2", frames=8)
    code, out, _ = main(capsys, run, "--baseline", other)
    assert code == 0 and "another budget: frames per task differ most in" in out and "240 against the baseline's 480" in out


def test_a_file_of_returns_is_a_baseline_and_what_is_not_known_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = fake_run(tmp_path / "a", toy_returns(1, -30), "seed=1")
    file = tmp_path / "returns.json"
    file.write_text(json.dumps(toy_returns(2)), encoding="utf-8")
    code, out, _ = main(capsys, run, "--baseline", file)
    assert code == 0 and out.startswith("1 of 4 tasks is lost") and "memory -" in out.splitlines()[0]
    assert "the baseline's policy is not stated" in out and "cannot be compared: the frames of one side" in out
    assert "episode noise only: there is one run" in out


def test_an_earlier_checkpoint_is_played_with_the_same_games(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = start_run(tmp_path / "run", load_config("toy", None, TINY))
    files = [save_checkpoint(tmp_path / "run", run, frames) for frames in (1000, 2000)]
    code, _, err = main(capsys, tmp_path / "run", "--episodes", "3", "--baseline", files[0], "--out", tmp_path / "out")
    assert (code, err) == (0, "")
    report = read_report(tmp_path / "out")
    assert report["identity"]["parameter_hash"] != report["baseline_identity"]["parameter_hash"]
    assert report["baseline_identity"]["episodes"] == report["identity"]["episodes"]
    assert report["baseline_budget"]["frames"] == 1000 and report["budget"]["frames"] == 2000
    assert "train_minus_test" in report["tasks"]["catch"]
    code, _, err = main(capsys, tmp_path / "run", "--episodes", "3", "--baseline", files[1])
    assert code == 2 and "hold the same parameters" in err and str(files[1]) in err
    code, _, err = main(capsys, tmp_path / "run", "--baseline", files[0])
    assert code == 2 and "is a checkpoint: add --episodes N" in err
    stray = tmp_path / "stray.pt"
    shutil.copy(files[0], stray)
    code, _, err = main(capsys, tmp_path / "run", "--episodes", "3", "--baseline", stray)
    assert code == 2 and "lies in no run folder" in err


@pytest.fixture(scope="module")
def atari(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Runs of one Atari game that differ in one setting each."""
    folder = tmp_path_factory.mktemp("atari")
    settings: dict[str, tuple[str, ...]] = {
        "plain": ("seed=1",),
        "again": ("seed=2",),
        "same_seed": ("seed=1",),
        "wide": ("seed=3", "network.core_size=32"),
        "table": ("seed=4", "score_table=agent57"),
        "protocol": ("seed=5", "environment.atari_protocol=machado"),
        "repeat": ("seed=6", "environment.action_repeat=2"),
        "limit": ("seed=7", "environment.max_episode_frames=18000"),
        "rewards": ("seed=8", "loss.reward_transform=none"),
    }
    for name, overrides in settings.items():
        fake_run(folder / name, {"pong": [1.0, 3.0]}, "tasks=[pong]", *overrides, suite="atari57")
    fake_run(folder / "two", {"pong": [1.0, 3.0], "breakout": [1.0, 2.0]}, "tasks=[pong,breakout]", suite="atari57")
    return {path.name: path for path in folder.iterdir()}


@pytest.mark.parametrize(
    ("name", "difference"),
    [
        ("table", "score table: dqn_zoo against agent57"),
        ("protocol", "protocol: impala against machado"),
        ("repeat", "action repeat: 4 against 2"),
        ("limit", "frame limit: 108000 against 18000"),
    ],
)
def test_what_does_not_mean_the_same_is_compared_by_force_only(
    atari: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, difference: str
) -> None:
    code, out, err = main(capsys, atari["plain"], "--baseline", atari[name])
    assert (code, out) == (2, "") and difference in err and "--force" in err
    code, out, _ = main(capsys, atari["plain"], "--baseline", atari[name], "--force", "--out", tmp_path)
    assert code == 0 and out.startswith("COMPARED BY FORCE") and difference in out.splitlines()[0]
    assert read_report(tmp_path)["forced"] == [difference]
    assert "COMPARED BY FORCE" in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_a_chosen_score_table_scores_both_sides_anew(atari: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = main(capsys, atari["plain"], "--baseline", atari["table"], "--score-table", "dqn_zoo")
    assert code == 0 and "COMPARED BY FORCE" not in out


def test_other_training_is_a_remark(atari: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = main(capsys, atari["plain"], "--baseline", atari["rewards"])
    assert code == 0 and "the sides differ: reward transform: clip against none" in out


def test_several_runs_must_be_seeds_of_one_experiment(atari: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(capsys, atari["plain"], atari["again"])[0] == 0
    for name, difference in (
        ("wide", "network.core_size: 256 against 32"),
        ("protocol", "protocol: impala against machado"),
        ("table", "score table: dqn_zoo against agent57"),
        ("same_seed", "has seed 1 as another run"),
    ):
        code, out, err = main(capsys, atari["plain"], atari[name])
        assert (code, out) == (2, "") and "not seeds of one experiment" in err and difference in err, err
        assert main(capsys, atari["plain"], atari[name], "--force")[0] == 0
    code, _, err = main(capsys, atari["plain"], atari["plain"])
    assert code == 2 and "is named twice" in err
    code, _, err = main(capsys, atari["two"], atari["again"])
    assert code == 2 and "different tasks: breakout, pong against pong" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "nothing to score"),
        (["--baseline", "plain"], "write it before --baseline"),
        (["plain", "--published", "impala_experts_deep"], "are two sources"),
        (["plain", "--baseline", "plain"], "stands on both sides"),
        (["plain", "--baseline", "impala_expert_deep"], "did you mean one of: impala_experts_deep"),
        (["plain", "--baseline", "empty"], "empty is no run folder"),
        (["plain", "--baseline", "again", "nowhere"], "--baseline nowhere is no run folder"),
        (["plain", "--baseline", "toy.json"], "'catch'"),
        (["--published", "impala_experts_dep"], "did you mean one of: impala_experts_deep"),
        (["--published", "impala_experts_deep"], "scores in dmlab30 and atari57: add --suite"),
        (["--published", "brain_agent", "--suite", "atari57"], "no published agent 'brain_agent' for suite atari57"),
        (["--published", "brain_agent", "--baseline", "impala_experts_deep"], "score table: released against paper_b1"),
        (["--published", "brain_agent", "--episodes", "3"], "--episodes does not apply"),
        (["plain", "again", "--episodes", "3", "--checkpoint", "x.pt"], "--checkpoint x.pt is of one run, but 2"),
        (["plain", "toy.json"], "several sources must all be run folders"),
        (["plain", "--force"], "--force does not apply"),
        (["plain", "--margin", "3"], "--margin 3 does not apply"),
        (["plain", "--margin", "0"], "--margin 0 does not apply"),
        (["plain", "again", "--margin", "3"], "--margin 3 does not apply"),
        (["two", "--baseline", "toyrun"], "it has none of the tasks"),
    ],
)
def test_what_is_wrong_is_named(
    atari: dict[str, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    message: str,
) -> None:
    for name, path in atari.items():
        (tmp_path / name).symlink_to(path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "toy.json").write_text('{"catch": [1.0]}', encoding="utf-8")
    fake_run(tmp_path / "toyrun", {"catch": [1.0]}, "tasks=[catch]")
    monkeypatch.chdir(tmp_path)
    code, out, err = main(capsys, *arguments)
    assert (code, out) == (2, ""), err
    assert message in err and err.count("\n") == 1, err


@pytest.mark.parametrize("margin", ["-1", "nan", "inf", "x"])
def test_a_margin_is_a_number_of_points(capsys: pytest.CaptureFixture[str], margin: str) -> None:
    with pytest.raises(SystemExit) as stop:
        score.main(["x", "--baseline", "y", "--margin", margin])
    assert stop.value.code == 2 and "--margin" in capsys.readouterr().err


def test_runs_pooled_by_force_are_said_on_either_side(
    atari: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wide = "network.core_size: 256 against 32"
    for arguments in (
        [atari["plain"], atari["wide"]],
        [atari["plain"], atari["wide"], "--baseline", atari["again"]],
        [atari["again"], "--baseline", atari["plain"], atari["wide"]],
    ):
        code, out, _ = main(capsys, *arguments, "--force", "--out", tmp_path)
        assert code == 0 and out.startswith("POOLED BY FORCE") and wide in out.splitlines()[0]
        assert [text.partition(": ")[2] for text in read_report(tmp_path)["forced"]] == [wide]
        assert f'<p class="first alarm">{out.splitlines()[0]}' in (tmp_path / "report.html").read_text(encoding="utf-8")
    code, out, _ = main(capsys, atari["plain"], atari["wide"], "--baseline", atari["protocol"], "--force", "--out", tmp_path)
    assert out.startswith("COMPARED BY FORCE") and out.splitlines()[1].startswith("POOLED BY FORCE")
    assert len(read_report(tmp_path)["forced"]) == 2
