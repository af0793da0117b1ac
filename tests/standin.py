"""DeepMind Lab for the tests: the real module where it is installed, else the stand-in of tests/dmlab_standin."""

import importlib
import importlib.util
import os
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "dmlab_standin"
IS_REAL = importlib.util.find_spec("deepmind_lab") is not None


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make `import deepmind_lab` work here and in child processes, for one test."""
    if IS_REAL:
        return
    monkeypatch.syspath_prepend(FOLDER)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(FOLDER), os.environ.get("PYTHONPATH")])))
    for name in [name for name in sys.modules if name.split(".")[0] == "deepmind_lab"]:
        monkeypatch.delitem(sys.modules, name)
    importlib.invalidate_caches()
