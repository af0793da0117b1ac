"""The image's files hold together: the Dockerfile's promises, the entry point's commands, pins that fit setup.py.

The image itself is built and tried by hand: tests/docker/build_here.sh.
"""

import importlib.util
import json
import os
import re
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest
import setuptools
from dockerfile_parse import DockerfileParser
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).parents[1]
DOCKER = ROOT / "docker"
COMMANDS = {"train": "launch/multitask.py", "actors": "launch/actors.py", "score": "eval/score.py",
            "doctor": "launch/doctor.py", "benchmark": "launch/benchmark.py"}  # fmt: skip
Steps = list[tuple[str, str]]


def stages() -> dict[str, Steps]:
    """Stage -> its instructions and their values, with FROM first; `` holds the arguments before the first stage."""
    found: dict[str, Steps] = {"": []}
    steps = found[""]
    for step in DockerfileParser(path=str(ROOT / "Dockerfile")).structure:
        instruction, value = step["instruction"], step["value"]
        if instruction == "FROM":
            steps = found.setdefault(value.split()[-1], [])
        if instruction != "COMMENT":
            steps.append((instruction, value))
    return found


def values(steps: Steps, instruction: str) -> list[str]:
    return [value for name, value in steps if name == instruction]


def argument(name: str) -> str:
    """Default of a build argument."""
    found = [value for steps in stages().values() for value in values(steps, "ARG") if value.startswith(f"{name}=")]
    assert len(found) == 1
    return found[0].partition("=")[2]


def module(name: str) -> ModuleType:
    """A file of docker/, which is no package."""
    spec = importlib.util.spec_from_file_location(name, DOCKER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def packages() -> dict[str, str]:
    """Name -> version in docker/requirements.txt."""
    lines = (DOCKER / "requirements.txt").read_text(encoding="utf-8").splitlines()
    pairs = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {name.lower().replace("_", "-"): version for name, version in pairs}


# --- Dockerfile


def test_hadolint_finds_nothing():
    done = subprocess.run([Path(sys.executable).with_name("hadolint"), ROOT / "Dockerfile"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_process_1_is_an_init_and_gets_the_signals():
    entry = values(stages()["runtime"], "ENTRYPOINT")
    assert len(entry) == 1
    command = json.loads(entry[0])  # the exec form is JSON: no shell in between
    assert command == ["/usr/bin/tini", "--", "/opt/multitask/docker/entry.sh"]
    assert "tini" in values(stages()["runtime"], "RUN")[0].split()
    assert os.access(DOCKER / "entry.sh", os.X_OK)


def test_nothing_runs_as_root():
    users = values(stages()["runtime"], "USER")
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", users[-1])
    assert f"--uid {users[-1].split(':')[0]} " in " ".join(values(stages()["runtime"], "RUN"))
    assert values(stages()["test"], "USER")[-1] == users[-1]


def test_an_engine_that_does_not_play_fails_the_build():
    steps = stages()["runtime"]
    check = steps.index(("RUN", "python /opt/multitask/docker/check_engine.py"))
    assert check > max(index for index, (name, _) in enumerate(steps) if name in ("COPY", "USER"))
    assert stages()["test"][0] == ("FROM", "runtime AS test")


def test_a_given_wheel_skips_the_build_of_the_engine():
    assert stages()["wheel"] == [("FROM", "dmlab${DMLAB_WHEEL:+-given} AS wheel")]
    assert {"dmlab", "dmlab-given"} <= set(stages())
    assert argument("DMLAB_WHEEL") == ""


def test_what_outlives_a_container_lies_in_volumes():
    runtime = stages()["runtime"]
    assert json.loads(values(runtime, "VOLUME")[0]) == ["/data/runs", "/data/cache"]
    assert "XDG_CACHE_HOME=/data/cache" in " ".join(values(runtime, "ENV"))
    assert values(runtime, "WORKDIR") == ["/data"]  # multitask.py writes to ./runs
    assert "/opt/multitask/docker/healthcheck.py" in values(runtime, "HEALTHCHECK")[0]


def test_tools_and_sources_are_pinned():
    assert re.fullmatch(r"[0-9a-f]{64}", argument("BAZEL_SHA256"))
    assert re.fullmatch(r"\d+\.\d+\.\d+", argument("BAZEL_VERSION"))
    assert re.fullmatch(r"[0-9a-f]{40}", argument("LAB_COMMIT"))
    assert re.search(r"python:3\.11-slim-bookworm$", argument("PYTHON_IMAGE"))
    steps = [step for stage in stages().values() for step in stage]
    for line in [value for name, value in steps if name == "RUN" for value in value.split("&&") if "pip install" in value]:
        assert "requirements.txt" in line or "--no-deps" in line, line


def test_debians_buildah_can_read_it():
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    code = "\n".join(line for line in text.splitlines() if not line.startswith("#"))
    assert "<<" not in code and "--link" not in code


def test_what_is_copied_is_there_and_not_ignored():
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").split()
    for steps in stages().values():
        for value in values(steps, "COPY"):
            if value.startswith("--from") or "$" in value:
                continue
            for source in value.split()[:-1]:
                assert (ROOT / source).exists() and source not in ignored, source
    for package in ("agent", "eval", "launch", "tasks"):
        assert f"{package} /opt/multitask/{package}" in values(stages()["runtime"], "COPY")


def test_pins_fit_setup_py(monkeypatch):
    given = {}
    monkeypatch.setattr(setuptools, "setup", lambda **arguments: given.update(arguments))
    runpy.run_path(str(ROOT / "setup.py"))
    pinned = packages() | {"torch": argument("TORCH_VERSION")}
    for text in [*given["install_requires"], *given["extras_require"]["atari"], "setuptools<81", "six", "wheel"]:
        requirement = Requirement(text)
        assert requirement.name in pinned, f"{text}: add it to docker/requirements.txt"
        assert pinned[requirement.name] in requirement.specifier, f"{text}: docker/requirements.txt has another version"
    assert "3.11" in SpecifierSet(given["python_requires"])


# --- entry point


def entry(*arguments: str, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PATH": f"{path or Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    return subprocess.run([DOCKER / "entry.sh", *arguments], capture_output=True, text=True, env=environment, timeout=60)


def test_without_a_command_it_says_what_it_can_do():
    for arguments in ((), ("help",), ("--help",)):
        done = entry(*arguments)
        assert done.returncode == 0
        assert set(COMMANDS) <= set(done.stdout.split())


def test_an_unknown_command_is_refused_with_the_known_ones():
    done = entry("trian", "--suite", "toy")
    assert done.returncode == 2
    assert done.stderr == "docker run: trian is no command: use train, actors, score, doctor or benchmark\n"


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_takes_the_place_of_the_shell(command, tmp_path):
    """Else a signal would end the shell, not the run."""
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "$$"\nprintf "%s\\n" "$@"\n', encoding="utf-8")
    python.chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    with subprocess.Popen([DOCKER / "entry.sh", command, "--suite", "a b"], stdout=subprocess.PIPE, text=True,
                          env={**os.environ, "PATH": path}) as process:  # fmt: skip
        output = process.communicate(timeout=60)[0].splitlines()
    assert int(output[0]) == process.pid
    assert Path(output[1]).resolve() == ROOT / COMMANDS[command]
    assert Path(output[1]).exists()
    assert output[2:] == ["--suite", "a b"]


# --- health


@pytest.fixture
def run(tmp_path):
    """A process that looks like a training run: its command line and its lock."""
    script, run_dir = tmp_path / "launch" / "multitask.py", tmp_path / "run"
    script.parent.mkdir()
    run_dir.mkdir()
    (run_dir / "pids.json").write_text("{}", encoding="utf-8")
    (run_dir / "config.yaml").write_text("supervisor: {silent_seconds: 100.0, start_seconds: 300.0}\n", encoding="utf-8")
    script.write_text(f"lock = open({str(run_dir / 'lock')!r}, 'w')\nprint(1, flush=True)\ninput()\n", encoding="utf-8")
    with subprocess.Popen([sys.executable, script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline()
        yield run_dir
        process.send_signal(signal.SIGKILL)


def test_a_run_is_found_by_its_lock_and_is_healthy_at_first(run, capsys):
    health = module("healthcheck")
    assert abs(health.runs()[run] - time.time()) < 60
    (run / "pids.json").unlink()
    assert run not in health.runs(), "a run of a series that has ended, or waits for its turn"
    (run / "pids.json").write_text("{}", encoding="utf-8")
    health.main()
    assert str(run) not in capsys.readouterr().out


def test_a_run_is_unhealthy_when_it_writes_nothing_for_too_long(run, capsys, monkeypatch):
    health = module("healthcheck")
    began, metrics = time.time() - 10_000, run / "metrics.jsonl"

    def overdue(written: float | None = None, started: float = began) -> bool:
        if written is not None:
            metrics.touch()
            os.utime(metrics, (written, written))
        return health.overdue_seconds(run, started) > 0

    now = time.time()
    assert not overdue(started=now - 350) and overdue(started=now - 370)  # before the first line: start_seconds
    assert not overdue(now - 150) and overdue(now - 170)  # then silent_seconds
    assert not overdue(now - 5000, started=now - 350) and overdue(now - 5000, started=now - 370)  # resumed: those are old
    monkeypatch.setattr(health, "runs", lambda: {run: began})
    assert health.main() == 1
    assert f"{run} should have written metrics" in capsys.readouterr().out
    metrics.touch()
    assert health.main() == 0


# --- the check of the engine

ENGINE = """
import numpy as np
class Lab:
    def __init__(self, level, observations, config, renderer):
        assert renderer == "software" and isinstance(observations, list)
        self.steps = 0
    def reset(self, seed):
        {reset}
    def step(self, action, num_steps):
        assert action.dtype == np.intc and action.shape == (7,)
        self.steps += 1
    def observations(self):
        return {{"RGB_INTERLEAVED": np.full({shape}, {value}, np.uint8)}}
    def close(self):
        pass
"""


@pytest.mark.parametrize(
    ("given", "code", "says"),
    [
        ({}, 0, "reset in"),
        ({"value": "7"}, 1, "nothing is drawn"),
        ({"shape": "(72, 96, 4)"}, 1, "not (72, 96, 3) uint8"),
        ({"reset": "raise RuntimeError('Failed to start')"}, 1, "Failed to start"),
        ({"reset": "import os; os._exit(1)"}, 1, ""),
    ],
)
def test_an_engine_has_to_draw(given, code, says, tmp_path):
    engine = ENGINE.format(**({"reset": "pass", "shape": "(72, 96, 3)", "value": "self.steps"} | given))
    (tmp_path / "deepmind_lab.py").write_text(engine, encoding="utf-8")
    (tmp_path / "deepmind_lab-0.dist-info").mkdir()
    (tmp_path / "deepmind_lab-0.dist-info" / "METADATA").write_text("Name: deepmind_lab\nVersion: 0\n", encoding="utf-8")
    done = subprocess.run([sys.executable, DOCKER / "check_engine.py"], capture_output=True, text=True,
                          env={**os.environ, "PYTHONPATH": str(tmp_path)})  # fmt: skip
    assert done.returncode == code, done.stderr
    assert says in done.stdout + done.stderr


# --- pins of the engine's archives

WORKSPACE = """workspace(name = "lab")

http_archive(
    name = "com_google_googletest",
    urls = ["https://example.org/main.zip"],
)

http_archive(
    name = "bazel_skylib",
    strip_prefix = "skylib-main",
    urls = ["https://example.org/skylib-main.zip"],
)

http_archive(
    name = "com_google_absl",
    strip_prefix = "absl-master",
    urls = ["https://example.org/absl-master.zip"],
)

http_archive(
    name = "zlib_archive",
    build_file = "@//bazel:zlib.BUILD",
    sha256 = "00",
    urls = [
        "https://example.org/zlib.tar.gz",
    ],
)

http_archive(
    name = "jpeg_archive",
    sha256 = "11",
    urls = ["https://example.org/jpeg.tar.gz"],
)

python_repo(
    name = "python_system",
)
"""


def test_every_archive_has_a_checksum():
    pins = module("pin_dmlab")
    text = pins.pin_workspace(WORKSPACE)
    assert "googletest" not in text and "master" not in text and "main" not in text
    for folder, sha256, urls in pins.PINS.values():
        assert re.fullmatch("[0-9a-f]{64}", sha256) and sha256 in text and folder in text
        assert all(f'"{url}",' in text for url in urls)
    assert text.count("sha256 = ") == text.count("http_archive(") == 4
    assert '    name = "zlib_archive",\n    build_file = "@//bazel:zlib.BUILD",\n    sha256 = "c3e5' in text
    assert text.startswith('workspace(name = "lab")\n') and text.endswith('python_repo(\n    name = "python_system",\n)\n')
    assert pins.pin_workspace(text) == text


def test_an_archive_without_a_checksum_is_refused(tmp_path):
    (tmp_path / "BUILD").write_text("", encoding="utf-8")
    new = 'http_archive(\n    name = "new",\n    urls = ["https://example.org/main.zip"],\n)\n'
    for text, says in (
        (WORKSPACE + new, "new has no checksum"),
        (WORKSPACE.replace("com_google_absl", "absl"), "has no com_g"),
    ):
        (tmp_path / "WORKSPACE").write_text(text, encoding="utf-8")
        done = subprocess.run([sys.executable, DOCKER / "pin_dmlab.py", tmp_path], capture_output=True, text=True)
        assert done.returncode == 1 and says in done.stderr
        assert (tmp_path / "WORKSPACE").read_text(encoding="utf-8") == text


def test_python_2_goes():
    text = '[py_binary(\n    python_version = py,\n) for py in [\n    "PY2",\n    "PY3",\n]]\n'
    assert module("pin_dmlab").without_python_2(text) == '[py_binary(\n    python_version = py,\n) for py in ["PY3"]]\n'
