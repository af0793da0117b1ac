"""Games that were played are kept and not played again; runs that still train are scored without being disturbed."""

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from agent import checkpoint
from eval import evaluations, rollouts, score
from eval.episodes import read_columns
from eval_runs import TINY, fake_run, save_checkpoint, start_run
from launch.config import RunFiles, load_config
from tasks.registry import load_suite


@pytest.fixture
def trained(tmp_path: Path) -> tuple[Path, RunFiles]:
    run = start_run(tmp_path / "run", load_config("toy", None, TINY))
    save_checkpoint(tmp_path / "run", run, 1000)
    return tmp_path / "run", run


def play(folder: Path, run: RunFiles, episodes: int, num_envs: int = 4) -> evaluations.Played:
    return evaluations.play(folder, run, run.suite, episodes, num_envs, 0, "test")


def stored(folder: Path) -> Path:
    (file,) = (folder / "evaluations").iterdir()
    return file


def test_finished_games_are_not_played_again_and_only_appended(trained: tuple[Path, RunFiles]) -> None:
    folder, run = trained
    first = play(folder, run, 3)
    before = stored(folder).read_bytes()
    assert before.count(b"\n") == 12
    more = play(folder, run, 5, num_envs=1)
    after = stored(folder).read_bytes()
    assert after.startswith(before) and after.count(b"\n") == 20
    assert {task: values[:3].tolist() for task, values in more.returns.items()} == {
        task: values.tolist() for task, values in first.returns.items()
    }
    # What stands in the file is believed: nothing was played a second time.
    marked = json.loads(before.splitlines()[0])
    stored(folder).write_bytes(after.replace(before.splitlines()[0], json.dumps({**marked, "return": 77.0}).encode()))
    assert play(folder, run, 5).returns[marked["task"]][marked["game"]] == 77.0
    assert stored(folder).read_bytes().count(b"\n") == 20


@pytest.mark.parametrize("cut", [1, 10, 40])
def test_a_torn_line_is_a_game_to_play_again(trained: tuple[Path, RunFiles], cut: int) -> None:
    folder, run = trained
    whole = play(folder, run, 3)
    content = stored(folder).read_bytes()
    stored(folder).write_bytes(content[:-cut])
    again = play(folder, run, 3)
    assert {t: v.tolist() for t, v in again.returns.items()} == {t: v.tolist() for t, v in whole.returns.items()}
    assert again.frames == whole.frames
    rows = []
    for line in stored(folder).read_bytes().splitlines():
        try:
            rows.append(json.loads(line))
        except ValueError:
            continue
    assert len({(row["task"], row["game"]) for row in rows}) == 12


def test_an_interrupted_evaluation_goes_on_where_it_stopped(
    trained: tuple[Path, RunFiles], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, _ = trained
    real, count = rollouts.advance, 0

    def interrupted(*arguments: Any) -> None:
        nonlocal count
        count += 1
        if count > 60:
            raise KeyboardInterrupt
        real(*arguments)

    monkeypatch.setattr(rollouts, "advance", interrupted)
    assert score.main([str(folder), "--episodes", "30"]) == 130
    assert "finished games are kept" in capsys.readouterr().err
    done = stored(folder).read_bytes().count(b"\n")
    assert 0 < done < 120
    monkeypatch.setattr(rollouts, "advance", real)
    assert score.main([str(folder), "--episodes", "30"]) == 0
    assert stored(folder).read_bytes().count(b"\n") == 120


def test_other_parameters_split_and_seed_have_files_of_their_own(trained: tuple[Path, RunFiles]) -> None:
    folder, run = trained
    play(folder, run, 1)
    evaluations.play(folder, run, run.suite, 1, 1, 5, "train")
    save_checkpoint(folder, run, 2000)
    play(folder, run, 1)
    assert len(list((folder / "evaluations").iterdir())) == 3


def test_a_folder_that_cannot_be_written_is_scored_all_the_same(
    trained: tuple[Path, RunFiles], capsys: pytest.CaptureFixture[str]
) -> None:
    folder, run = trained
    (folder / "evaluations").write_text("a file where the folder should be")
    assert len(play(folder, run, 2).returns["catch"]) == 2
    assert "finished games are not kept" in capsys.readouterr().err


def test_a_checkpoint_replaced_while_it_is_looked_for(trained: tuple[Path, RunFiles], monkeypatch: pytest.MonkeyPatch) -> None:
    folder, run = trained
    real, looked = checkpoint.find, []

    def find(path: Path) -> Path:
        found = real(path)
        if not looked and path == folder:  # between the look and the reading the run saves, and removes the old one
            looked.append(found)
            save_checkpoint(folder, run, 2000, keep=1)
        return found

    monkeypatch.setattr(checkpoint, "find", find)
    file, content = evaluations.load_checkpoint(folder, None)
    assert looked and not looked[0].exists()
    assert content["counters"]["frames"] == 2000 and file.name.endswith("2000.pt")


def test_a_run_that_is_being_written_is_scored(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = fake_run(tmp_path / "run", {task: [1.0] * 50 for task in load_suite("toy").task_names})
    files = [folder / "episodes.jsonl", folder / "metrics.jsonl"]
    line = (json.dumps({"task": "catch", "return": 1.0, "frames": 4, "total_frames": 9999, "seconds": 9.0}) + "\n").encode()
    record = (json.dumps({"frames": 9999, "seconds": 9.0, "frames_per_second": 100.0, "tasks": {}}) + "\n").encode()
    stop = threading.Event()

    def train() -> None:
        with files[0].open("ab", buffering=0) as episodes, files[1].open("ab", buffering=0) as metrics:
            while not stop.is_set():
                for stream, text in ((episodes, line), (metrics, record)):
                    stream.write(text[:20])
                    stream.write(text[20:])
                stop.wait(0.001)

    writer = threading.Thread(target=train)
    writer.start()
    try:
        for _ in range(3):
            assert score.main([str(folder)]) == 0
    finally:
        stop.set()
        writer.join()
    capsys.readouterr()
    assert sorted(path.name for path in folder.iterdir()) == [
        "config.yaml", "episodes.jsonl", "metrics.jsonl", "resolved.yaml"
    ]  # fmt: skip


def test_lines_are_read_alike_whatever_the_size_of_a_chunk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    suite = load_suite("toy")
    returns = {task: [float(i * j) for i in range(40)] for j, task in enumerate(suite.task_names)}
    path = fake_run(tmp_path / "run", returns) / "episodes.jsonl"
    whole = read_columns(path, suite)
    monkeypatch.setattr("eval.episodes.CHUNK_BYTES", 100)
    pieces = read_columns(path, suite)
    for task in suite.task_names:
        assert whole[task].returns.tolist() == pieces[task].returns.tolist() == returns[task]
        assert whole[task].total_frames.tolist() == pieces[task].total_frames.tolist()


def test_evaluation_leaves_one_thread_to_the_run(trained: tuple[Path, RunFiles]) -> None:
    folder, run = trained
    torch.set_num_threads(2)
    play(folder, run, 1)
    assert torch.get_num_threads() == 1
