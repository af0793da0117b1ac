"""A real run whose actors come from another machine: processes killed at both ends, a resume, machines that leave and join."""

import itertools
import json
import re
import signal
import socket
import subprocess
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import zmq.auth

import runs
from launch.actors import Report, main
from launch.process import PREFIX, memory_root
from launch.remote import RELAY
from launch.services import open_counters
from runs import ACTORS, QUICK, assert_nothing_left, lines, pids, send, started, updates, wait_for

PATIENT = 180.0


def workers(folder: Path) -> dict[str, int]:
    return json.loads((folder / "pids.json").read_text(encoding="utf-8"))["workers"]


def wait_while_alive(what: Callable[[], Any], *processes: subprocess.Popen[str]) -> None:
    """Wait for something; a process that ends before fails with what it said."""
    ended: list[subprocess.Popen[str]] = []
    wait_for(lambda: ended.extend(p for p in processes if p.poll() is not None) or ended or what(), PATIENT)
    for process in ended:
        assert process.stdout is not None
        raise AssertionError(f"{process.args} ended: {process.stdout.read()}")


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
    with ExitStack() as stack:
        run = stack.enter_context(
            started("--suite", "toy", "--run-dir", str(run_dir), "--total-frames", "1e9", "--listen", address,
                    "remote.only=true", *QUICK)
        )  # fmt: skip
        wait_while_alive((run_dir / "keys" / "run.key").exists, run)
        keys.mkdir()
        for name in ("run.key", "actors.key_secret"):  # what the command told to copy
            (keys / name).write_bytes((run_dir / "keys" / name).read_bytes())
        first = stack.enter_context(started(*join, "--actors", "2", "--folder", str(base / "first"), script=ACTORS))
        wait_while_alive(lambda: updates(run_dir) >= 5, run, first)
        notes["actors"] = {name: pid for name, pid in workers(base / "first").items() if name.startswith("actor")}
        assert send(workers(base / "first")["relay"], signal.SIGKILL)
        run.send_signal(signal.SIGINT)
        notes["first_output"], _ = run.communicate(timeout=PATIENT)
        notes["codes"] = [run.returncode]
        goal = updates(run_dir) + 5
        run = stack.enter_context(
            started("--resume", str(run_dir), "learner.batch_size=4", "log.every_seconds=0.3", "actor.inference=batched")
        )
        wait_while_alive(lambda: updates(run_dir) >= goal, run, first)
        notes["same_actors"] = {name: workers(base / "first")[name] for name in notes["actors"]}
        notes["lost"] = lines(run_dir / "metrics.jsonl")[-1]["remote"]["unrolls_lost"]
        assert send(pids(run_dir)["workers"]["listener"], signal.SIGKILL)
        first.kill()
        notes["said"], _ = first.communicate(timeout=PATIENT)
        second = stack.enter_context(started(*join, "--actors", "1", "--folder", str(base / "second"), script=ACTORS))
        number = 10_002  # the first actor of the second machine, which plays with an inference process of its own
        wait_while_alive(lambda: any(game["actor"] >= number for game in lines(run_dir / "episodes.jsonl")), run, second)
        for process in (second, run):
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=PATIENT)
            notes["codes"].append(process.returncode)
        notes["metrics"] = lines(run_dir / "metrics.jsonl")[-1]
        notes |= {"second_pid": second.pid, "run_pid": run.pid}
        notes["first_pid"] = first.pid
    return notes


def test_the_command_says_what_to_copy(story):
    assert re.search(rf"copy {story['run_dir']}/keys/run.key and .*actors.key_secret", story["first_output"])
    assert f"python launch/actors.py --connect {story['address']} --actors 8 --keys FOLDER" in story["first_output"]


def test_actors_outlive_their_relay_and_a_resume(story):
    """The relay killed with -9, and a learner that stops and goes on with other settings of its own."""
    assert story["same_actors"] == story["actors"]
    restarts = lines(story["base"] / "first" / "restarts.jsonl")
    assert [line.get("service") for line in restarts] == [None, "relay"]


def test_a_listener_that_was_killed_is_replaced(story):
    restarts = [line for line in lines(story["run_dir"] / "restarts.jsonl") if line["event"] == "restart"]
    assert [(line["service"], line["reason"]) for line in restarts] == [("listener", "was killed by SIGKILL")]


def test_the_machine_tells_what_it_does(story):
    line = r"2 actors \| [\d.,]+ unrolls/s sent, ([\d,]+) in all, ([\d,]+) dropped \| parameters [\d,]+ of"
    sent, dropped = (int(text.replace(",", "")) for text in re.findall(line, story["said"])[-1])
    assert sent > 0
    assert dropped >= story["lost"], "what was dropped while the run was away never came, and nothing else was lost"


def test_machines_leave_and_join_and_are_counted(story):
    members = lines(story["run_dir"] / "members.jsonl")
    joined = [line for line in members if "member" in line]
    assert [(line["first"], line["actors"]) for line in joined] == [(0, 2), (2, 1)]
    seeds = sorted(tuple(line["seeds"]) for line in members)
    assert all(first + count <= following for (first, count), (following, _) in itertools.pairwise(seeds))
    actors = {game["actor"] for game in lines(story["run_dir"] / "episodes.jsonl")}
    assert actors == {10_000, 10_001, 10_002}
    remote = story["metrics"]["remote"]
    assert remote["unrolls_received"] > 0 and remote["saved_bytes"] > 0
    assert set(remote["refused"]) <= {"stranger", "repeated", "version"}


def test_nothing_is_left_and_the_exit_codes_are_those_of_interrupts(story):
    assert story["codes"] == [130, 130, 130]
    assert_nothing_left(story["run_dir"], story["run_pid"])
    assert not (story["base"] / "second" / "pids.json").exists()
    for folder, pid in ((story["base"] / "first", story["first_pid"]), (story["base"] / "second", story["second_pid"])):
        # The first was killed with -9: its relay tidies up.
        wait_for(lambda pid=pid: list(memory_root().glob(f"{PREFIX}*-{pid}-*")) == [], PATIENT)
        wait_for(lambda folder=folder: runs.roles_of(folder) == [], PATIENT)


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


def test_a_machine_whose_run_is_silent_says_so(tmp_path, monkeypatch):
    now = 5_000.0
    monkeypatch.setattr("launch.actors.time.monotonic", lambda: now)
    counters = open_counters(tmp_path, RELAY, create=True)
    counters["heard_at"] = 5_000
    report = Report(tmp_path, 2, unreachable_seconds=10)
    now = 5_009.0
    assert "has not answered" not in report.line()
    now = 5_047.0
    assert report.line().endswith("the run has not answered for 47 s: it has ended or is out of reach")


def test_a_machine_that_nobody_knows_is_named(tmp_path, capsys):
    for name in ("run", "actors"):
        zmq.auth.create_certificates(tmp_path, name)
    arguments = ["--connect", "tcp://nowhere.invalid:5555", "--actors", "1", "--keys", str(tmp_path)]
    assert main([*arguments, "--folder", str(tmp_path / "folder")]) == 2
    assert "--connect tcp://nowhere.invalid:5555: no machine is called nowhere.invalid" in capsys.readouterr().err
