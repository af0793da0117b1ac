"""Rows that only the stand-in for `deepmind_lab` is held to: where it is stricter, and what it offers to tests."""

import csv
import importlib
import os
import resource
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import deepmind_lab
import numpy as np
from deepmind_lab import levels

from dmlab_rows import FOLDER, LANGUAGE_LEVEL, LEVEL, MAP_LEVEL, NOTHING, SIZE, TURN, Cache, engine, play_to_the_end, refused

PNG = b"\x89PNG\r\n\x1a\n"
SIDES = {  # what pays when the bright patch lies there: left, right, top, bottom
    "left": np.array([-20, 0, 0, 0, 0, 0, 0], np.intc),
    "right": np.array([20, 0, 0, 0, 0, 0, 0], np.intc),
    "forward": np.array([0, 0, 0, 1, 0, 0, 0], np.intc),
    "fire": np.array([0, 0, 0, 0, 1, 0, 0], np.intc),
}
METHODS = {"reset", "step", "observations", "events", "is_running", "num_steps", "observation_spec", "action_spec", "close"}


def it_is_stricter() -> None:
    class Names(list):
        pass

    class Settings(dict):
        pass

    with refused(TypeError):
        deepmind_lab.Lab(LEVEL, Names(["INSTR"]), config=SIZE)
    with refused(TypeError):
        deepmind_lab.Lab(LEVEL, ["INSTR"], config=Settings(SIZE))
    with engine() as lab:
        with refused(RuntimeError):
            deepmind_lab.Lab(LEVEL, ["INSTR"], config=SIZE)
        for wrong in (True, -1, 2**31):
            with refused(ValueError):
                lab.reset(seed=wrong)
        lab.reset(seed=1)
        for action, num_steps in ((np.zeros(14, np.intc)[::2], 4), (NOTHING, 0), (NOTHING, -1)):
            with refused(ValueError):
                lab.step(action, num_steps=num_steps)
    assert {name for name in dir(deepmind_lab.Lab) if not name.startswith("_")} == METHODS


def settings_are_read() -> None:
    for key, wrong in (("width", "wide"), ("height", "-4"), ("mixerSeed", "x"), ("allowHoldOutLevels", "yes")):
        with refused(RuntimeError):
            deepmind_lab.Lab(LEVEL, ["INSTR"], config={**SIZE, key: wrong})
    with refused(RuntimeError):
        deepmind_lab.Lab(LEVEL, ["INSTR"], config=SIZE, renderer="hardware")
    with mock.patch.dict(os.environ, DMLAB_STANDIN_GPU="1"):
        deepmind_lab.Lab(LEVEL, ["INSTR"], config=SIZE, renderer="hardware").close()
        with refused(RuntimeError):
            deepmind_lab.Lab(LEVEL, ["INSTR"], config={**SIZE, "gpuDeviceIndex": "1"}, renderer="hardware")


def without_a_seed_the_second_decides() -> None:
    frames = []
    for second in (1_000.1, 1_000.9, 1_001.0):
        with mock.patch("time.time", return_value=second):
            importlib.reload(deepmind_lab)
        with engine() as lab:
            lab.reset()
            frames.append(lab.observations()["RGB_INTERLEAVED"])
    np.testing.assert_array_equal(frames[0], frames[1])
    assert not np.array_equal(frames[0], frames[2])


def lengths_come_from_the_table_the_variable_or_the_setting() -> None:
    path = Path(__file__).parents[1] / "tasks" / "data" / "dmlab30.csv"
    with path.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(levels.TASKS)
    assert {row["train_level"] for row in rows} | {row["test_level"] for row in rows} == set(levels.LEVELS)
    for row in rows:
        assert levels.LEVELS[row["train_level"]].seconds == float(row["episode_seconds"])

    def frames(**config: str) -> int:
        with engine(FOLDER + "rooms_select_nonmatching_object", **config) as lab:
            lab.reset(seed=1)
            return len(play_to_the_end(lab, NOTHING, 1))

    assert frames() == 12 * 60
    with mock.patch.dict(os.environ, DMLAB_STANDIN_EPISODE_SECONDS="2"):
        assert frames() == 2 * 60
        assert frames(episodeLengthSeconds="0.5") == 30


def the_end_pays_only_what_was_played() -> None:
    def total(num_steps: int) -> float:
        with engine(LEVEL, episodeLengthSeconds="1.05") as lab:  # 63 frames
            lab.reset(seed=2)
            return sum(play_to_the_end(lab, SIDES["left"], num_steps))

    assert total(4) == total(1) == total(1000) > 0


def frames_tell_what_pays() -> None:
    """An oracle that reads pixels and the instruction takes all there is; noise takes a sixth."""
    for task, (_, points) in levels.TASKS.items():
        level = FOLDER + task + ("_train" if task in levels.SPLIT_IN_TWO else "")
        with engine(level, episodeLengthSeconds="8", datasetPath="dummy") as lab:
            totals = []
            for chooser in (_read_the_picture, _at_random(np.random.default_rng(0))):
                lab.reset(seed=3)
                total = 0.0
                while lab.is_running():
                    total += lab.step(chooser(lab.observations()), num_steps=4)
                totals.append(total)
        slots = 8 * 60 // 4
        if level.endswith("keys_doors_puzzle"):
            assert totals[0] == 20 * points + slots - 19
        else:
            assert totals[0] == slots * points, (level, totals)
        assert totals[1] < 0.6 * totals[0], (level, totals)


def _read_the_picture(seen: dict[str, Any]) -> np.ndarray:
    words = seen["INSTR"].split()
    colour = next((rgb for name, rgb in levels.COLOURS.items() if name in words), (255, 255, 255))
    rows, columns = np.nonzero((seen["RGB_INTERLEAVED"] == colour).all(axis=2))
    down, right = rows.mean() / 72 - 0.5, columns.mean() / 96 - 0.5
    if abs(right) > abs(down):
        return SIDES["left" if right < 0 else "right"]
    return SIDES["forward" if down < 0 else "fire"]


def _at_random(random: np.random.Generator) -> Any:
    actions = [*SIDES.values(), NOTHING, -TURN]
    return lambda seen: actions[random.integers(len(actions))]


def images_are_read_where_they_are_needed() -> None:
    with tempfile.TemporaryDirectory() as folder:
        for number in range(1, 2401):
            (Path(folder) / f"{number:04d}.png").write_bytes(PNG)
        for name in ("psychlab_continuous_recognition", "psychlab_arbitrary_visuomotor_mapping"):
            with engine(FOLDER + name, datasetPath=folder, episodeLengthSeconds="5") as lab:
                lab.reset(seed=1)
                assert len(play_to_the_end(lab)) == 75
    with engine(FOLDER + "psychlab_continuous_recognition") as lab, refused(RuntimeError):
        lab.reset(seed=1)
    with engine(FOLDER + "psychlab_arbitrary_visuomotor_mapping") as lab:
        lab.reset(seed=1)
        lab.step(NOTHING, num_steps=60)
        with refused(ValueError):
            lab.step(NOTHING, num_steps=4)
        for call in (lab.events, lab.observations):
            with refused(RuntimeError):
                call()


def maps_are_few_and_fifteen_levels_build_them() -> None:
    builders = 0
    few = {"DMLAB_STANDIN_MAPS": "3", "DMLAB_STANDIN_BUILD_MS": "0"}
    for level in levels.LEVELS:
        with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ, few):
            cache = Cache(folder)
            with engine(level, cache=cache, allowHoldOutLevels="true", datasetPath="dummy") as lab:
                for seed in range(30):
                    lab.reset(seed=seed)
            builders += bool(cache.calls)
            keys = {key for _, key in cache.calls}
            assert (len(keys), len(cache.calls)) in ((0, 0), (3, 33)), (level, keys, len(cache.calls))
    assert builders == 15


def skymazes_build_in_mid_episode() -> None:
    with tempfile.TemporaryDirectory() as folder:
        cache = Cache(folder)
        with engine(FOLDER + "skymaze_irreversible_path_hard", cache=cache) as lab:
            lab.reset(seed=1)
            before = len(cache.calls)
            for _ in range(30):
                lab.step(_read_the_picture(lab.observations()), num_steps=4)
            assert len(cache.calls) > before
            cache.fetch = mock.Mock(side_effect=LookupError)  # type: ignore[method-assign]
            with refused(LookupError):
                for _ in range(30):
                    lab.step(_read_the_picture(lab.observations()), num_steps=4)
            assert lab.is_running()


def maps_of_a_key_are_equal_files() -> None:
    files = []
    for _ in range(2):
        with tempfile.TemporaryDirectory() as folder:
            with engine(MAP_LEVEL, cache=Cache(folder)) as lab:
                lab.reset(seed=1)
            files += [path.read_bytes() for path in Path(folder).iterdir()]
    assert len(files) == 2
    assert files[0] == files[1]


def building_stops_every_thread() -> None:
    ticks: list[float] = []
    stop = threading.Event()

    def tick() -> None:
        while not stop.is_set():
            ticks.append(time.monotonic())
            time.sleep(0.001)  # gives the GIL away, so that the engine need not ask for it
        ticks.append(time.monotonic())

    thread = threading.Thread(target=tick)
    with engine(MAP_LEVEL) as lab, mock.patch.dict(os.environ, DMLAB_STANDIN_BUILD_MS="150"):
        thread.start()
        while not ticks:
            time.sleep(0)
        lab.reset(seed=1)
        stop.set()
        thread.join()
    assert max(np.diff(ticks)) > 0.12


def a_step_is_cheap() -> None:
    costs = []
    for level in (LEVEL, LANGUAGE_LEVEL):
        with engine(level) as lab:
            for _ in range(10):
                lab.reset(seed=1)
                began = time.process_time()
                for _ in range(100):
                    lab.step(TURN, num_steps=4)
                    lab.observations()
                costs.append((time.process_time() - began) / 100)
            assert min(costs) < 0.2e-3, costs


def _ending(play: Callable[[], Any], **variables: str) -> tuple[int, str]:
    """Exit code (negative: signal) of a forked child that plays, and what it wrote to stderr. 0: it just came back."""
    with tempfile.TemporaryFile() as errors:
        child = os.fork()
        if child == 0:
            try:
                resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
                os.dup2(errors.fileno(), 2)
                os.environ.update(variables)
                play()
            except BaseException as error:
                os.write(2, f"{type(error).__name__}: {error}".encode())
                os._exit(99)
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        errors.seek(0)
        return code, errors.read().decode()


def damaged_maps_end_the_process() -> None:
    class Liar:
        def __init__(self, content: bytes | None) -> None:
            self.content = content
            self.lies = content is not None

        def fetch(self, key: str, pk3_path: str) -> bool:
            if self.content is not None:
                Path(pk3_path).write_bytes(self.content)
            return self.lies

        def write(self, key: str, pk3_path: str) -> None:
            self.lies = True  # from the second time on: the file of the first does not count

    def play(content: bytes | None) -> None:
        with engine(MAP_LEVEL, cache=Liar(content)) as lab:
            for _ in range(2):
                lab.reset(seed=2)

    with tempfile.TemporaryDirectory() as folder:
        for seed in (1, 2):
            with engine(MAP_LEVEL, cache=Cache(folder)) as lab:
                lab.reset(seed=seed)
        old, right = (path.read_bytes() for path in sorted(Path(folder).iterdir(), key=lambda path: path.stat().st_mtime_ns))
    flipped = bytearray(right)
    flipped[len(right) // 2] ^= 1
    cases = (
        (right, 0, ""),
        (right[:-100], 1, "BadZipFile"),
        (bytes(flipped), 1, "is torn"),
        (b"", 1, "BadZipFile"),
        (old, 1, "it is another map"),
        (None, 1, "FileNotFoundError"),
    )
    for content, code, message in cases:
        ending = _ending(partial(play, content))
        assert ending[0] == code and message in ending[1], (code, message, ending)


def a_closed_lab_ends_the_process() -> None:
    calls = ("reset", "step", "observations", "events", "num_steps", "observation_spec", "action_spec", "close")
    assert {*calls, "is_running"} == METHODS
    lab = deepmind_lab.Lab(LEVEL, ["INSTR"], config=SIZE)
    lab.reset(seed=1)
    lab.close()
    for call in calls:
        arguments = (NOTHING,) if call == "step" else ()
        ending = _ending(partial(getattr(lab, call), *arguments))
        assert ending[0] == -signal.SIGABRT and "closed Lab" in ending[1], (call, ending)


def faults_come_on_demand() -> None:
    with tempfile.TemporaryDirectory() as folder:
        once = {"DMLAB_STANDIN_FAULT": f"exit@reset:2,once={folder}/flag"}
        cases = (
            ({}, 0, ""),
            ({"DMLAB_STANDIN_MISSING_MAP": "lasertag,rooms_watermaze"}, 1, "is missing"),
            ({"DMLAB_STANDIN_MISSING_MAP": "rooms"}, 0, ""),
            ({"DMLAB_STANDIN_FAULT": "exit@init:1"}, 1, "exit@init:1"),
            ({"DMLAB_STANDIN_FAULT": "exit@step:45"}, 1, "exit@step:45"),
            ({"DMLAB_STANDIN_FAULT": "exit@step:46"}, 0, ""),
            ({"DMLAB_STANDIN_FAULT": "hang@reset:9; abort@reset:3,level=rooms_watermaze"}, -signal.SIGABRT, "abort@reset:3"),
            ({"DMLAB_STANDIN_FAULT": "abort@reset:1,level=explore_goal_locations_small"}, 0, ""),
            ({"DMLAB_STANDIN_FAULT": "error@init:1"}, 99, "RuntimeError: Failed to init environment"),
            ({"DMLAB_STANDIN_FAULT": "error@reset:2"}, 99, "RuntimeError: Failed to start environment"),
            ({"DMLAB_STANDIN_FAULT": "error@step:2"}, 99, "ValueError: Failed to advance environment"),
            ({"DMLAB_STANDIN_FAULT": "abort@rest:1"}, 99, "is not KIND@WHERE:N"),
            ({"DMLAB_STANDIN_FAULT": "abort@reset:1,levle=x"}, 99, "is not KIND@WHERE:N"),
            (once, 1, "exit@reset:2"),
            (once, 0, ""),
        )
        for variables, code, message in cases:
            ending = _ending(_three_episodes, **variables)
            assert ending[0] == code and message in ending[1], (variables, ending)


def _three_episodes() -> None:
    """Three episodes of 15 steps; counts of faults begin anew, as in a fresh process."""
    importlib.reload(deepmind_lab)
    with engine(episodeLengthSeconds="1") as lab:
        for seed in range(3):
            lab.reset(seed=seed)
            play_to_the_end(lab)


def hangs() -> None:
    """No row: meant for a child with a fault that hangs. It has a handler and a thread that never get their turn."""

    def leave() -> None:
        sys.stdin.read()
        os._exit(0)

    threading.Thread(target=leave, daemon=True).start()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    with engine() as lab:
        lab.reset(seed=1)


ROWS = [
    it_is_stricter,
    settings_are_read,
    without_a_seed_the_second_decides,
    lengths_come_from_the_table_the_variable_or_the_setting,
    the_end_pays_only_what_was_played,
    frames_tell_what_pays,
    images_are_read_where_they_are_needed,
    maps_are_few_and_fifteen_levels_build_them,
    skymazes_build_in_mid_episode,
    maps_of_a_key_are_equal_files,
    building_stops_every_thread,
    a_step_is_cheap,
    damaged_maps_end_the_process,
    a_closed_lab_ends_the_process,
    faults_come_on_demand,
]
