"""DeepMind Lab for the tests: the module that is installed, the real one or its stand-in, else tests/dmlab_standin."""

import importlib
import importlib.util
import os
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "dmlab_standin"
_FOUND = importlib.util.find_spec("deepmind_lab")
IS_REAL = _FOUND is not None and not Path(_FOUND.origin or "").with_name("faults.py").exists()
standin_only = pytest.mark.skipif(IS_REAL, reason="the real engine cannot be asked to do this")


def environment(**variables: str) -> dict[str, str]:
    """Variables of a child process in which `import deepmind_lab` works."""
    path = os.pathsep.join([*([] if _FOUND else [str(FOLDER)]), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path, **variables}


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make `import deepmind_lab` work here and in child processes, for one test."""
    if _FOUND is not None:
        return
    monkeypatch.syspath_prepend(FOLDER)
    monkeypatch.setenv("PYTHONPATH", environment()["PYTHONPATH"])
    importlib.import_module("deepmind_lab")
    for name in [name for name in sys.modules if name.split(".")[0] == "deepmind_lab"]:
        monkeypatch.setitem(sys.modules, name, sys.modules.pop(name))  # gone again after the test
