"""Folders and locks in places that everybody can write to."""

import os
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from launch import process


@pytest.fixture
def shared(tmp_path, monkeypatch):
    """Stands for the folders that all users of a machine share."""
    (folder := tmp_path / "shared").mkdir()
    monkeypatch.setattr(process, "memory_root", lambda: folder)
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def test_mapped_files_of_dead_runs_are_removed(shared, tmp_path):
    mine, lock = process.make_memory_folder(tmp_path / "mine")
    assert f"-{os.getpid()}-" in mine.name
    dead, other = process.make_memory_folder(tmp_path / "dead")
    other.close()  # as the kernel does when a process dies
    starting = shared / f"{process.PREFIX}0000-1-x"
    starting.mkdir()
    # Locks of one process do not exclude each other on every system, so another one looks.
    code = f"from pathlib import Path; from launch import process; process.memory_root = lambda: Path({str(shared)!r})"
    command = [sys.executable, "-c", f"{code}; process.remove_stale_folders()"]
    subprocess.run(command, check=True, env={**os.environ, "TMPDIR": str(shared)})
    assert (mine.exists(), dead.exists(), starting.exists()) == (True, False, True)
    assert (process.scratch_folder(mine).exists(), process.scratch_folder(dead).exists()) == (True, False)
    process.remove_folders(mine)
    assert not mine.exists() and not process.scratch_folder(mine).exists()
    os.utime(starting, (0, 0))
    process.remove_stale_folders()
    assert not starting.exists()
    lock.close()


@pytest.mark.parametrize("link", ["symlink_to", "hardlink_to"])
def test_a_trap_in_the_shared_folder_harms_nothing(shared, tmp_path, link):
    (victim := tmp_path / "victim").write_text("precious")
    (evil := shared / f"{process.PREFIX}0-1-evil").mkdir()
    getattr(evil / process.OWNER, link)(victim)
    os.utime(evil, (0, 0))
    process.remove_stale_folders()
    with pytest.raises(ValueError, match=r"owner is .* instead of a lock: remove it"):
        process.hold(evil / process.OWNER)
    assert victim.read_text() == "precious"


def test_folders_of_other_users_are_left_alone(shared, monkeypatch):
    (theirs := shared / f"{process.PREFIX}0-1-x").mkdir()
    (scratch := shared / f"{process.SCRATCH}{process.PREFIX}0-2-x").mkdir()
    (theirs / process.OWNER).write_text("1")
    monkeypatch.setattr(os, "geteuid", lambda: shared.stat().st_uid + 1)
    process.remove_stale_folders()
    assert theirs.exists() and scratch.exists()
    assert (theirs / process.OWNER).read_text() == "1"


def test_a_linked_folder_of_scratch_files_is_not_emptied(shared, tmp_path):
    (victim := tmp_path / "victim").mkdir()
    (victim / "file").touch()
    (shared / f"{process.SCRATCH}{process.PREFIX}0-2-x").symlink_to(victim)
    (shared / f"{process.PREFIX}0-2-y").symlink_to(victim)
    os.utime(victim, (0, 0))
    process.remove_stale_folders()
    assert (victim / "file").exists()


def test_what_a_run_makes_in_shared_folders_is_its_own(shared, tmp_path, monkeypatch):
    names = iter(["seen", "new"])
    real = tempfile.mkdtemp

    def first_is_taken(**places):
        folder = real(**places)
        if next(names) == "seen":  # somebody watches, and puts a folder where ours would go
            (shared / f"{process.SCRATCH}{Path(folder).name}").mkdir()
        return folder

    monkeypatch.setattr(tempfile, "mkdtemp", first_is_taken)
    folder, lock = process.make_memory_folder(tmp_path / "run")
    lock.close()
    assert next(names, None) is None
    assert len(list(shared.glob(f"{process.PREFIX}*"))) == 1
    for path in (folder, process.scratch_folder(folder)):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
