"""The contract of `deepmind_lab`, held by the real engine where it is installed, else by the stand-in of these tests.

Rows are played in child processes: one engine at a time, and a crash is an exit code. The rows of dmlab_rows.py are the
same for the real engine and the stand-in; those of dmlab_standin_rows.py are about the stand-in alone.
"""

import ast
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from functools import cache
from importlib.metadata import version
from pathlib import Path

import psutil
import pytest

HERE = Path(__file__).parent
STANDIN = HERE / "dmlab_standin"
spec = importlib.util.find_spec("deepmind_lab")
REAL = spec is not None and not Path(spec.origin or "").with_name("faults.py").exists()
standin_only = pytest.mark.skipif(REAL, reason="about the stand-in alone: the real engine cannot be asked to do this")


def environment(**variables: str) -> dict[str, str]:
    """Variables of a child: the stand-in can be imported where no engine is installed."""
    path = os.pathsep.join([*([] if spec else [str(STANDIN)]), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path, **variables}


def child(*rows: str, **variables: str) -> subprocess.Popen[str]:
    """A process that plays the rows, each named `module.function`."""
    command = [sys.executable, str(HERE / "dmlab_rows.py"), *rows]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=environment(**variables))


def names(module: str) -> list[str]:
    """The rows that a module lists as ROWS, read without importing it: only the children import the engine."""
    for node in ast.parse((HERE / f"{module}.py").read_text(encoding="utf-8")).body:
        target = node.target if isinstance(node, ast.AnnAssign) else getattr(node, "targets", [None])[0]
        if isinstance(target, ast.Name) and target.id == "ROWS":
            return [element.id for element in node.value.elts]
    raise AssertionError(f"{module} has no ROWS")


@cache
def results(module: str) -> dict[str, str | None]:
    """What each row of a module said: None where it held, else why not."""
    process = child(*(f"{module}.{name}" for name in names(module)))
    try:
        out, errors = process.communicate(timeout=1800 if REAL else 60)
    finally:
        process.kill()
    said: dict[str, str | None] = {}
    for line in out.splitlines():
        if line.startswith("ROW "):
            name, result = json.loads(line[4:])
            said[name] = f"the child ended with {process.returncode}: {errors}" if result == "began" else result
    return said


@pytest.mark.parametrize("row", names("dmlab_rows"))
def test_contract(row):
    assert results("dmlab_rows").get(row, "not reached") is None, results("dmlab_rows").get(row)


@standin_only
@pytest.mark.parametrize("row", names("dmlab_standin_rows"))
def test_standin(row):
    assert results("dmlab_standin_rows").get(row, "not reached") is None, results("dmlab_standin_rows").get(row)


@standin_only
def test_a_hang_holds_on_until_it_is_killed():
    with child("dmlab_standin_rows.hangs", DMLAB_STANDIN_FAULT="hang@reset:1") as process:
        try:
            assert "hang@reset:1" in process.stderr.readline()
            late = time.monotonic() + 20
            while psutil.Process(process.pid).status() == psutil.STATUS_RUNNING:  # it sleeps as soon as it hangs
                assert time.monotonic() < late, "it works instead of sleeping"
            process.terminate()  # its handler would end it,
            process.stdin.close()  # and so would its thread
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(1)
        finally:
            process.kill()
    assert process.returncode == -signal.SIGKILL


def test_the_product_does_not_ship_the_standin():
    for path in (HERE.parent / "setup.py", HERE.parent / "pyproject.toml"):
        text = path.read_text(encoding="utf-8")
        assert "dmlab_standin" not in text
        assert not re.search(r'["\']deepmind_lab["\']', text)
    for package in ("agent", "eval", "launch", "tasks"):
        for path in (HERE.parent / package).rglob("*.py"):
            assert "standin" not in path.read_text(encoding="utf-8").lower(), path


def test_the_standin_becomes_a_wheel(tmp_path):
    """Built from a copy, and installed apart: what the wheel holds is enough to play."""
    source = shutil.copytree(STANDIN, tmp_path / "source", ignore=shutil.ignore_patterns("__pycache__"))
    newest = tuple(int(part) for part in version("setuptools").split(".")[:2])
    alone = ["--no-build-isolation"] if newest >= (70, 1) else []  # older ones need the package `wheel`: pip gets both
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    subprocess.run([*pip, "wheel", "--no-deps", *alone, "-w", str(tmp_path), str(source)], check=True, timeout=120)
    (wheel,) = tmp_path.glob("deepmind_lab-1.0.dev0+standin-*.whl")
    site = tmp_path / "site"
    subprocess.run([*pip, "install", "--no-deps", "--no-index", "--target", str(site), str(wheel)], check=True, timeout=120)
    look = "import deepmind_lab as d, importlib.metadata as m; print(d.version(), m.version('deepmind_lab'), d.__file__)"
    found = subprocess.run(
        [sys.executable, "-c", look], env={**os.environ, "PYTHONPATH": str(site)}, check=True, capture_output=True, text=True
    )
    assert found.stdout.split() == ["1.0.dev0+standin"] * 2 + [str(site / "deepmind_lab" / "__init__.py")]
