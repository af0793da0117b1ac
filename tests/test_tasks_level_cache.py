"""The level cache never raises, never serves a damaged map, and keeps its size, whatever is done to its folder."""

import os
import random
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from runs import wait_for
from tasks.level_cache import SUFFIX, LevelCache

MAP_BYTES = 50_000


def build(path: Path, key: str, size: int = MAP_BYTES) -> Path:
    """A map whose content says which one it is."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("key", key)
        archive.writestr("map", random.Random(key).randbytes(size))
    return path


def key_of(path: Path) -> str:
    with zipfile.ZipFile(path) as archive:
        return archive.read("key").decode()


def used(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


@contextmanager
def small_disk(path: Path) -> Iterator[Path]:
    """A file system of 512 kB in memory."""
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(path)]
    mounted = subprocess.run(command, capture_output=True, text=True, check=False)
    if mounted.returncode != 0:
        pytest.skip(f"only root may mount the small disk of this test: {mounted.stderr.strip()}")
    try:
        yield path
    finally:
        subprocess.run(["umount", str(path)], check=True)


@pytest.fixture
def here(tmp_path: Path) -> Path:
    (tmp_path / "engine").mkdir()
    return tmp_path / "engine"


def test_a_lock_that_is_somebody_s_link_is_not_followed(tmp_path: Path, here: Path) -> None:
    (folder := tmp_path / "cache").mkdir()
    (folder / "lock").symlink_to(tmp_path / "elsewhere")
    cache = LevelCache(folder, 10**6)
    cache.write("k", str(build(here / "a.pk3", "k")))
    assert not (tmp_path / "elsewhere").exists()
    assert not cache.fetch("k", str(here / "b.pk3"))


def test_a_map_written_once_is_fetched(tmp_path: Path, here: Path) -> None:
    cache = LevelCache(tmp_path / "cache", 10**6)
    assert not cache.fetch("k", str(here / "a.pk3"))
    assert not (here / "a.pk3").exists()
    size = build(here / "a.pk3", "k").stat().st_size
    cache.write("k", str(here / "a.pk3"))
    assert (cache.hits, cache.misses, cache.bytes) == (0, 1, size)
    assert cache.build_seconds > 0
    other = LevelCache(tmp_path / "cache", 10**6)
    assert other.fetch("k", str(here / "b.pk3"))
    assert key_of(here / "b.pk3") == "k"
    assert (other.hits, other.misses, other.bytes, other.build_seconds) == (1, 0, size, 0)


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "folder"])
def test_a_damaged_map_is_a_miss_and_is_dropped(tmp_path: Path, here: Path, damage: str) -> None:
    cache = LevelCache(tmp_path / "cache", 10**6)
    cache.write("k", str(build(here / "a.pk3", "k")))
    kept = tmp_path / "cache" / f"k{SUFFIX}"
    content = kept.read_bytes()
    if damage == "folder":
        kept.unlink()
        kept.mkdir()
    else:
        middle = len(content) // 2
        flipped = content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
        kept.write_bytes({"cut": content[:middle], "flipped": flipped, "empty": b""}[damage])
    assert not cache.fetch("k", str(here / "b.pk3"))
    assert not (here / "b.pk3").exists()
    assert damage == "folder" or not kept.exists()
    cache.write("k", str(here / "a.pk3"))
    assert cache.fetch("k", str(here / "b.pk3")) == (damage != "folder")


def test_what_is_not_whole_or_not_a_file_name_is_not_kept(tmp_path: Path, here: Path) -> None:
    cache = LevelCache(tmp_path / "cache", 10**6)
    (here / "half.pk3").write_bytes(build(here / "a.pk3", "k").read_bytes()[:1000])
    cache.write("k", str(here / "half.pk3"))
    cache.write("gone", str(here / "none.pk3"))
    for key in ("../k", "", "a/b", ".hidden", "k\0"):
        cache.write(key, str(here / "a.pk3"))
        assert not cache.fetch(key, str(here / "b.pk3"))
    assert not (tmp_path / "cache").exists() or not list((tmp_path / "cache").glob(f"*{SUFFIX}"))
    assert sorted(path.name for path in tmp_path.iterdir() if path.suffix == SUFFIX) == []


def test_the_longest_unread_go_first_and_the_cap_holds(tmp_path: Path, here: Path) -> None:
    folder = tmp_path / "cache"
    size = build(here / "a.pk3", "0").stat().st_size
    cache = LevelCache(folder, 3 * size + size // 2)
    for index in range(3):
        cache.write(str(index), str(build(here / "a.pk3", str(index))))
        os.utime(folder / f"{index}{SUFFIX}", (index, index))
    assert cache.fetch("0", str(here / "b.pk3"))  # now 1 is the longest unread
    cache.write("3", str(build(here / "a.pk3", "3")))
    assert {path.stem for path in folder.glob(f"*{SUFFIX}")} == {"0", "2", "3"}
    cache.write("large", str(build(here / "a.pk3", "large", 4 * size)))
    assert {path.stem for path in folder.glob(f"*{SUFFIX}")} == {"0", "2", "3"}
    assert used(folder) <= 3 * size + size // 2


def test_the_half_written_file_of_a_dead_process_goes_after_an_hour(tmp_path: Path, here: Path) -> None:
    cache = LevelCache(tmp_path / "cache", 10**6)
    cache.write("a", str(build(here / "a.pk3", "a")))
    old, new = tmp_path / "cache" / ".part-old", tmp_path / "cache" / ".part-new"
    old.write_bytes(b"x")
    new.write_bytes(b"x")
    os.utime(old, (time.time() - 4000,) * 2)
    cache.write("b", str(build(here / "a.pk3", "b")))
    assert (old.exists(), new.exists()) == (False, True)


def test_a_folder_that_cannot_be_written_still_serves(tmp_path: Path, here: Path) -> None:
    with small_disk(tmp_path / "disk") as disk:
        cache = LevelCache(disk / "cache", 10**6)
        cache.write("k", str(build(here / "a.pk3", "k")))
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        assert cache.fetch("k", str(here / "b.pk3")) and key_of(here / "b.pk3") == "k"
        assert not cache.fetch("n", str(here / "c.pk3"))
        cache.write("n", str(here / "a.pk3"))
        assert [path.stem for path in (disk / "cache").glob(f"*{SUFFIX}")] == ["k"]


def test_a_file_in_the_place_of_the_folder_is_a_miss(tmp_path: Path, here: Path) -> None:
    build(here / "a.pk3", "k")
    blocked = tmp_path / "file"
    blocked.write_text("not a folder", encoding="utf-8")
    cache = LevelCache(blocked, 10**6)
    assert not cache.fetch("k", str(here / "d.pk3"))
    cache.write("k", str(here / "a.pk3"))


HAMMER = """
import random, sys
from pathlib import Path
from tasks.level_cache import LevelCache
from test_tasks_level_cache import build, key_of
folder, mine, seed, rounds, cap = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5])
cache, draw = LevelCache(folder, cap), random.Random(seed)
for _ in range(rounds):
    key = f"map{draw.randrange(30)}"
    target = mine / "level.pk3"
    if cache.fetch(key, str(target)):
        assert key_of(target) == key, "a wrong map"
    else:
        cache.write(key, str(build(target, key)))
    target.unlink(missing_ok=True)
    if draw.random() < 0.05:
        kept = folder / f"map{draw.randrange(30)}.pk3"
        try:
            kept.write_bytes(kept.read_bytes()[: draw.randrange(40_000)])
        except OSError:
            pass
print(cache.hits, cache.misses)
"""


def hammer(folder: Path, tmp_path: Path, cap: int, rounds: int) -> list[tuple[int, int]]:
    """Eight processes on one cache, some of whose entries are damaged on the way; the cap is watched meanwhile."""
    processes = []
    for number in range(8):
        mine = tmp_path / f"engine{number}"
        mine.mkdir(exist_ok=True)
        arguments = [str(folder), str(mine), str(number), str(rounds), str(cap)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
        processes.append(
            subprocess.Popen(
                [sys.executable, "-c", HAMMER, *arguments],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=environment,
            )
        )
    seen = []

    def all_ended() -> bool:
        if folder.is_dir():
            try:
                seen.append(used(folder))
            except OSError:
                pass  # an entry went between the listing and the look
        return all(process.poll() is not None for process in processes)

    wait_for(all_ended, timeout=120)
    results = []
    for process in processes:
        out, errors = process.communicate()
        assert process.returncode == 0, errors
        results.append((int(out.split()[0]), int(out.split()[1])))
    assert max(seen) <= cap
    return results


def test_eight_processes_hammer_one_cache(tmp_path: Path) -> None:
    cap = 20 * (MAP_BYTES + 1000)
    counts = hammer(tmp_path / "cache", tmp_path, cap, rounds=30)
    assert sum(hits for hits, _ in counts) > 50 and sum(misses for _, misses in counts) > 30
    assert not list((tmp_path / "cache").glob(".part-*"))


def test_eight_processes_hammer_a_full_disk(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk") as disk:
        counts = hammer(disk / "cache", tmp_path, 10**9, rounds=20)
        assert sum(misses for _, misses in counts) > 50
