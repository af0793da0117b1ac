"""Who got which unroll: proof from outside that committed unrolls are never torn, lost or doubled.

Three witnesses that know nothing of each other: the environments' own counts (tests/fault_envs.py), the counters of the
rings, held open beyond the end of the run, and what the learner was given (`debug.dump_unrolls`). A life is one start of a
run to its end. Of what the learner was given, `kept` is what the checkpoint at the end of the life counts: updates times B,
in order; the rest is rolled back, and no later life may play it again.
"""

import hashlib
import struct
import zipfile
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import fault_envs
from agent.unroll import NO_ACTION, PER_UNROLL, Arrays

Game = tuple[float, int, int, int, int]  # return, frames, steps, policy version, actor


@dataclass(frozen=True)
class Unroll:
    """One dumped unroll. seed, start: of its environment, and the number there of its row 0 (-1: it does not say)."""

    actor: int
    environment: int
    seed: int
    start: int
    frames: int
    games: tuple[Game, ...]
    first_row: bytes  # digests
    last_row: bytes
    torn: str  # what is wrong inside, or nothing


@dataclass
class Life:
    """One start of a run. committed, released: of each ring at the end. rows: seed -> rows that its environment showed."""

    unrolls: list[Unroll]
    unreadable: int
    batch_size: int
    committed: list[int]
    released: list[int]
    before: dict[str, int]  # counters of the checkpoint that it began from
    after: dict[str, int]  # and of the one that it left
    rows: dict[int, int] = field(default_factory=dict)
    left: list[Unroll] = field(default_factory=list)  # of unrolls from other machines: those that nobody has read

    @property
    def kept(self) -> list[Unroll]:
        """What the checkpoint at the end counts."""
        return self.unrolls[: (self.after["updates"] - self.before["updates"]) * self.batch_size]


@dataclass
class Stay:
    """A machine that had joined, from its first unroll to its end. waiting: what its rings held then."""

    committed: int
    released: int
    acknowledged: int
    dropped: int
    waiting: list[Unroll]


@dataclass
class Books:
    """Sums over lives. All but the first seven have to be 0."""

    committed: int = 0
    consumed: int = 0
    kept: int = 0
    rolled_back: int = 0  # consumed, but newer than the checkpoint
    unread: int = 0  # committed, but the learner was gone
    dropped: int = 0  # on another machine, counted, while the run could not be reached
    waiting: int = 0  # on another machine when it left
    torn: int = 0
    doubled: int = 0
    lost: int = 0
    frames_twice: int = 0  # frames of the counters beyond those of the kept unrolls
    frames_missing: int = 0
    lines_twice: int = 0  # lines of episodes.jsonl beyond the games of the kept unrolls
    lines_missing: int = 0

    def faults(self) -> list[str]:
        """What must not be."""
        numbers = vars(self)
        return [f"{numbers[name]} {name.replace('_', ' ')}" for name in FAULTS if numbers[name]]

    def __add__(self, other: "Books") -> "Books":
        return Books(**{name: number + getattr(other, name) for name, number in vars(self).items()})


FAULTS = ("torn", "doubled", "lost", "frames_twice", "frames_missing", "lines_twice", "lines_missing")


class Oracle:
    """What unrolls of the numbered environments have to hold."""

    def __init__(self) -> None:
        self._streams: dict[int, Arrays] = {}

    def check(self, unroll: Arrays) -> tuple[int, int, str]:
        """Seed, start, and what is wrong."""
        seed, start = fault_envs.identity(unroll["frame"][0])
        end = start + len(unroll["frame"])
        if start > 10**6:
            return seed, start, "row 0 is no row"
        stream = self._streams.get(seed)
        if stream is None or len(stream["first"]) < end:
            stream = self._streams[seed] = fault_envs.oracle(seed, 2 * end)
        wrong = [name for name, wanted in stream.items() if not _equal(unroll[name], wanted[start:end])]
        return seed, start, ", ".join([*wrong, *_inner(unroll)])


def engine_check(seconds: int, repeat: int = 4) -> Any:
    """What unrolls of DeepMind Lab's stand-in have to hold: whole games of `seconds`, or lost ones without statistics."""

    def check(unroll: Arrays) -> tuple[int, int, str]:
        wrong = _inner(unroll)
        whole = ~np.isnan(unroll["episode_return"])
        if (unroll["episode_frames"][whole] != 60 * seconds).any() or (whole & ~unroll["first"]).any():
            wrong.append("games")
        if (unroll["frames"][unroll["first"]] != 0).any() or (unroll["frames"][~unroll["first"]] != repeat).any():
            wrong.append("frames")
        return -1, -1, ", ".join(wrong)

    return check


def _inner(unroll: Arrays) -> list[str]:
    first, acted = unroll["first"], unroll["action"][:-1]
    chosen = np.where(first[1:], NO_ACTION, acted)
    ended = (unroll["terminated"] | unroll["truncated"])[:-1]
    wrong = [] if np.array_equal(unroll["last_action"][1:], chosen) else ["last_action"]
    wrong += [] if (first[1:] | ~ended).all() else ["first"]
    sums = np.exp(unroll["log_probs"].astype(np.float64)).sum(-1)
    return wrong + ([] if np.allclose(sums, 1, atol=1e-4) else ["log_probs"])


def _equal(seen: np.ndarray, wanted: np.ndarray) -> bool:
    return seen.shape == wanted.shape and bool(((seen == wanted) | ((seen != seen) & (wanted != wanted))).all())


def describe(arrays: Arrays, check: Any) -> Unroll:
    """One unroll of a dump."""
    seed, start, torn = check(arrays)
    actor, version = int(arrays["actor"]), int(arrays["version"])
    games = tuple(
        (float(arrays["episode_return"][t]), int(arrays["episode_frames"][t]), int(arrays["episode_steps"][t]), version, actor)
        for t in np.flatnonzero(~np.isnan(arrays["episode_return"][1:])) + 1
    )
    frames = int(arrays["frames"][1:].sum())
    ends = _digest(arrays, 0), _digest(arrays, -1)
    return Unroll(actor, int(arrays["environment"]), seed, start, frames, games, *ends, torn)


def _digest(arrays: Arrays, row: int) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(set(arrays) - PER_UNROLL):
        digest.update(np.ascontiguousarray(arrays[name][row]).tobytes())
    return digest.digest()


def read_dump(folder: Path, check: Any) -> tuple[list[Unroll], int]:
    """The unrolls of a folder in order, and how many files at its end were not written whole (0, or 1 if the learner died)."""
    unrolls: list[Unroll] = []
    files = sorted(folder.glob("*.npz"))
    for number, file in enumerate(files):
        try:
            with np.load(file) as stored:
                arrays = {name: stored[name] for name in stored.files}
        except (zipfile.BadZipFile, EOFError, ValueError, KeyError):
            if number + 1 < len(files):
                raise
            return unrolls, 1
        unrolls.append(describe(arrays, check))
    return unrolls, 0


def read_rows(folder: Path) -> dict[int, int]:
    """Seed -> rows shown, as the environments themselves wrote."""
    return {int(path.name): struct.unpack("<q", path.read_bytes())[0] for path in folder.iterdir() if path.stat().st_size}


def audit(lives: Sequence[Life], length: int) -> list[Books]:
    """Books of each life; `length` is T."""
    seen: set[tuple[int, int]] = set()
    digests: set[bytes] = set()
    result = []
    for life in lives:
        books = Books(committed=sum(life.committed), consumed=len(life.unrolls), kept=len(life.kept))
        books.rolled_back = books.consumed - books.kept
        books.unread = books.committed - sum(life.released)
        books.torn = sum(bool(unroll.torn) for unroll in life.unrolls)
        dumped = Counter(unroll.actor for unroll in life.unrolls)
        books.lost = sum(max(0, released - dumped[actor]) for actor, released in enumerate(life.released))
        for unroll in life.unrolls:
            keys = (unroll.seed, unroll.start), unroll.first_row + unroll.last_row
            books.doubled += (unroll.seed >= 0 and keys[0] in seen) or keys[1] in digests
            seen.add(keys[0])
            digests.add(keys[1])
        books.lost += sum(_gaps([u for u in life.unrolls if u.seed == seed], length) for seed in {u.seed for u in life.unrolls})
        if life.rows:
            # Whole unrolls that environments played and nobody committed: at most the one that each had just finished.
            handed = sum((rows - 1) // length for rows in life.rows.values()) - books.committed
            books.doubled += max(0, -handed)
            books.lost += max(0, handed - len(life.rows))
        missing = life.after["updates"] - life.before["updates"]
        books.lost += max(0, missing * life.batch_size - books.kept)
        counted = life.after["frames"] - life.before["frames"] - sum(unroll.frames for unroll in life.kept)
        books.frames_twice, books.frames_missing = max(0, counted), max(0, -counted)
        result.append(books)
    return result


def audit_remote(life: Life, stays: Sequence[Stay], known_lost: int, length: int) -> Books:
    """Books of a life whose actors were on other machines: what they committed was consumed, is unread, was dropped or waits.
    known_lost: dropped unrolls that the learner's end knows of."""
    received = [*life.unrolls, *life.left]
    places = {(unroll.seed, unroll.start) for unroll in received}
    waiting = [one for stay in stays for one in stay.waiting if (one.seed, one.start) not in places]
    own = Life([*received, *waiting], 0, life.batch_size, [], [], life.before, life.after)
    books = Books(sum(stay.committed for stay in stays), len(life.unrolls), len(life.kept), unread=len(life.left))
    books.rolled_back = books.consumed - books.kept
    books.dropped, books.waiting = sum(stay.dropped for stay in stays), len(waiting)
    books.torn = sum(bool(unroll.torn) for unroll in own.unrolls)
    books.doubled = len(received) - len(places)
    missing = books.committed - len(own.unrolls) - books.dropped
    missing += sum(abs(stay.released - stay.acknowledged - stay.dropped) for stay in stays)
    books.lost, more = max(0, missing), max(0, -missing)
    books.doubled = max(books.doubled, more)
    gaps = sum(_gaps([u for u in own.unrolls if u.seed == seed], length) for seed in {u.seed for u in own.unrolls})
    books.lost += max(0, gaps - books.dropped) + max(0, known_lost - books.dropped)
    handed = sum((rows - 1) // length for rows in life.rows.values()) - books.committed
    books.lost += max(0, handed - len(life.rows))
    books.doubled += max(0, -handed)
    updates = life.after["updates"] - life.before["updates"]
    books.lost += max(0, updates * life.batch_size - books.kept)
    counted = life.after["frames"] - life.before["frames"] - sum(unroll.frames for unroll in life.kept)
    books.frames_twice, books.frames_missing = max(0, counted), max(0, -counted)
    return books


def _gaps(unrolls: Sequence[Unroll], length: int) -> int:
    """Unrolls missing in the middle of what one environment (or, where they do not say, each place) sent."""
    if not unrolls:
        return 0
    if unrolls[0].seed >= 0:
        starts = {unroll.start for unroll in unrolls}
        return len(set(range(0, max(starts) + 1, length)) - starts)
    gaps, last = 0, {}
    for unroll in unrolls:
        place = unroll.actor, unroll.environment
        gaps += last.get(place, unroll.first_row) != unroll.first_row
        last[place] = unroll.last_row
    return gaps


def compare_lines(lives: Sequence[Life], lines: Iterable[dict[str, Any]]) -> Books:
    """episodes.jsonl against the games of the kept unrolls of all lives: each once."""
    keys = ("return", "frames", "steps", "policy_version", "actor")
    written = Counter(tuple(line[key] for key in keys) for line in lines)
    played = Counter(game for life in lives for unroll in life.kept for game in unroll.games)
    return Books(lines_twice=(written - played).total(), lines_missing=(played - written).total())
