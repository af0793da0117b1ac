"""The command on a Ray cluster: simulated nodes on this machine, one lost and one added while training goes on."""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import zlib
from pathlib import Path

import jsonschema
import psutil
import pytest
import ray
import yaml
from ray.cluster_utils import Cluster

import runs
from agent import checkpoint
from agent.transport.listener import Ledger
from launch.cluster import EVENTS
from launch.host import FILES, Host
from launch.multitask import main
from launch.process import PREFIX, memory_root
from launch.records import METRICS, last_line
from launch.remote import LEDGER, MEMBERS

NODE = {"object_store_memory": 80 * 2**20}
# A killed node is noticed in 3 s instead of 15, a slow one has as long as ever.
VARIABLES = {"RAY_health_check_period_ms": "500", "RAY_USAGE_STATS_ENABLED": "0"}
COMMAND = ["--suite", "toy", "--tasks", "catch", "--cluster", "ray"]
SETTINGS = [*runs.QUICK, "checkpoint.every_seconds=5"]


@pytest.fixture(scope="module")
def cluster():
    """A head with three CPUs."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in VARIABLES.items():
            patch.setenv(name, value)
        made = Cluster()
        add_node(made, 3, include_dashboard=False)
        patch.setenv("RAY_ADDRESS", made.address)
        yield made
        made.shutdown()


def add_node(cluster: Cluster, cpus: int, **arguments):
    """Ray gives a node 30 s to start, which a busy machine may need more than once."""
    for _ in range(2):
        try:
            return cluster.add_node(num_cpus=cpus, **NODE, **arguments)
        except Exception as error:
            print(error)
    return cluster.add_node(num_cpus=cpus, **NODE, **arguments)


def whats(run_dir: Path, event: str) -> list[str]:
    return [line["what"] for line in runs.lines(run_dir / EVENTS) if line["event"] == event]


def arrived(run_dir: Path, member: int) -> int:
    """Unrolls of the first actor of a machine."""
    firsts = [line["first"] for line in runs.lines(run_dir / MEMBERS) if "member" in line]
    return Ledger(run_dir / LEDGER).next(firsts[member]) if len(firsts) > member else 0


def log_folders(run_dir: Path) -> list[Path]:
    return list(Path(tempfile.gettempdir()).glob(f"logs-of-{run_dir.name}-*"))


def living(run_dir: Path, word: str = "") -> list[psutil.Process]:
    """Processes of a run on all nodes."""
    found = []
    for process in psutil.process_iter():
        try:
            text = " ".join(process.cmdline())
            if run_dir.name in text and word in text and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


def wait(what, process, output: Path):
    """What `what` returns once it is true, as long as the command runs."""
    runs.wait_for(lambda: process.poll() is not None or what(), 180)
    assert process.poll() is None, output.read_text()
    return what()


def grows(run_dir: Path, process, output: Path) -> None:
    before = runs.updates(run_dir)
    wait(lambda: runs.updates(run_dir) > before + 2, process, output)


def assert_clean(run_dir: Path) -> None:
    runs.wait_for(lambda: not living(run_dir), 20)
    for folder in [run_dir, *log_folders(run_dir)]:
        number = zlib.crc32(str(folder.resolve()).encode())
        assert [*memory_root().glob(f"{PREFIX}{number:08x}-*")] == []


@pytest.fixture
def run_dir(tmp_path):
    """With a name of its own, by which processes on all nodes are found."""
    path = tmp_path / f"clustered-{os.getpid()}-{time.monotonic_ns()}"
    yield path
    for folder in log_folders(path):
        for file in sorted(folder.rglob("*"), reverse=True):
            file.rmdir() if file.is_dir() else file.unlink()
        folder.rmdir()


def test_a_node_is_lost_and_one_is_added(cluster, run_dir, tmp_path):
    output = tmp_path / "output.txt"
    # The rank needs two CPUs, so it is on the head; the third is an actor's, so that training goes on without the other node.
    arguments = [*COMMAND, "--run-dir", str(run_dir), "cluster.cpus_per_rank=2", *SETTINGS]
    with output.open("w") as stream, runs.started(*arguments, output=stream.fileno()) as process:
        second = add_node(cluster, 1)
        wait(lambda: arrived(run_dir, 0) and arrived(run_dir, 1), process, output)
        grows(run_dir, process, output)
        cluster.remove_node(second, allow_graceful=False)
        add_node(cluster, 1)
        [loss] = wait(lambda: whats(run_dir, "loss"), process, output)
        # Ray may notice first that the connection broke, or that the node is gone.
        assert second.node_id[:8] in loss and ("its node has gone" in loss or "was lost" in loss)
        wait(lambda: arrived(run_dir, 2), process, output)
        grows(run_dir, process, output)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130, output.read_text()
    assert len(whats(run_dir, "place")) == 4 and whats(run_dir, "restart") == []
    assert [line["event"] for line in runs.lines(run_dir / "restarts.jsonl")] == ["start"]
    assert last_line(run_dir / METRICS)["remote"]["unrolls_received"] > 0
    assert checkpoint.load(run_dir)["counters"]["updates"] >= runs.updates(run_dir)
    text = output.read_text()
    assert text.count("stopping: writing a checkpoint") == 1 and f"--resume {run_dir}" in text
    assert_clean(run_dir)


@pytest.mark.slow
def test_killed_actors_are_replaced_and_a_killed_rank_starts_all_again(cluster, run_dir, tmp_path):
    output = tmp_path / "output.txt"
    arguments = [*COMMAND, "--run-dir", str(run_dir), "--total-frames", "20000", *SETTINGS]
    add_node(cluster, 2)
    with output.open("w") as stream, runs.started(*arguments, "learner.ranks=2", output=stream.fileno()) as process:
        wait(lambda: runs.updates(run_dir) > 5, process, output)
        living(run_dir, "launch.actors")[0].kill()
        wait(lambda: whats(run_dir, "loss"), process, output)
        number = len(whats(run_dir, "place"))
        wait(lambda: len(whats(run_dir, "place")) > number, process, output)
        grows(run_dir, process, output)
        ranks = living(run_dir, "launch.multitask --resume")
        [rank] = [found for found in ranks if found.environ()["RANK"] == "1"]
        rank.kill()
        wait(lambda: whats(run_dir, "restart"), process, output)
        assert process.wait(400) == 0, output.read_text()
    assert "was killed by SIGKILL" in whats(run_dir, "loss")[0]
    assert "learner rank 1 was killed by SIGKILL" in whats(run_dir, "restart")[0]
    assert last_line(run_dir / METRICS)["frames"] >= 20000
    assert_clean(run_dir)


def test_a_child_ends_with_its_host_whatever_kills_that(tmp_path):
    """And its private files are for its owner only, and go when it ends."""
    child = "import os, sys, time; print(os.getpid(), sys.argv[1], flush=True); time.sleep(600)"
    code = f"""
import time
from launch.host import Host
host = Host({str(tmp_path)!r})
host.start(["-c", {child!r}, {FILES!r}], {{}}, {{"secret": "text"}})
while not (lines := host.poll().lines):
    time.sleep(0.05)
print(*lines, flush=True)
time.sleep(600)
"""
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    number, folder = parent.stdout.readline().split()
    secret = Path(folder) / "secret"
    assert secret.read_text() == "text"
    assert secret.stat().st_mode & 0o777 == 0o600 and secret.parent.stat().st_mode & 0o777 == 0o700
    grandchild = psutil.Process(int(number))
    parent.kill()
    parent.communicate()
    grandchild.wait(20)
    host = Host(str(tmp_path))  # the next one here removes what that one left
    reports = [host.start(["-c", "import os; print(os.environ['A'])", FILES], {"A": "b"}, {"secret": "text"})]
    runs.wait_for(lambda: reports.append(host.poll()) or reports[-1].code is not None)
    assert reports[-1].code == 0 and [line for report in reports for line in report.lines] == ["b"]
    assert not [*memory_root().glob(f"{PREFIX}{zlib.crc32(str(tmp_path.resolve()).encode()):08x}-*")]


@pytest.mark.parametrize("address", ["127.0.0.1:1", "ray://127.0.0.1:10001", "http://127.0.0.1:8265"])
def test_no_cluster_is_said_at_once(address, monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("RAY_ADDRESS", address)
    assert main(["--suite", "toy", "--cluster", "ray", "--run-dir", str(tmp_path / "run")]) == 2
    said = capsys.readouterr().err
    assert address in said and "ray start --head" in said and said.count("\n") == 1
    assert not ray.is_initialized() and not (tmp_path / "run").exists()


def test_without_ray_the_message_says_what_to_install(monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(sys.modules, "ray", None)
    assert main(["--suite", "toy", "--cluster", "ray", "--run-dir", str(tmp_path / "run")]) == 2
    assert "pip install 'multitask-agents[cluster]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--single-task", "all", "--frames-per-task", "1"], "--single-task does not run with --cluster"),
        (["--listen", "tcp://0.0.0.0:5555"], "--listen tcp://0.0.0.0:5555: --cluster chooses"),
    ],
)
def test_what_does_not_go_with_a_cluster_is_refused(arguments, words, capsys):
    assert main(["--suite", "toy", "--cluster", "ray", *arguments]) == 2
    assert words in capsys.readouterr().err


def test_a_dry_run_needs_no_cluster(capsys, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    assert main(["--suite", "toy", "--cluster", "ray", "--dry-run", "learner.ranks=2", "actor.num_actors=1"]) == 0
    assert json.loads(capsys.readouterr().out)["config"]["remote"]["only"] is True


def test_the_cluster_file_of_the_readme_is_one_for_ray():
    text = (runs.ROOT / "README.md").read_text(encoding="utf-8")
    [block] = [code for code in re.findall(r"^```yaml\n(.*?)^```$", text, re.DOTALL | re.MULTILINE) if "cluster_name" in code]
    content = yaml.safe_load(block)
    schema = json.loads((Path(ray.__file__).parent / "autoscaler" / "ray-schema.json").read_text(encoding="utf-8"))
    jsonschema.validate(content, schema)
    assert set(content) <= set(schema["properties"]) and set(content["provider"]) <= set(
        schema["properties"]["provider"]["properties"]
    )
