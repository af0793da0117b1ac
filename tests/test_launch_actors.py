"""A real run whose actors come from another machine: processes killed at both ends, a resume, machines that leave and join."""

import itertools
import json
import re
import signal
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest

import runs
from launch.actors import main
from launch.process import PREFIX, memory_root
from runs import ACTORS, QUICK, assert_nothing_left, lines, pids, send, started, updates, wait_for

PATIENT = 180.0


def workers(folder: Path) -> dict[str, int]:
    return json.loads((folder / "pids.json").read_text(encoding="utf-8"))["workers"]


def trains_on(run_dir: Path, process: Any, more: int = 5) -> int:
    """Wait for so many more updates."""
    goal = updates(run_dir) + more
    return wait_for(lambda: updates(run_dir) >= goal and updates(run_dir), PATIENT, process)


@pytest.fixture(scope="module")
def story(tmp_path_factory):
    """What happened, in notes; each test below looks at one side of it."""
    base = tmp_path_factory.mktemp("remote")
    run_dir, keys = base / "run", base / "keys"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    notes: dict[str, Any] = {"run_dir": run_dir, "base": base, "address": address}
    join = ("--connect", address, "--keys", str(keys))
    with started("--suite", "toy", "--run-dir", str(run_dir), "--total-frames", "1e9", "--listen", address,
                 "remote.only=true", *QUICK) as run:  # fmt: skip
        wait_for(lambda: (run_dir / "keys" / "run.key").exists(), PATIENT, run)
        keys.mkdir()
        for name in ("run.key", "actors.key_secret"):  # what the command told to copy
            (keys / name).write_bytes((run_dir / "keys" / name).read_bytes())
        first = subprocess.Popen(
            runs.command(*join, "--actors", "2", "--folder", str(base / "first"), script=ACTORS),
            stdout=subprocess.PIPE,
            text=True,
        )
        trains_on(run_dir, run)
        actors = {name: pid for name, pid in workers(base / "first").items() if name.startswith("actor")}
        for pid in (workers(base / "first")["relay"], pids(run_dir)["workers"]["listener"]):
            assert send(pid, signal.SIGKILL)
        wait_for(lambda: lines(run_dir / "metrics.jsonl")[-1]["actor_restarts"] >= 1, PATIENT, run)
        trains_on(run_dir, run)
        run.send_signal(signal.SIGINT)
        notes["first_output"], _ = run.communicate(timeout=PATIENT)
        notes["codes"] = [run.returncode]
    with started("--resume", str(run_dir), "learner.batch_size=4", "log.every_seconds=0.3") as run:
        trains_on(run_dir, run)
        still = {name: pid for name, pid in workers(base / "first").items() if name.startswith("actor")}
        notes["same_actors"] = actors == still
        first.kill()
        notes["said"], _ = first.communicate(timeout=PATIENT)
        wait_for(lambda: runs.roles_of(base / "first") == [], PATIENT)
        with started(*join, "--actors", "1", "--folder", str(base / "second"), script=ACTORS) as second:
            number = 10_002  # the first actor of the second machine

            def played() -> bool:
                return any(game["actor"] >= number for game in lines(run_dir / "episodes.jsonl"))

            wait_for(played, PATIENT, run)
            notes["metrics"] = lines(run_dir / "metrics.jsonl")[-1]
            notes["second_pid"] = second.pid
            second.send_signal(signal.SIGINT)
            second.communicate(timeout=PATIENT)
            notes["codes"].append(second.returncode)
        run.send_signal(signal.SIGINT)
        run.communicate(timeout=PATIENT)
        notes["codes"].append(run.returncode)
        notes["run_pid"] = run.pid
    return notes


def test_the_command_says_what_to_copy(story):
    assert re.search(rf"copy {story['run_dir']}/keys/run.key and .*actors.key_secret", story["first_output"])
    assert f"python launch/actors.py --connect {story['address']} --actors 8 --keys FOLDER" in story["first_output"]


def test_actors_outlive_relay_listener_and_a_resume(story):
    """Killed with -9 in mid-run, and a learner that stops and goes on with other settings of its own."""
    assert story["same_actors"]
    restarts = lines(story["base"] / "first" / "restarts.jsonl")
    assert [line.get("service") for line in restarts] == [None, "relay"]
    assert "listener" in [line.get("service") for line in lines(story["run_dir"] / "restarts.jsonl")]


def test_the_machine_tells_what_it_does(story):
    line = r"2 actors \| [\d.,]+ unrolls/s sent, ([\d,]+) in all, ([\d,]+) dropped \| parameters [\d,]+ of"
    sent, dropped = (int(text.replace(",", "")) for text in re.findall(line, story["said"])[-1])
    assert sent > 0
    # Both ends count the same: what was dropped while the run was away never came, and nothing else.
    assert dropped == story["metrics"]["remote"]["unrolls_lost"]


def test_machines_leave_and_join_and_are_counted(story):
    members = lines(story["run_dir"] / "members.jsonl")
    joined = [line for line in members if "member" in line]
    assert [(line["first"], line["actors"]) for line in joined] == [(0, 2), (2, 1)]
    seeds = sorted(tuple(line["seeds"]) for line in members)
    assert all(first + count <= following for (first, count), (following, _) in itertools.pairwise(seeds))
    actors = {game["actor"] for game in lines(story["run_dir"] / "episodes.jsonl")}
    assert actors == {10_000, 10_001, 10_002}
    remote = story["metrics"]["remote"]
    assert remote["machines"] >= 1 and remote["unrolls_received"] > 0 and remote["saved_bytes"] > 0
    assert set(remote["refused"]) <= {"stranger", "repeated", "version"}


def test_nothing_is_left_and_the_exit_codes_are_those_of_interrupts(story):
    assert story["codes"] == [130, 130, 130]
    assert_nothing_left(story["run_dir"], story["run_pid"])
    assert [folder for folder in memory_root().glob(f"{PREFIX}*-{story['second_pid']}-*")] == []
    assert not (story["base"] / "second" / "pids.json").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--connect", "host:5555"], "--connect host:5555 is no address: write tcp://HOST:PORT"),
        (["--connect", "tcp://host:5555"], "--connect tcp://host:5555 without keys is for this machine only"),
        (["--connect", "tcp://host:5555", "--keys", "nowhere"], "actors.key_secret is no key file: copy it from RUN/keys"),
        (["--connect", "tcp://127.0.0.1:5555", "--actors", "0"], "--actors 0 is out of range"),
    ],
)
def test_bad_flags_are_refused_in_a_sentence(arguments, words, capsys, tmp_path):
    assert main([*arguments, "--folder", str(tmp_path / "folder")]) == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / "folder").exists()
