"""The doctor: holds for what runs, and names what does not."""

import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest
import torch

import standin
from launch import doctor
from launch.config import load_config
from tasks.environment import Probe
from tasks.registry import load_suite

QUIET = ["--suite", "toy", "--tasks", "catch"]


@pytest.fixture(autouse=True)
def torch_as_before() -> Iterator[None]:
    """The doctor sets up its own process for speed: other tests must not notice."""
    threads = torch.get_num_threads()
    yield
    torch.set_flush_denormal(False)
    torch.set_num_threads(threads)


def rows(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, str]]:
    """The exit code, and the line of each check."""
    code = doctor.main(list(arguments))
    found: dict[str, str] = {}
    last = ""
    for line in capsys.readouterr().out.splitlines():
        cells = [cell.strip() for cell in line.split("│")[1:-1]]
        if len(cells) == 3:
            last = cells[0] or last
            found[last] = " ".join(filter(None, [found.get(last, ""), *cells[1:]]))
    return code, found


def test_the_command_on_a_suite_that_runs_here(tmp_path: Path) -> None:
    command = [sys.executable, str(Path(doctor.__file__)), "--suite", "toy"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    for check in (
        "python",
        "torch",
        "numpy",
        "shared memory",
        "disk",
        "open files",
        "learner",
        "catch",
        "memory",
        "large_rewards",
    ):
        assert f"│ {check} " in done.stdout, check
    assert "FAILS" not in done.stdout
    assert list(tmp_path.iterdir()) == [], "it leaves nothing behind"


def test_instructions_and_speed_are_seen(capsys: pytest.CaptureFixture[str]) -> None:
    code, found = rows(capsys, "--suite", "toy")
    assert code == 0
    assert "with an instruction" in found["instruction"] and "no instruction" in found["catch"]
    assert "frames/s on" in found["expected speed"]
    assert "200,000 frames in" in found["expected speed"]


def test_dmlab_without_an_engine_fails_and_says_where_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    if standin.IS_REAL:
        pytest.skip("deepmind_lab is installed here")
    code, found = rows(capsys, "--suite", "dmlab30", "--tasks", "rooms_watermaze")
    assert code == 1
    assert found["suite"].startswith("FAILS suite: dmlab30 needs the package deepmind_lab")
    assert "rooms_watermaze" not in found


def test_dmlab_with_its_engine(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    standin.install(monkeypatch)
    levels = "skymaze_irreversible_path_hard,language_execute_random_task"
    settings = [f"environment.dmlab.level_cache={tmp_path / 'maps'}", "network.torso=shallow"]
    code, found = rows(capsys, "--suite", "dmlab30", "--tasks", levels, "--split", "test", *settings)
    assert code == 0, found
    assert "with an instruction" in found["language_execute_random_task"]
    assert f"ok {tmp_path / 'maps'}" in found["level cache"].replace(" /", "/").replace("ok/", "ok /")
    assert list((tmp_path / "maps").rglob("*.pk3")), "the level was built through the cache"
    code, found = rows(capsys, "--suite", "dmlab30", "--tasks", "psychlab_continuous_recognition")
    assert code == 1 and "need the Brady images" in found["suite"]


@standin.standin_only
def test_a_level_that_ends_its_process_is_a_row(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    standin.install(monkeypatch)
    monkeypatch.setenv("DMLAB_STANDIN_FAULT", "exit@reset:1,level=rooms_watermaze")
    arguments = ["--suite", "dmlab30", "--tasks", "rooms_watermaze,rooms_keys_doors_puzzle", "environment.dmlab.level_cache=''"]
    code, found = rows(capsys, *arguments)
    assert code == 1
    assert found["rooms_watermaze"].startswith("FAILS") and "ended with exit code 1" in found["rooms_watermaze"]
    assert found["rooms_keys_doors_puzzle"].startswith("ok")
    assert "expected speed" not in found, "it would leave a level out"


def test_a_cache_that_cannot_be_written(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("", encoding="utf-8")
    config = load_config("dmlab30", None, [f"environment.dmlab.level_cache={blocked}"])
    assert doctor.level_cache(config).holds is False
    assert doctor.level_cache(load_config("dmlab30", None, ["environment.dmlab.level_cache=''"])).detail.startswith("none")


@pytest.mark.parametrize(
    ("seen", "holds"),
    [(Probe(1.0, 0.001, True), True), (Probe(1.0, 0.001, False), False), (Probe(31.0, 0.001, True), False)],
    ids=["well", "no text", "slow"],
)
def test_what_is_asked_of_a_language_level(seen: Probe, holds: bool) -> None:
    suite = load_suite("dmlab30")
    assert doctor.judge(suite, suite.task("language_execute_random_task"), seen)[0] is holds


def test_a_dead_observation_is_a_row(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    suite = tmp_path / "mine.yaml"
    suite.write_text("{name: mine, tasks: [{name: still, env: 'my_envs:make_black'}]}", encoding="utf-8")
    code, found = rows(capsys, "--suite", str(suite))
    assert code == 1
    assert "did not change in 50 random steps" in found["still"]


def test_packages_outside_of_their_range(monkeypatch: pytest.MonkeyPatch) -> None:
    real = doctor.version

    def version(name: str) -> str:
        if name == "rich":
            raise PackageNotFoundError(name)
        return "1.0" if name == "numpy" else real(name)

    monkeypatch.setattr(doctor, "version", version)
    found = {row.check: row for row in doctor.versions(load_suite("atari5"))}
    assert (found["numpy"].holds, found["rich"].holds, found["torch"].holds, found["ale-py"].holds) == (
        False,
        False,
        True,
        True,
    )
    assert "pip install 'rich" in found["rich"].detail
    assert "pytest" not in found


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--suite", "tyo"], "no suite 'tyo'"),
        (["--suite", "toy", "lerner.threads=1"], "unknown setting lerner.threads"),
        (["--suite", "toy", "--tasks", "cacth"], "no task 'cacth'"),
    ],
)
def test_a_wrong_command_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main(arguments) == 2
    said: Any = capsys.readouterr()
    assert message in said.err and said.out == ""
