"""The contract of `deepmind_lab`, row by row: each function opens engines of its own, and fails by an exception.

Run as a program in a child process: `python dmlab_rows.py NAME...` plays the named rows one after the other and prints
one line for each. It imports nothing of the project, so that it runs wherever the engine is.
"""

import importlib
import json
import re
import sys
import tempfile
import traceback
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import deepmind_lab
import numpy as np

MARK = "ROW "
FOLDER = "contributed/dmlab30/"
LEVEL = FOLDER + "rooms_watermaze"
MAP_LEVEL = FOLDER + "explore_goal_locations_small"
LANGUAGE_LEVEL = FOLDER + "language_select_described_object"
SIZE = {"width": "96", "height": "72"}
NOTHING = np.zeros(7, np.intc)
TURN = np.array([20, 0, 0, 1, 0, 0, 0], np.intc)


@contextmanager
def engine(
    level: str = LEVEL, names: tuple[str, ...] = ("RGB_INTERLEAVED", "INSTR"), cache: Any = None, **config: str
) -> Iterator:
    """A Lab of the usual size, closed at the end."""
    lab = deepmind_lab.Lab(level, list(names), config={**SIZE, **config}, renderer="software", level_cache=cache)
    try:
        yield lab
    finally:
        lab.close()


@contextmanager
def refused(*errors: type[BaseException]) -> Iterator[None]:
    """The block has to raise one of `errors`."""
    try:
        yield
    except errors:
        return
    raise AssertionError(f"not refused: one of {[error.__name__ for error in errors]} was due")


def play_to_the_end(lab: Any, action: np.ndarray = TURN, num_steps: int = 4) -> list[float]:
    """The rewards of all steps until the episode is over."""
    rewards = []
    while lab.is_running():
        rewards.append(lab.step(action, num_steps=num_steps))
        assert len(rewards) < 100_000, "the episode never ends"
    return rewards


def constructor_takes_lists_of_str() -> None:
    for wrong in (("RGB_INTERLEAVED",), None, "RGB_INTERLEAVED", [3]):
        with refused(TypeError):
            deepmind_lab.Lab(LEVEL, wrong, config=SIZE)
    with refused(ValueError):
        deepmind_lab.Lab(LEVEL, ["NO_SUCH_OBSERVATION"], config=SIZE)


def config_maps_str_to_str() -> None:
    for wrong in (None, ["width"], {"width": 96}, {96: "width"}, {"allowHoldOutLevels": True}, {"datasetPath": None}):
        with refused(TypeError):
            deepmind_lab.Lab(LEVEL, ["RGB_INTERLEAVED"], config=wrong)


def sizes_are_multiples_of_four() -> None:
    for key, wrong in (("width", "94"), ("height", "70")):
        with refused(RuntimeError):
            deepmind_lab.Lab(LEVEL, ["RGB_INTERLEAVED"], config={**SIZE, key: wrong})
    with engine(width="84", height="84", names=("RGB_INTERLEAVED",)) as lab:
        lab.reset(seed=1)
        assert lab.observations()["RGB_INTERLEAVED"].shape == (84, 84, 3)


def renderers_are_two() -> None:
    with refused(RuntimeError):
        deepmind_lab.Lab(LEVEL, ["RGB_INTERLEAVED"], config=SIZE, renderer="opengl")
    with refused(TypeError):
        deepmind_lab.Lab(LEVEL, ["RGB_INTERLEAVED"], config=SIZE, renderer=None)


def unknown_levels_are_refused_at_once() -> None:
    with refused(RuntimeError):
        deepmind_lab.Lab(FOLDER + "no_such_level", ["RGB_INTERLEAVED"], config=SIZE)


def seeds_are_python_ints() -> None:
    with engine() as lab:
        for wrong in (np.int64(1), np.int32(1), 1.0, "1"):
            with refused(ValueError):
                lab.reset(seed=wrong)
        assert not lab.is_running()
        for right in (0, 2**31 - 1):
            lab.reset(seed=right)
            assert lab.is_running()
        with refused(TypeError):
            lab.reset(episode=1.5, seed=1)


def a_seed_fixes_the_episode() -> None:
    def first_frames(seed: int) -> list[np.ndarray]:
        lab.reset(episode=0, seed=seed)
        frames = []
        for _ in range(5):
            frames.append(lab.observations()["RGB_INTERLEAVED"])
            lab.step(TURN, num_steps=4)
        return frames

    with engine(names=("RGB_INTERLEAVED",)) as lab:
        frames = first_frames(7)
        np.testing.assert_array_equal(frames, first_frames(7))
        assert not np.array_equal(frames, first_frames(8))
        assert not np.array_equal(frames[0], frames[-1])


def a_mixer_seed_makes_other_episodes() -> None:
    frames = []
    for mixer_seed in ("0", "0", "1611489005"):
        with engine(mixerSeed=mixer_seed) as lab:
            lab.reset(episode=0, seed=7)
            lab.step(TURN, num_steps=40)
            frames.append(lab.observations()["RGB_INTERLEAVED"])
    np.testing.assert_array_equal(frames[0], frames[1])
    assert not np.array_equal(frames[0], frames[2])


def actions_are_intc_vectors_of_seven() -> None:
    with engine() as lab:
        lab.reset(seed=1)
        wrongs = (
            NOTHING.tolist(),
            None,
            3,
            np.zeros(6, np.intc),
            np.zeros(8, np.intc),
            np.zeros((1, 7), np.intc),
            np.zeros((), np.intc),
            np.zeros(7, np.int64),
            np.zeros(7, np.int8),
            np.zeros(7, np.float32),
        )
        for wrong in wrongs:
            with refused(TypeError, ValueError):
                lab.step(wrong, num_steps=4)
        with refused(TypeError):
            lab.step(NOTHING, num_steps=4.0)
        assert lab.num_steps() == 0
        assert lab.is_running()
        lab.step(np.array([9999, -9999, 5, -5, 7, 7, 7], np.intc), num_steps=4)  # values are not checked


def states_allow_what_they_allow() -> None:
    with engine(episodeLengthSeconds="2") as lab:
        assert lab.is_running() is False
        for call in (lambda: lab.step(NOTHING, num_steps=4), lab.observations, lab.events):
            with refused(RuntimeError):
                call()
        for seed in (1, 2):
            lab.reset(seed=seed)
            assert lab.is_running() is True
            assert lab.events() is not None
            lab.observations()
            rewards = play_to_the_end(lab)
            assert all(type(reward) is float for reward in rewards)
            for _ in range(2):  # it never resets by itself, and there is no terminal observation
                with refused(RuntimeError):
                    lab.step(NOTHING, num_steps=4)
                with refused(RuntimeError):
                    lab.observations()
            assert lab.is_running() is False
        lab.reset(seed=3)
        lab.step(NOTHING, num_steps=4)
        lab.reset(seed=4)  # allowed in mid-episode
        assert lab.num_steps() == 0


def num_steps_counts_what_was_asked_for() -> None:
    with engine(episodeLengthSeconds="2") as lab:
        lab.reset(seed=1)
        assert lab.num_steps() == 0
        lab.step(NOTHING)
        assert lab.num_steps() == 1
        calls = len(play_to_the_end(lab, num_steps=50))
        assert lab.num_steps() == 1 + 50 * calls
        lab.reset(seed=1)
        assert lab.num_steps() == 0


def observations_are_fresh_copies() -> None:
    with engine() as lab:
        lab.reset(seed=1)
        kept = lab.observations()["RGB_INTERLEAVED"]
        assert (kept.shape, kept.dtype, kept.flags.c_contiguous) == ((72, 96, 3), np.uint8, True)
        before = kept.copy()
        for _ in range(10):
            lab.step(TURN, num_steps=4)
        np.testing.assert_array_equal(kept, before)
        seen = lab.observations()["RGB_INTERLEAVED"]
        assert not np.array_equal(seen, before)
        right = seen.copy()
        seen[:] = 0
        np.testing.assert_array_equal(lab.observations()["RGB_INTERLEAVED"], right)


def specs_tell_the_truth() -> None:
    with engine(names=()) as lab:
        spec = {entry["name"]: entry for entry in lab.observation_spec()}
        assert all(set(entry) == {"name", "dtype", "shape"} for entry in spec.values())
        wanted = ("RGB_INTERLEAVED", "RGBD_INTERLEAVED", "RGB", "RGBD", "INSTR", "VEL.TRANS", "VEL.ROT")
        wanted += ("DEBUG.POS.TRANS", "DEBUG.POS.ROT")
        assert set(wanted) <= set(spec)
        assert spec["RGB_INTERLEAVED"] == {"name": "RGB_INTERLEAVED", "dtype": np.uint8, "shape": (72, 96, 3)}
        assert spec["RGBD"]["shape"] == (4, 72, 96)
        assert spec["INSTR"] == {"name": "INSTR", "dtype": str, "shape": ()}
        assert spec["DEBUG.POS.TRANS"] == {"name": "DEBUG.POS.TRANS", "dtype": np.float64, "shape": (3,)}
        actions = [(entry["name"], entry["min"], entry["max"]) for entry in lab.action_spec()]
        assert actions == [
            ("LOOK_LEFT_RIGHT_PIXELS_PER_FRAME", -512, 512),
            ("LOOK_DOWN_UP_PIXELS_PER_FRAME", -512, 512),
            ("STRAFE_LEFT_RIGHT", -1, 1),
            ("MOVE_BACK_FORWARD", -1, 1),
            ("FIRE", 0, 1),
            ("JUMP", 0, 1),
            ("CROUCH", 0, 1),
        ]
    with engine(names=wanted) as lab:
        lab.reset(seed=1)
        seen = lab.observations()
        assert set(seen) == set(wanted)
        for name in wanted:
            if name == "INSTR":
                assert type(seen[name]) is str
            else:
                assert (seen[name].shape, seen[name].dtype) == (spec[name]["shape"], spec[name]["dtype"]), name
                assert seen[name].flags.c_contiguous and seen[name].flags.owndata, name
        np.testing.assert_array_equal(seen["RGB"].transpose(1, 2, 0), seen["RGB_INTERLEAVED"])


def instructions_exist_in_language_levels_only() -> None:
    for level, there in ((LANGUAGE_LEVEL, True), (LEVEL, False)):
        with engine(level) as lab:
            lab.reset(seed=1)
            lab.step(NOTHING, num_steps=4)
            text = lab.observations()["INSTR"]
            assert type(text) is str
            assert bool(text.strip()) is there, (level, text)


def held_out_levels_need_leave() -> None:
    level = FOLDER + "rooms_collect_good_objects_test"
    for config in ({}, {"allowHoldOutLevels": "false"}, {"allowHoldOutLevels": "True"}):
        with refused(RuntimeError):
            deepmind_lab.Lab(level, ["RGB_INTERLEAVED"], config={**SIZE, **config})
    with engine(level, allowHoldOutLevels="true") as lab:
        lab.reset(seed=1)


def missing_images_are_found_late() -> None:
    for name in ("psychlab_continuous_recognition", "psychlab_arbitrary_visuomotor_mapping"):
        for config in ({}, {"datasetPath": "/no/such/folder"}):
            with engine(FOLDER + name, **config) as lab:  # the constructor does not mind
                with refused(RuntimeError, ValueError):
                    lab.reset(seed=1)
                    play_to_the_end(lab)
                assert not lab.is_running()
        with engine(FOLDER + name, datasetPath="dummy", episodeLengthSeconds="3") as lab:
            lab.reset(seed=1)
            assert len(play_to_the_end(lab)) >= 3 * 60 // 4


def close_leaves_is_running() -> None:
    lab = deepmind_lab.Lab(LEVEL, ["RGB_INTERLEAVED"], config=SIZE)
    lab.reset(seed=1)
    assert lab.close() is True
    assert lab.is_running() is False


class Cache:
    """A level cache that keeps files in a folder and writes down every call."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)
        self.calls: list[tuple[str, str]] = []

    def fetch(self, key: str, pk3_path: str) -> bool:
        self.calls.append(("fetch", key))
        assert type(key) is str and re.fullmatch(r"[A-Za-z0-9_.-]+", key)
        kept = self.folder / key
        if kept.exists():
            Path(pk3_path).write_bytes(kept.read_bytes())
        return kept.exists()

    def write(self, key: str, pk3_path: str) -> None:
        self.calls.append(("write", key))
        with zipfile.ZipFile(pk3_path) as archive:
            assert archive.testzip() is None
        (self.folder / key).write_bytes(Path(pk3_path).read_bytes())


def a_level_cache_is_asked_then_offered() -> None:
    with tempfile.TemporaryDirectory() as folder:
        cache = Cache(folder)
        with engine(MAP_LEVEL, cache=cache) as lab:
            assert cache.calls == []
            lab.reset(episode=1, seed=123)
            lab.step(NOTHING)
            key = cache.calls[0][1]
            assert cache.calls == [("fetch", key), ("write", key)]
            lab.reset(episode=1, seed=123)
            lab.step(NOTHING)
            assert cache.calls[2:] == [("fetch", key)]
    with engine(MAP_LEVEL, cache=None) as lab:
        lab.reset(seed=123)


def what_a_level_cache_raises_comes_out_of_reset() -> None:
    class Fetching:
        def fetch(self, key: str, pk3_path: str) -> bool:
            raise LookupError("from fetch")

        def write(self, key: str, pk3_path: str) -> None:
            raise AssertionError("not called after an exception")

    class Writing:
        def fetch(self, key: str, pk3_path: str) -> bool:
            return False

        def write(self, key: str, pk3_path: str) -> None:
            raise OverflowError("from write")

    for cache, error in ((Fetching(), LookupError), (Writing(), OverflowError), (object(), AttributeError)):
        with engine(MAP_LEVEL, cache=cache) as lab:
            with refused(error):
                lab.reset(seed=123)
            assert not lab.is_running()


def all_levels_play() -> None:
    path = Path(__file__).parents[1] / "tasks" / "data" / "dmlab30.csv"
    lines = path.read_text(encoding="utf-8").splitlines()
    columns = lines[0].split(",")
    played = set()
    for line in lines[1:]:
        row = dict(zip(columns, line.split(","), strict=True))
        for level in {row["train_level"], row["test_level"]}:
            played.add(level)
            with engine(level, allowHoldOutLevels="true", datasetPath="dummy") as lab:
                lab.reset(seed=5)
                frames = []
                for _ in range(50):
                    lab.step(TURN, num_steps=4)
                    seen = lab.observations()
                    frames.append(seen["RGB_INTERLEAVED"])
                assert any(not np.array_equal(frames[0], frame) for frame in frames), level
                assert bool(seen["INSTR"]) is (row["has_instruction"] == "1"), level
    assert len(played) == 32


ROWS: list[Callable[[], None]] = [
    constructor_takes_lists_of_str,
    config_maps_str_to_str,
    sizes_are_multiples_of_four,
    renderers_are_two,
    unknown_levels_are_refused_at_once,
    seeds_are_python_ints,
    a_seed_fixes_the_episode,
    a_mixer_seed_makes_other_episodes,
    actions_are_intc_vectors_of_seven,
    states_allow_what_they_allow,
    num_steps_counts_what_was_asked_for,
    observations_are_fresh_copies,
    specs_tell_the_truth,
    instructions_exist_in_language_levels_only,
    held_out_levels_need_leave,
    missing_images_are_found_late,
    close_leaves_is_running,
    a_level_cache_is_asked_then_offered,
    what_a_level_cache_raises_comes_out_of_reset,
    all_levels_play,
]


def play(row: Callable[[], None]) -> str | None:
    """Where a row failed, None where it holds."""
    try:
        row()
    except BaseException:
        return traceback.format_exc()
    return None


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        module, name = argument.split(".")
        print(MARK + json.dumps([name, "began"]), flush=True)
        print(MARK + json.dumps([name, play(getattr(importlib.import_module(module), name))]), flush=True)
