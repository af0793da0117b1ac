"""Checkpoints: whole or not at all, plain, complete; heads by name; generators; the command."""

import json
import pickle
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import agent_children as children
import agent_reference as reference
from agent import checkpoint
from agent.learner import Learner
from agent.losses import LossSettings
from agent.network import Network, NetworkSpec
from agent.optimisers import OptimiserSettings

ROOT = Path(__file__).parents[1]
SPEC = reference.small_spec({"a": 2, "café": 3}, instruction_length=2)


def content(frames: int = 10**10 + 1, spec: NetworkSpec = SPEC, seed: int = 0) -> dict[str, Any]:
    network = reference.make_network(spec, seed)
    return {
        "counters": {"frames": frames, "steps": 7, "seconds": 1.5},
        "network": spec.to_dict(),
        "parameters": network.state_dict(),
        "optimiser": {"core.input.weight": torch.ones(2)},
        "task_counters": {"a": {"frames": 3}, "café": {"frames": 4}},
        "generators": checkpoint.generator_state(),
    }


def assert_whole(run_dir: Path, frames: int) -> None:
    """The newest checkpoint is the one of `frames`, and it can be read to its end."""
    assert checkpoint.load(run_dir)["counters"]["frames"] == frames
    assert checkpoint.find(run_dir).name == f"checkpoint-{frames:015d}.pt"


def files(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir())


def test_what_is_saved_comes_back_and_is_plain(tmp_path: Path) -> None:
    """Tensors and plain types only: torch's own weights_only reader takes the file, without our code."""
    saved = content()
    path = checkpoint.save(tmp_path, saved, keep=2)
    found = torch.load(path, weights_only=True)
    assert found.keys() == {*saved, "format", "parameter_hash"}
    for name in ("counters", "network", "task_counters"):
        assert found[name] == saved[name]
    assert type(found["counters"]["frames"]) is int
    for name, value in saved["parameters"].items():
        assert torch.equal(found["parameters"][name], value)
    for where in (tmp_path, tmp_path / "checkpoints", path):
        assert checkpoint.find(where) == path
        assert checkpoint.load(where)["counters"] == saved["counters"]


def test_the_network_comes_from_the_checkpoint_alone(tmp_path: Path) -> None:
    spec = reference.small_spec(
        {"b": 4, "keys": 2}, (20, 20, 1), "uint8", instruction_length=3, torso="small", policy_head="shared"
    )
    checkpoint.save(tmp_path, content(spec=spec, seed=5), keep=2)
    network, names = checkpoint.load_network(tmp_path)
    assert names == ("b", "keys") and network.spec == spec
    expected = reference.make_network(spec, 5)
    batch = reference.random_batch(np.random.default_rng(0), spec, 3, 2)
    rows, tasks = reference.tensors(batch), batch["task"].tolist()
    torch.testing.assert_close(
        network(rows, rows["core_state"], tasks), expected(rows, rows["core_state"], tasks), rtol=0, atol=0
    )


def test_only_the_newest_are_kept_and_the_pointer_names_the_newest(tmp_path: Path) -> None:
    for frames in (5, 40, 300, 2000):
        checkpoint.save(tmp_path, content(frames), keep=2)
        assert_whole(tmp_path, frames)
    assert files(tmp_path) == ["checkpoint-000000000000300.pt", "checkpoint-000000000002000.pt", "latest"]
    checkpoint.save(tmp_path, content(10**10), keep=1)
    assert files(tmp_path) == ["checkpoint-000010000000000.pt", "latest"]


def test_the_file_just_written_is_never_the_one_removed(tmp_path: Path) -> None:
    """After going back to fewer frames, the newest has not the largest number."""
    for frames in (100, 200, 50):
        checkpoint.save(tmp_path, content(frames), keep=1)
        assert_whole(tmp_path, frames)


@pytest.mark.parametrize("num_bytes", [0, 1, 100, 5_000])
def test_a_full_disk_leaves_the_checkpoint_before(tmp_path: Path, num_bytes: int) -> None:
    checkpoint.save(tmp_path, content(1), keep=2)
    before = files(tmp_path)
    assert checkpoint.find(tmp_path).stat().st_size > 5_000
    with reference.full_disk(num_bytes), pytest.raises(OSError, match=r"cannot write .*checkpoint-0+2\.pt.*before it is whole"):
        checkpoint.save(tmp_path, content(2), keep=2)
    assert files(tmp_path) == before, "nothing half-written stays"
    assert_whole(tmp_path, 1)
    checkpoint.save(tmp_path, content(2), keep=2)
    assert_whole(tmp_path, 2)


STEPS = [("fsync", 0), ("replace", 0), ("fsync", 1), ("fsync", 2), ("replace", 1), ("fsync", 3)]


@pytest.mark.parametrize(("call", "turn"), STEPS, ids=[f"{call} {turn}" for call, turn in STEPS])
def test_a_failure_at_any_step_leaves_a_whole_newest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, turn: int
) -> None:
    """File: fsync, rename, fsync of the folder; pointer: the same. Up to the pointer's rename the old one counts."""
    checkpoint.save(tmp_path, content(1), keep=1)
    owner: Any = checkpoint.os if call == "fsync" else checkpoint.Path
    real, turns = getattr(owner, call), 0

    def fails(*arguments: Any) -> Any:
        nonlocal turns
        turns += 1
        if turns == turn + 1:
            raise OSError(28, "No space left on device")
        return real(*arguments)

    monkeypatch.setattr(owner, call, fails)
    with pytest.raises(OSError, match="No space left"):
        checkpoint.save(tmp_path, content(2), keep=1)
    monkeypatch.undo()
    assert_whole(tmp_path, 2 if (call, turn) == STEPS[-1] else 1)
    assert not [name for name in files(tmp_path) if name.endswith(".tmp")]


def test_everything_is_flushed_before_it_is_renamed_and_the_pointer_moves_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The order that makes it atomic, seen from the system calls; old files go only after that."""
    checkpoint.save(tmp_path, content(1), keep=1)
    events: list[str] = []
    fsync, replace, unlink = checkpoint.os.fsync, checkpoint.Path.replace, checkpoint.Path.unlink

    def note(what: str, path: str) -> None:
        events.append(f"{what} {'folder' if path.endswith('checkpoints') else 'pointer' if 'latest' in path else 'file'}")

    def fsync_noted(descriptor: int) -> None:
        note("fsync", str(Path(f"/proc/self/fd/{descriptor}").readlink()))
        fsync(descriptor)

    def replace_noted(path: Path, target: Path) -> Path:
        assert path.parent == target.parent, "a rename within one folder"
        note("rename", str(target))
        return replace(path, target)

    def unlink_noted(path: Path, missing_ok: bool = False) -> None:
        note("remove", str(path))
        unlink(path, missing_ok)

    monkeypatch.setattr(checkpoint.os, "fsync", fsync_noted)
    monkeypatch.setattr(checkpoint.Path, "replace", replace_noted)
    monkeypatch.setattr(checkpoint.Path, "unlink", unlink_noted)
    checkpoint.save(tmp_path, content(2), keep=1)
    assert events == [
        *("fsync file", "rename file", "fsync folder"),
        *("fsync pointer", "rename pointer", "fsync folder"),
        "remove file",
    ]


def test_killed_in_the_middle_of_saves_again_and_again(tmp_path: Path) -> None:
    """A process that saves without a pause, killed at random moments: the newest is always whole, and never goes back."""
    rng, newest = np.random.default_rng(0), 0
    with children.nursery("checkpoint", tmp_path) as nursery:
        for _ in range(8):
            pid = nursery.start()
            deadline = time.monotonic() + 30
            pointer, before = tmp_path / "checkpoints" / "latest", f"checkpoint-{newest:015d}.pt"
            while not pointer.exists() or checkpoint.find(tmp_path).name == before:
                assert time.monotonic() < deadline, "nothing is saved"
            time.sleep(rng.random() * 0.02)  # anywhere in a save
            nursery.kill(pid)
            found = checkpoint.load(tmp_path)
            assert found["counters"]["frames"] > newest
            newest = found["counters"]["frames"]
            numbers = found["parameters"]["w"]
            assert numbers.shape == (children.CHECKPOINT_NUMBERS,) and (numbers == newest).all()


def test_a_flipped_bit_in_the_parameters_is_noticed(tmp_path: Path) -> None:
    """torch reads a file with one wrong byte without a word."""
    saved = content()
    path = checkpoint.save(tmp_path, saved, keep=2)
    data = bytearray(path.read_bytes())
    wanted = saved["parameters"]["core.input.weight"].numpy().tobytes()
    data[data.index(wanted) + len(wanted) // 2] ^= 1
    path.write_bytes(data)
    torch.load(path, weights_only=True)
    with pytest.raises(ValueError, match=r"damaged.*older"):
        checkpoint.load(tmp_path)


def test_what_a_killed_save_left_is_removed(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, content(1), keep=2)
    (tmp_path / "checkpoints" / ".checkpoint-000000000000002.pt.4711.tmp").write_bytes(b"half")
    checkpoint.save(tmp_path, content(3), keep=2)
    assert not [name for name in files(tmp_path) if name.endswith(".tmp")]


def test_nothing_there_says_where_it_looked(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(FileNotFoundError, match=rf"no checkpoint in {path}"):
            checkpoint.load(path)


class Evil:
    """Runs code when it is unpickled."""

    def __reduce__(self) -> Any:
        return Path.touch, (Path("evil-was-here"),)


JUNK: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda good: b"",
    "cut": lambda good: good[: len(good) // 2],
    "zeros": lambda good: bytes(1000),
    "text": lambda good: b"hello, this is no checkpoint\n" * 20,
    "png": lambda good: b"\x89PNG\r\n\x1a\n" + bytes(range(256)),
    "pickle": lambda good: pickle.dumps({"format": 1}),
    "code": lambda good: pickle.dumps(Evil()),
}


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("kind", JUNK)
def test_junk_is_refused_with_one_message_and_runs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    monkeypatch.chdir(tmp_path)
    good = checkpoint.save(tmp_path, content(), keep=1).read_bytes()
    path = tmp_path / "junk.pt"
    path.write_bytes(JUNK[kind](good))
    with pytest.raises(ValueError, match=r"junk\.pt is damaged or no checkpoint"):
        checkpoint.load(path)
    assert checkpoint.main([str(path)]) == 2
    assert "junk.pt" in capsys.readouterr().err
    assert not (tmp_path / "evil-was-here").exists()


@pytest.mark.parametrize("stranger", [{"weights": torch.ones(1)}, {"format": 99}, [1, 2]], ids=["no format", "later", "list"])
def test_another_format_is_refused(tmp_path: Path, stranger: Any) -> None:
    torch.save(stranger, tmp_path / "other.pt")
    with pytest.raises(ValueError, match=r"other\.pt has no checkpoint format 1"):
        checkpoint.load(tmp_path / "other.pt")


def test_missing_and_unexpected_parameters_are_errors_that_list_them(tmp_path: Path) -> None:
    for change, message in (
        (lambda p: p.pop("core.input.bias"), r"(?s)Missing key.*core\.input\.bias"),
        (lambda p: p.update({"core.extra": torch.ones(1)}), r"(?s)Unexpected key.*core\.extra"),
        (lambda p: p.update({"core.input.bias": torch.ones(3)}), r"(?s)size mismatch.*core\.input\.bias"),
    ):
        damaged = content()
        damaged["parameters"] = dict(damaged["parameters"])
        change(damaged["parameters"])
        checkpoint.save(tmp_path, damaged, keep=2)
        with pytest.raises(RuntimeError, match=message):
            checkpoint.load_network(tmp_path)


def test_heads_follow_their_names_into_a_reordered_and_cut_task_list() -> None:
    """Parameters and optimiser state alike; what is left out belongs to dropped tasks only."""
    old = Learner(
        reference.make_network(reference.small_spec({"a": 2, "b": 3, "b2": 3})), LossSettings(), OptimiserSettings(), 100
    )
    batch = reference.random_batch(np.random.default_rng(0), old.network.spec, 4, 6)
    batch["task"][:], batch["action"][:] = [0, 1, 2] * 2, batch["action"] % 2
    batch["last_action"][:] = np.minimum(batch["last_action"], 1)
    old.update(reference.tensors(batch), batch["task"].tolist())
    new = Learner(Network(reference.small_spec({"b2": 3, "a": 2})), LossSettings(), OptimiserSettings(), 100)
    dropped = frozenset({"b"})
    parameters = checkpoint.match_heads(old.network.state_dict(), new.network, dropped)
    new.network.load_state_dict(parameters)
    new.load_optimiser_state(checkpoint.match_heads(old.optimiser_state(), new.network, dropped))
    for name, value in new.network.state_dict().items():
        assert torch.equal(value, old.network.state_dict()[name]), name
    assert new.optimiser_state().keys() == set(parameters)
    for name, square in new.optimiser_state().items():
        assert torch.equal(square, old.optimiser_state()[name]), name


def test_a_head_that_nobody_dropped_is_not_left_out_in_silence() -> None:
    parameters = reference.make_network(reference.small_spec({"a": 2, "b": 3})).state_dict()
    cut = Network(reference.small_spec({"a": 2}, num_actions=3))
    with pytest.raises(RuntimeError, match=r"(?s)Unexpected key.*policy_heads\.task_b\.weight"):
        cut.load_state_dict(checkpoint.match_heads(parameters, cut, frozenset()))
    parameters = reference.make_network(reference.small_spec({"a": 2, "b": 3, "b2": 3})).state_dict()
    with pytest.raises(RuntimeError, match=r"(?s)Unexpected key.*policy_heads\.task_b2\.weight"):
        cut.load_state_dict(checkpoint.match_heads(parameters, cut, frozenset({"b"})))
    parameters = reference.make_network(reference.small_spec({"a": 2, "b": 3})).state_dict()
    grown = Network(reference.small_spec({"a": 2, "b": 3, "c": 3}))
    with pytest.raises(RuntimeError, match=r"(?s)Missing key.*policy_heads\.task_c\.weight"):
        grown.load_state_dict(checkpoint.match_heads(parameters, grown, frozenset()))


@pytest.mark.parametrize("draws", [0, 1, 3])
def test_generators_continue_exactly(tmp_path: Path, draws: int) -> None:
    """Through a file; after an odd number of normal draws too, of which Python and NumPy keep one in store."""

    def draw() -> list[float]:
        numbers = [random.random(), random.gauss(0, 1), float(np.random.random()), float(np.random.standard_normal())]
        return [*numbers, float(torch.rand(1)), float(torch.randn(1))]

    with torch.random.fork_rng():
        random.seed(0)  # nothing in store
        np.random.seed(0)
        for _ in range(draws):
            draw()
        checkpoint.save(tmp_path, content(), keep=1)
        expected = [draw() for _ in range(5)]
        random.seed(1)
        np.random.seed(1)
        torch.manual_seed(1)
        checkpoint.restore_generators(checkpoint.load(tmp_path)["generators"])
        assert [draw() for _ in range(5)] == expected


def test_states_of_absent_cuda_devices_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint of three devices more than this machine has, be it none: only those that are here are set."""
    state = checkpoint.generator_state()
    expected = [random.random(), float(torch.rand(1))]
    here = torch.cuda.device_count()
    state["cuda"] = [torch.full((16,), device, dtype=torch.uint8) for device in range(here + 3)]
    restored: list[tuple[int, int]] = []
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda words, device: restored.append((int(words[0]), device)))
    checkpoint.restore_generators(state)
    assert restored == [(device, device) for device in range(here)]
    assert [random.random(), float(torch.rand(1))] == expected


def test_the_parameter_hash_sees_every_change() -> None:
    base = {"a": torch.tensor([1.0, 2.0]), "b": torch.zeros(2, 3)}
    different: list[dict[str, torch.Tensor]] = [
        {**base, "a": torch.tensor([1.0, 2.0 + 2e-7])},
        {**base, "a": torch.tensor([1.0, 2.0], dtype=torch.float64)},
        {**base, "b": torch.zeros(2, 3, dtype=torch.int32)},
        {**base, "b": torch.zeros(3, 2)},
        {**base, "b": -base["b"]},
        {"a": base["a"], "c": base["b"]},
        {"a": base["a"]},
        {**base, "c": torch.zeros(0)},
    ]
    hashes = [checkpoint.parameter_hash(parameters) for parameters in (base, *different)]
    assert len(set(hashes)) == len(hashes)
    assert checkpoint.parameter_hash(dict(reversed(base.items()))) == hashes[0], "the order of insertion does not matter"
    transposed = {**base, "b": torch.zeros(3, 2).t()}
    assert checkpoint.parameter_hash(transposed) == hashes[0], "nor does the layout in memory"


def test_the_command_prints_json(tmp_path: Path) -> None:
    """As a user calls it, on a run folder with a task called café, in an ASCII locale."""
    saved = content()
    path = checkpoint.save(tmp_path, saved, keep=1)
    command = [sys.executable, "-m", "agent.checkpoint", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, env={"PATH": "", "LANG": "C"}, timeout=60)
    assert done.returncode == 0, done.stderr.decode()
    assert json.loads(done.stdout.decode("utf-8")) == {
        "file": str(path),
        "counters": saved["counters"],
        "tasks": ["a", "café"],
        "task_counters": saved["task_counters"],
        "parameter_hash": checkpoint.parameter_hash(saved["parameters"]),
    }


def test_the_command_without_a_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert checkpoint.main([str(tmp_path)]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and "no checkpoint in" in printed.err and "\n" not in printed.err.strip()
