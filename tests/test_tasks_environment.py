"""What is missing is found before a start; settings, spaces and imports."""

import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from tasks import environment
from tasks.environment import EnvironmentSettings, check_suite, make_vector_env, suite_spaces
from tasks.registry import load_suite
from tasks.suite import Suite, Task

ROOT = Path(__file__).parents[1]
SETTINGS = EnvironmentSettings()


def test_dmlab_without_its_engine() -> None:
    suite = load_suite("dmlab30")
    for call in (
        lambda: check_suite(suite, SETTINGS),
        lambda: make_vector_env(suite, suite.tasks[0], 1, SETTINGS, [0]),
    ):
        with pytest.raises(ValueError, match=r"deepmind_lab.*Docker image.*--suite atari5 runs anywhere") as caught:
            call()
        assert "\n" not in str(caught.value)


def test_dmlab_spaces_need_no_engine() -> None:
    spaces = suite_spaces(load_suite("dmlab30"), EnvironmentSettings(instruction_length=5, action_repeat=2))
    assert (spaces.frame_shape, spaces.frame_dtype, spaces.instruction_length) == ((72, 96, 3), "uint8", 5)
    assert spaces.num_actions == (9,) * 30 and spaces.frames_per_step == 2


def test_atari_without_ale_py(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"ale_py: run pip install -e '\.\[atari\]'"):
        check_suite(load_suite("atari5"), SETTINGS)


def test_all_roms_are_there() -> None:
    check_suite(load_suite("atari57"), SETTINGS)
    check_suite(load_suite("toy"), SETTINGS)


@pytest.mark.parametrize(
    ("adapter", "level", "message"),
    [
        ("atari", "breakuot", "ale_py has no game 'breakuot', did you mean one of: breakout"),
        ("toy", "cacth", "no toy level 'cacth', did you mean one of: catch"),
        ("atri", "pong", "adapter: suite mine has 'atri'"),
    ],
)
def test_unknown_levels(adapter: str, level: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_suite(Suite("mine", adapter, "", (Task("a", level, level),)), SETTINGS)


@pytest.mark.parametrize(
    ("num_envs", "seeds", "split", "message"),
    [(2, [1], "train", "num_envs: 2"), (0, [], "train", "num_envs: 0"), (1, [1], "tst", "split: 'tst'")],
)
def test_bad_arguments(num_envs: int, seeds: list[int], split: str, message: str) -> None:
    toy = load_suite("toy")
    with pytest.raises(ValueError, match=message):
        make_vector_env(toy, toy.tasks[0], num_envs, SETTINGS, seeds, split=split)


def test_settings_are_a_structured_config_with_ranges() -> None:
    config = OmegaConf.structured(EnvironmentSettings)
    merged: Any = OmegaConf.to_object(OmegaConf.merge(config, {"threads": 2, "atari_protocol": "machado"}))
    assert merged == EnvironmentSettings(threads=2, atari_protocol="machado")
    with pytest.raises(OmegaConfBaseException):
        OmegaConf.merge(config, {"atari_protocol": "dopamine"})
    for field in fields(EnvironmentSettings):
        assert field.name in (EnvironmentSettings.__doc__ or "")
        if isinstance(field.default, int) and not isinstance(field.default, bool):
            assert field.metadata["min"] <= field.default <= field.metadata["max"]


def test_import_is_light() -> None:
    code = (
        "import sys, tasks.environment, tasks.registry, tasks.assignment, tasks.seeds\n"
        "heavy = ('torch', 'ale_py', 'deepmind_lab', 'agent', 'launch', 'eval')\n"
        "print([name for name in heavy if name in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
