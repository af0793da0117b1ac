"""What a run leaves behind while it trains: metrics.jsonl, episodes.jsonl and TensorBoard. Units are in the key names."""

import json
import math
import os
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

METRICS = "metrics.jsonl"
EPISODES = "episodes.jsonl"
RESTARTS = "restarts.jsonl"


class Lines:
    """A file of JSON objects, one a line, only appended to.

    Args:
        path: of the file.
        frames_key, last_frames: on a resume, lines of frames beyond the checkpoint are cut off: they will be played again.
    """

    def __init__(self, path: Path, frames_key: str = "", last_frames: int | None = None) -> None:
        self.dropped = cut_after(path, frames_key, last_frames) if last_frames is not None and path.exists() else 0
        _cut_torn(path)
        self._stream = path.open("a", encoding="utf-8")

    def write(self, record: Mapping[str, Any]) -> None:
        """One line, handed to the system at once. NaN and infinity are refused: they are no JSON."""
        self._stream.write(json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n")
        self._stream.flush()

    def write_all(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Several lines at once."""
        text = "".join(json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n" for record in records)
        self._stream.write(text)
        self._stream.flush()

    def close(self) -> None:
        """Close the file."""
        self._stream.close()


def _cut_torn(path: Path) -> None:
    """Cut a last line without an end, of a full disk or a kill: the next one would be glued to it, and neither be read."""
    if not path.exists() or path.stat().st_size == 0:
        return
    with path.open("rb+") as stream:
        stream.seek(-1, os.SEEK_END)
        if stream.read() == b"\n":
            return
        stream.seek(0)
        kept_bytes = 0
        for line in stream:
            kept_bytes += len(line) if line.endswith(b"\n") else 0
        stream.truncate(kept_bytes)


def cut_after(path: Path, frames_key: str, last_frames: int) -> int:
    """Cut a file of lines before the first whose `frames_key` is beyond `last_frames`, or that is torn; returns lines cut."""
    kept_bytes, dropped = 0, 0
    with path.open("rb+") as stream:
        for line in stream:
            if not dropped:
                try:
                    whole = line.endswith(b"\n") and json.loads(line)[frames_key] <= last_frames
                except (ValueError, KeyError, TypeError):
                    whole = False
                if whole:
                    kept_bytes += len(line)
                    continue
            dropped += 1
        stream.truncate(kept_bytes)
    return dropped


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Objects of a file of lines; a last line still being written is left out, a missing file is empty.

    Raises:
        ValueError: a damaged line before the last; names file and line.
    """
    if not path.exists():
        return
    with path.open("rb") as stream:
        for number, line in enumerate(stream, 1):
            if not line.endswith(b"\n"):
                return
            try:
                yield json.loads(line)
            except ValueError as error:
                raise ValueError(f"line {number} of {path} is damaged ({error}): remove it") from error


def last_line(path: Path) -> dict[str, Any] | None:
    """The newest whole object of a file of lines, or None."""
    try:
        with path.open("rb") as stream:
            end = stream.seek(0, 2)
            stream.seek(max(0, end - (1 << 20)))
            lines = stream.read().split(b"\n")[:-1]
    except FileNotFoundError:
        return None
    try:
        return json.loads(lines[-1]) if lines else None
    except ValueError:
        return None


class TaskRecords:
    """Counts and recent returns of each task.

    Args:
        task_names: N names.
        window: recent returns are means over so many last episodes.
    """

    def __init__(self, task_names: Sequence[str], window: int) -> None:
        self.task_names = tuple(task_names)
        self.frames = np.zeros(len(task_names), np.int64)
        self.steps = np.zeros(len(task_names), np.int64)
        self.episodes = np.zeros(len(task_names), np.int64)
        self.recent: list[deque[float]] = [deque(maxlen=window) for _ in task_names]

    def add(self, arrays: Mapping[str, np.ndarray], total_frames: int, seconds: float) -> list[dict[str, Any]]:
        """Count a batch [T+1, B, ...]; returns the records of the games that ended in it, in order of time."""
        tasks, frames = arrays["task"], arrays["frames"][1:]
        np.add.at(self.frames, tasks, frames.sum(0, dtype=np.int64))
        np.add.at(self.steps, tasks, (frames > 0).sum(0))
        returns = arrays["episode_return"]
        records = []
        for t, b in zip(*np.nonzero(~np.isnan(returns[1:])), strict=True):
            task = int(tasks[b])
            self.episodes[task] += 1
            self.recent[task].append(float(returns[t + 1, b]))
            records.append(
                {
                    "task": self.task_names[task],
                    "return": float(returns[t + 1, b]),
                    "frames": int(arrays["episode_frames"][t + 1, b]),
                    "steps": int(arrays["episode_steps"][t + 1, b]),
                    "total_frames": total_frames,
                    "seconds": round(seconds, 3),
                    "policy_version": int(arrays["version"][b]),
                    "actor": int(arrays["actor"][b]),
                }
            )
        return records

    def state(self) -> dict[str, dict[str, Any]]:
        """By task name, for a checkpoint."""
        return {
            name: {
                "frames": int(self.frames[i]),
                "steps": int(self.steps[i]),
                "episodes": int(self.episodes[i]),
                "recent_returns": list(self.recent[i]),
            }
            for i, name in enumerate(self.task_names)
        }

    def restore(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Inverse of `state`, by name: tasks may have been reordered or cut."""
        for i, name in enumerate(self.task_names):
            if name in state:
                self.frames[i], self.steps[i] = state[name]["frames"], state[name]["steps"]
                self.episodes[i] = state[name]["episodes"]
                self.recent[i].extend(state[name]["recent_returns"])


class TensorBoard:
    """The same scalars twice: against frames and against seconds of training, in two folders. Only finite values.

    Args:
        folder: RUN/tensorboard.
        frames, seconds: of the checkpoint resumed from: later points are purged.
    """

    def __init__(self, folder: Path, frames: int, seconds: float) -> None:
        # Here, because it takes a second and an actor never needs it.
        from torch.utils.tensorboard import SummaryWriter

        resumed = frames > 0
        self._by_frames = SummaryWriter(str(folder / "by_frames"), purge_step=frames + 1 if resumed else None)
        self._by_seconds = SummaryWriter(str(folder / "by_seconds"), purge_step=int(seconds) + 1 if resumed else None)

    def write(self, metrics: Mapping[str, Any]) -> None:
        """One point of every number in a record of metrics.jsonl; nested keys become `section/name`."""
        for tag, value in scalars(metrics):
            self._by_frames.add_scalar(tag, value, metrics["frames"])
            self._by_seconds.add_scalar(tag, value, int(metrics["seconds"]))

    def close(self) -> None:
        """Write what is pending."""
        self._by_frames.close()
        self._by_seconds.close()


class Files:
    """What rank 0 writes while it trains.

    Args:
        run_dir: of the run.
        frames, seconds: where the run stands.
        resume: cut off what was recorded after that.
        tensorboard: write that, too.
    """

    def __init__(self, run_dir: Path, frames: int, seconds: float, resume: bool, tensorboard: bool) -> None:
        last_frames = frames if resume else None
        self.metrics = Lines(run_dir / METRICS, "frames", last_frames)
        self.episodes = Lines(run_dir / EPISODES, "total_frames", last_frames)
        self._tensorboard = TensorBoard(run_dir / "tensorboard", frames, seconds) if tensorboard else None

    def write(self, record: dict[str, Any]) -> None:
        """One record of metrics."""
        self.metrics.write(record)
        if self._tensorboard is not None:
            self._tensorboard.write(record)

    def close(self) -> None:
        """Write what is pending."""
        self.metrics.close()
        self.episodes.close()
        if self._tensorboard is not None:
            self._tensorboard.close()


def scalars(record: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """Finite numbers of a nested record: `tasks.pong.return_mean` becomes the tag `return_mean/pong`."""
    for key, value in record.items():
        if key == "tasks" and isinstance(value, Mapping):
            for task, numbers in value.items():
                yield from ((f"{name}/{task}", number) for name, number in scalars(numbers))
        elif isinstance(value, Mapping):
            yield from scalars(value, f"{prefix}{key}/")
        elif isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            yield prefix + key, value
