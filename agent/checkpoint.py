"""Save and restore a run: atomic, whole or not at all, and nothing in it that could run code.

`python -m agent.checkpoint RUN_OR_FILE` prints a checkpoint's counters, task names and parameter hash as JSON.
"""

import argparse
import hashlib
import io
import json
import os
import random
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from agent.network import Network, NetworkSpec

FORMAT = 1
FOLDER = "checkpoints"
LATEST = "latest"


@dataclass(frozen=True)
class CheckpointSettings:
    """When checkpoints are written.

    Attributes:
        every_seconds: wall time between two checkpoints; one more is written at the end.
        keep: how many of the newest stay.
    """

    every_seconds: float = field(default=600.0, metadata={"min": 1})
    keep: int = field(default=2, metadata={"min": 1})


def save(run_dir: Path, content: Mapping[str, Any], keep: int) -> Path:
    """Write `content` (tensors and plain types; `content["counters"]["frames"]` names the file) to RUN/checkpoints.

    Temporary name, flush, fsync, rename; then the pointer `latest` moves the same way; then old files go. A failure at any
    point leaves the checkpoint before, and the pointer to it, as they were.

    Raises:
        OSError: the disk is full or not writable; names the file.
    """
    folder = run_dir / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"checkpoint-{content['counters']['frames']:015d}.pt"
    for left in folder.glob(".*.tmp"):  # of a process killed while it saved; one learner at a time works on a run
        left.unlink()
    content = {"format": FORMAT, **content, "parameter_hash": parameter_hash(content["parameters"])}
    _replace(path, lambda stream: torch.save(content, stream))
    _replace(folder / LATEST, lambda stream: stream.write(path.name.encode()))
    for old in sorted(folder.glob("checkpoint-*.pt"))[:-keep]:
        if old != path:
            old.unlink()
    return path


def exists(run_dir: Path) -> bool:
    """Whether a run folder has a checkpoint."""
    return (run_dir / FOLDER / LATEST).is_file()


def find(path: Path) -> Path:
    """The checkpoint file meant by a file, a run folder or its folder of checkpoints.

    Raises:
        FileNotFoundError: there is none; says where it looked.
    """
    if path.is_file():
        return path
    folder = path if path.name == FOLDER else path / FOLDER
    pointer = folder / LATEST
    if not pointer.is_file():
        raise FileNotFoundError(f"no checkpoint in {folder}: the run stopped before its first one, or this is no run folder")
    return folder / pointer.read_text(encoding="utf-8").strip()


def load(path: Path, device: str | torch.device = "cpu") -> dict[str, Any]:
    """The content of a checkpoint, its tensors on `device`; `path` as in `find`.

    Raises:
        FileNotFoundError, ValueError: missing, or not a checkpoint of this format.
    """
    file = find(Path(path))
    try:
        data = file.read_bytes()
    except OSError as error:
        raise ValueError(_damaged(file, type(error).__name__)) from error
    return decode(data, file, device)


def decode(data: bytes, file: Path, device: str | torch.device = "cpu") -> dict[str, Any]:
    """The content of a checkpoint from its bytes, which were read from `file`, perhaps on another machine.

    Raises:
        ValueError: not a checkpoint of this format.
    """
    try:
        content = torch.load(io.BytesIO(data), map_location=device, weights_only=True)
    except Exception as error:  # torch has a different one for each way in which a file can be damaged
        raise ValueError(_damaged(file, type(error).__name__)) from error
    if not isinstance(content, dict) or content.get("format") != FORMAT or "parameter_hash" not in content:
        raise ValueError(f"{file} has no checkpoint format {FORMAT}: it was written by another version")
    if parameter_hash(content["parameters"]) != content["parameter_hash"]:
        raise ValueError(_damaged(file, "its parameters do not have the hash they were saved with"))
    return content


def load_network(path: Path, device: str | torch.device = "cpu") -> tuple[Network, tuple[str, ...]]:
    """The network of a checkpoint, its settings taken from there, and its task names."""
    content = load(path, device)
    network = Network(NetworkSpec.from_dict(content["network"])).to(device)
    network.load_state_dict(content["parameters"])
    return network, network.task_names


def match_heads(values: Mapping[str, torch.Tensor], network: Network, dropped_tasks: frozenset[str]) -> dict[str, torch.Tensor]:
    """Parameters, or optimiser state by parameter name, for a network whose task list was reordered or cut.

    Heads carry their task's name, so only those of dropped tasks have to go. Everything else must match; the caller's load
    says what does not.
    """
    names = set(network.state_dict())
    kinds = ("policy_heads", "value_heads", "normaliser.tasks")
    heads = tuple(f"{kind}.task_{task}." for kind in kinds for task in dropped_tasks)
    return {name: value for name, value in values.items() if name in names or not name.startswith(heads)}


def parameter_hash(parameters: Mapping[str, torch.Tensor]) -> str:
    """SHA-256 over names, shapes, dtypes and bytes, in order of names."""
    digest = hashlib.sha256()
    for name in sorted(parameters):
        array = parameters[name].detach().cpu().contiguous().numpy()
        digest.update(f"{name} {array.shape} {array.dtype}".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()


def generator_state() -> dict[str, Any]:
    """States of Python's, NumPy's, torch's and each CUDA device's generator, as tensors and plain types."""
    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "python": [version, list(words), gauss],
        "numpy": [str(name), torch.from_numpy(np.array(keys, np.int64)), int(position), int(has_gauss), float(cached)],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def restore_generators(state: Mapping[str, Any]) -> None:
    """Inverse of `generator_state`; states of CUDA devices that are not here are left out."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, keys.cpu().numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"].cpu())
    for device, words_of_device in enumerate(state["cuda"][: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(words_of_device.cpu(), device)


def _damaged(file: Path, why: str) -> str:
    older = [path.name for path in sorted(file.parent.glob("checkpoint-*.pt")) if path != file]
    remedy = f"write {older[-1]} into {file.parent / LATEST} to go back to it" if older else "there is no older one beside it"
    return f"{file} is damaged or no checkpoint ({why}): {remedy}"


def _replace(path: Path, write: Any) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as stream:
            write(stream)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(path)
    except (OSError, RuntimeError) as error:
        # torch's writer reports a full disk as a RuntimeError.
        temporary.unlink(missing_ok=True)
        raise OSError(f"cannot write {path}: {error}; the checkpoint before it is whole") from error
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def main(arguments: list[str] | None = None) -> int:
    """Print what a checkpoint holds."""
    parser = argparse.ArgumentParser(prog="python -m agent.checkpoint", description=main.__doc__)
    parser.add_argument("path", type=Path, help="a run folder or a checkpoint file")
    path = parser.parse_args(arguments).path
    try:
        content = load(path)
    except (FileNotFoundError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    about = {
        "file": str(find(path)),
        "counters": content["counters"],
        "tasks": list(content["network"]["legal_actions"]),
        "task_counters": content["task_counters"],
        "parameter_hash": content["parameter_hash"],
    }
    print(json.dumps(about, indent=2, ensure_ascii=False))
    return 0


if __name__ == "__main__":
    sys.exit(main())
