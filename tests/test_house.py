"""The layout keeps its rules: who may import whom, what files are called, what every file begins with."""

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("agent", "eval", "launch", "tasks")
FILES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
# package -> what it may import of ours; a module name allows that module only
ALLOWED = {
    "agent": ("agent",),
    "tasks": ("tasks",),
    "launch": ("launch", "agent", "tasks"),
    "eval": ("eval", "agent", "tasks", "launch.config", "launch.records", "launch.screen", "launch"),
}
LAUNCH_FOR_EVAL = {"config", "records", "screen"}


def imports(path: Path) -> list[tuple[str, list[str]]]:
    """Modules that a file imports anywhere, with the names taken from them."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [(alias.name, []) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.append((node.module or "", [alias.name for alias in node.names]))
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_downwards(path):
    package = path.relative_to(ROOT).parts[0]
    for module, names in imports(path):
        if module.split(".")[0] not in PACKAGES:
            continue
        assert any(module == allowed or module.startswith(allowed + ".") for allowed in ALLOWED[package]), module
        if package == "eval" and module == "launch":
            assert set(names) <= LAUNCH_FOR_EVAL
        if package == "eval" and module.startswith("launch."):
            assert module.split(".")[1] in LAUNCH_FOR_EVAL


def test_no_circles():
    graph = {}
    for path in FILES:
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        targets = set()
        for module, names in imports(path):
            targets |= {module, *(f"{module}.{n}" for n in names)}
        graph[name] = targets
    graph = {name: {t for t in targets if t in graph and t != name} for name, targets in graph.items()}
    state: dict[str, int] = {}

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert state.get(name) != 1, f"circle: {' -> '.join((*trail, name))}"
        if state.get(name) == 2:
            return
        state[name] = 1
        for target in graph[name]:
            visit(target, (*trail, name))
        state[name] = 2

    for name in graph:
        visit(name, ())


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_say_what_they_are_for(path):
    assert path.read_text(encoding="utf-8").startswith('"""')
    if path.parent.name in ("launch", "eval"):
        assert path.stem not in sys.stdlib_module_names or path.stem == "__init__"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_forks_and_nothing_is_pickled(path):
    """Roles are command lines: no start method to get wrong, no lock that a killed holder keeps."""
    modules = {module.split(".")[0] for module, _ in imports(path)}
    assert not modules & {"multiprocessing", "pickle", "concurrent"}
    assert "os.fork" not in path.read_text(encoding="utf-8")


def test_setup_lists_every_package_and_ships_the_data():
    text = (ROOT / "setup.py").read_text(encoding="utf-8")
    for path in FILES:
        package = ".".join(path.parent.relative_to(ROOT).parts)
        assert f'"{package}"' in text, package
    assert "*.csv" in text
    assert "*.yaml" in text
