"""The ledger finds what it has to find; then the short form of tests/faults.py."""

import dataclasses
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fault_envs
import runs
from agent.unroll import Arrays
from fault_ledger import Books, Life, Oracle, Stay, Unroll, audit, audit_remote, compare_lines, describe, read_dump
from fault_shop import Row
from faults import ROWS

LENGTH, BATCH = 5, 2
# For every change, two runs' time; the other rows of the short form, minutes of them, are behind the marker `slow`.
QUICK_ROWS = (
    "actors killed",
    "trap laid",
    "screen gone",
    "run paused",
    "relay killed",
    "listener killed",
    "fuzz with key",
    "fuzz without key",
)
LINE = ("return", "frames", "steps", "policy_version", "actor")


def dump(folder: Path, seeds: tuple[int, ...] = (3, 11), count: int = 4) -> list[Path]:
    """Unrolls as a learner would get them, one file each: `count` of each environment, in turn."""
    folder.mkdir()
    rows = count * LENGTH + 1
    action = np.arange(rows, dtype=np.int32) % 3
    for environment, seed in enumerate(seeds):
        stream = fault_envs.oracle(seed, rows)
        stream["action"] = action
        stream["last_action"] = np.where(stream["first"], -1, np.roll(action, 1))
        stream["log_probs"] = np.log(np.full((rows, 3), 1 / 3, np.float32))
        for i in range(count):
            unroll = {name: column[i * LENGTH : (i + 1) * LENGTH + 1] for name, column in stream.items()}
            places = {"actor": 0, "environment": environment, "version": i, "task": 0, "acted_at": 0.0}
            number = i * len(seeds) + environment
            np.savez(folder / f"unroll_{number:06d}.npz", **unroll, **places, core_state=np.zeros((2, 4), np.float32))
    return sorted(folder.iterdir())


def life(folder: Path, **changes: int) -> Life:
    """As tests/fault_runs.py makes it, of a run that lost nothing: 8 unrolls, all trained on."""
    unrolls, unreadable = read_dump(folder, Oracle().check)
    after = {"updates": 8 // BATCH, "frames": sum(u.frames for u in unrolls), **changes}
    zero = {"updates": 0, "frames": 0}
    return Life(unrolls, unreadable, BATCH, [8], [8], zero, after, {3: 4 * LENGTH + 2, 11: 4 * LENGTH + 1})


def lines(unrolls: list[Unroll]) -> list[dict[str, float]]:
    return [dict(zip(LINE, game, strict=True)) for unroll in unrolls for game in unroll.games]


def change(file: Path, name: str, index: object, value: object) -> None:
    """One number of a dumped unroll."""
    arrays: Arrays = dict(np.load(file))
    arrays[name] = arrays[name].copy()
    arrays[name][index] = value
    np.savez(file, **arrays)  # type: ignore[arg-type]


def test_a_run_that_lost_nothing_has_clean_books(tmp_path):
    dump(tmp_path / "d")
    books = audit([whole := life(tmp_path / "d")], LENGTH)[0]
    assert books.faults() == []
    assert (books.committed, books.consumed, books.kept) == (8, 8, 8)
    assert sum(len(unroll.games) for unroll in whole.unrolls) >= 4
    assert compare_lines([whole], lines(whole.unrolls)).faults() == []


@pytest.mark.parametrize(
    ("name", "index", "value"),
    [
        ("frame", (2, 7, 7, 0), 1), ("reward", 3, -5.0), ("first", 2, True), ("terminated", 1, True), ("frames", 4, 99),
        ("episode_return", 2, 1.0), ("last_action", 2, 7), ("log_probs", (1, 1), 0.0),
    ],
)  # fmt: skip
def test_a_torn_unroll_is_found(tmp_path, name, index, value):
    files = dump(tmp_path / "d")
    change(files[3], name, index, value)
    torn = [unroll.torn for unroll in life(tmp_path / "d").unrolls]
    assert name in torn[3]
    assert not any(torn[:3] + torn[4:])
    assert audit([life(tmp_path / "d", frames=0)], LENGTH)[0].torn == 1


def test_half_of_another_unroll_is_found(tmp_path):
    files = dump(tmp_path / "d")
    arrays, other = dict(np.load(files[2])), dict(np.load(files[3]))
    np.savez(
        files[2], **{n: np.concatenate([a[:3], other[n][3:]]) if a.ndim and n != "core_state" else a for n, a in arrays.items()}
    )
    assert life(tmp_path / "d").unrolls[2].torn


def test_a_doubled_unroll_is_found_also_in_a_later_life(tmp_path):
    files = dump(tmp_path / "d")
    once = life(tmp_path / "d")
    files[5].write_bytes(files[4].read_bytes())
    assert audit([life(tmp_path / "d")], LENGTH)[0].doubled == 1
    again = dataclasses.replace(once, unrolls=once.unrolls[:2], before=once.after, after=once.after)
    assert [books.doubled for books in audit([once, again], LENGTH)] == [0, 2]


def test_a_missing_unroll_is_found_in_the_middle_and_at_the_end(tmp_path):
    for missing in (2, 7):
        dump(folder := tmp_path / str(missing))[missing].unlink()
        found = life(folder, updates=3)
        assert audit([found], LENGTH)[0].lost >= 1, "the ring let go of 8"
        unaware = dataclasses.replace(found, released=[7], committed=[7], rows={})
        assert audit([unaware], LENGTH)[0].lost == (missing == 2), "without the ring, a gap in the middle is seen"
        played = dataclasses.replace(unaware, rows={3: 9 * LENGTH + 1, 11: 3 * LENGTH + 1})
        assert audit([played], LENGTH)[0].lost >= 1, "the environments know that they played more"


def test_a_broken_chain_is_found_where_frames_do_not_say_who_they_are(tmp_path):
    files = dump(tmp_path / "d")
    unrolls = [describe(dict(np.load(file)), lambda arrays: (-1, -1, "")) for file in files]
    whole = dataclasses.replace(life(tmp_path / "d"), unrolls=unrolls, rows={})
    assert audit([whole], LENGTH)[0].faults() == []
    gap = dataclasses.replace(whole, unrolls=unrolls[:2] + unrolls[3:], released=[7], after={"updates": 3, "frames": 0})
    assert audit([gap], LENGTH)[0].lost == 1
    twice = dataclasses.replace(whole, unrolls=unrolls + unrolls[-1:])
    assert audit([twice], LENGTH)[0].doubled == 1


def test_counters_and_lines_that_do_not_fit_are_found(tmp_path):
    dump(tmp_path / "d")
    whole = life(tmp_path / "d")
    frames = whole.after["frames"]
    assert audit([life(tmp_path / "d", frames=frames + 9)], LENGTH)[0].frames_twice == 9
    assert audit([life(tmp_path / "d", frames=frames - 9)], LENGTH)[0].frames_missing == 9
    assert audit([life(tmp_path / "d", updates=6)], LENGTH)[0].lost == 4
    written = lines(whole.unrolls)
    assert compare_lines([whole], written + written[:1]).lines_twice == 1
    assert compare_lines([whole], written[1:]).lines_missing == 1


def test_a_file_cut_off_is_the_last_one_or_an_error(tmp_path):
    files = dump(tmp_path / "d")
    files[-1].write_bytes(files[-1].read_bytes()[:200])
    assert life(tmp_path / "d").unreadable == 1
    files[0].write_bytes(b"")
    with pytest.raises((EOFError, ValueError)):
        life(tmp_path / "d")


def stay(unrolls: list[Unroll], waiting: list[Unroll], dropped: int = 0) -> Stay:
    """Of a machine whose unrolls these are."""
    arrived = len(unrolls)
    committed = arrived + dropped + len(waiting)
    return Stay(committed, arrived + dropped, arrived, dropped, waiting)


def test_unrolls_of_another_machine_are_consumed_unread_dropped_or_waiting(tmp_path):
    """Of one environment each: 3 consumed and 1 waiting; 1 consumed, 1 dropped, 1 unread and 1 consumed."""
    dump(tmp_path / "d")
    whole = life(tmp_path / "d")
    waits, drops, rests = whole.unrolls[6], whole.unrolls[3], whole.unrolls[5]
    consumed = [unroll for unroll in whole.unrolls if unroll not in (waits, drops, rests)]
    frames = sum(unroll.frames for unroll in consumed[:4])
    kept = dataclasses.replace(whole, unrolls=consumed, left=[rests], after={"updates": 2, "frames": frames})
    there = stay([*consumed, rests], [waits], dropped=1)
    books = audit_remote(kept, [there], 1, LENGTH)
    assert books.faults() == []
    assert (books.committed, books.consumed, books.unread, books.dropped, books.waiting) == (8, 5, 1, 1, 1)
    underway = dataclasses.replace(there, waiting=[waits, consumed[0]])
    assert audit_remote(kept, [underway], 1, LENGTH).faults() == [], "one has arrived, and the machine does not know yet"

    def broken(**changes: Any) -> Books:
        return audit_remote(kept, [dataclasses.replace(there, **changes)], 1, LENGTH)

    assert broken(waiting=[]).lost >= 1, "the machine had 8, and 7 are known"
    assert broken(dropped=0, acknowledged=7).lost >= 1, "a gap, and nobody says that it was dropped"
    assert broken(acknowledged=5).lost == 1, "the machine's own numbers do not add up"
    played = dataclasses.replace(kept, rows={3: 9 * LENGTH + 1, 11: 3 * LENGTH + 1})
    assert audit_remote(played, [there], 1, LENGTH).lost >= 1, "the environments played more than was committed"
    twice = dataclasses.replace(kept, unrolls=[*consumed, consumed[1]])
    assert audit_remote(twice, [there], 1, LENGTH).doubled >= 1
    assert audit_remote(dataclasses.replace(kept, left=[]), [there], 1, LENGTH).lost >= 1
    assert audit_remote(kept, [there], 2, LENGTH).lost == 1, "the learner's end misses one more than was dropped"


def played(folder: Path, names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Rows of the short form."""
    path = folder / "faults.json"
    command = [sys.executable, str(runs.ROOT / "tests" / "faults.py"), "--json", str(path), "--only", ",".join(names)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800)
    assert path.exists(), done.stdout + done.stderr
    print(done.stdout)
    results = json.loads(path.read_text(encoding="utf-8"))
    assert done.returncode == int(any(result["verdict"] == "BROKEN" for result in results.values()))
    return results


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    return played(tmp_path_factory.mktemp("faults"), QUICK_ROWS)


@pytest.fixture(scope="module")
def slow_table(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    return played(tmp_path_factory.mktemp("faults"), [row.name for row in ROWS if row.name not in QUICK_ROWS])


def check_row(row: Row, result: dict[str, Any]) -> None:
    """It held, and there was something to lose."""
    if result["not_run"]:
        pytest.skip(result["not_run"])
    assert result["verdict"] == "ok", result["broken"]
    assert len(result["seconds"]) == (1 if row.name.startswith("fuzz") else row.short)
    if row.name not in ("disk full", "rank killed"):  # whose unrolls are not recorded
        assert result["found"]["kept"] > 0, "it would have lost nothing because there was nothing"


@pytest.mark.parametrize("name", QUICK_ROWS)
def test_row(table, name):
    check_row(next(row for row in ROWS if row.name == name), table[name])


@pytest.mark.slow
@pytest.mark.parametrize("row", [row for row in ROWS if row.short and row.name not in QUICK_ROWS], ids=lambda row: row.name)
def test_slow_row(slow_table, row):
    check_row(row, slow_table[row.name])


def test_an_unknown_row_is_refused():
    command = [sys.executable, str(runs.ROOT / "tests" / "faults.py"), "--only", "earthquake"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, "'earthquake'" in done.stderr) == (2, True)
