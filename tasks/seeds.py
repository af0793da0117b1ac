"""Seeds of environments: distinct within a run, disjoint between neighbouring runs and between training and evaluation.

Engines take seeds in [0, 2^31). Training has the lower half, evaluation the upper one. A base seed picks where its run
starts in the half, and a run counts up from there. Starts follow the golden ratio, which keeps the starts of up to
1,000 neighbours more than 2^18 apart (the three-distance theorem; tests/test_tasks_seeds.py checks all of them).
"""

from __future__ import annotations

import unicodedata
import zlib

HALF = 2**30
MAX_BASE = 2**63 - 1
GOLDEN = 663_608_941  # 2^30 divided by the golden ratio, odd
HIGH_STEP = 100_097  # sets bases on both sides of a multiple of 2^30 as far apart as other neighbours


def environment_seed(base: int, index: int) -> int:
    """Seed in [0, 2^30) of a run's environment `index`, 0 <= index < 2^30; all indices of a base differ.

    Bases whose difference is at most 1,000 share no seed for indices below 2^18. ValueError for a base that is not
    an int from 0 to 2^63 - 1, or for an index out of range.
    """
    return (_start(base) + _check_index("index", index)) % HALF


def evaluation_seed(base: int, task_name: str, episode: int) -> int:
    """Seed in [2^30, 2^31) of evaluation episode `episode` of a task; errors as `environment_seed`."""
    task = zlib.crc32(unicodedata.normalize("NFC", task_name).encode("utf-8"))
    return HALF + (_start(base) + task + _check_index("episode", episode)) % HALF


def _start(base: int) -> int:
    """Where a base begins in its half. The bits above the 30th move the start too, so that they are not lost."""
    if isinstance(base, bool) or not isinstance(base, int) or not 0 <= base <= MAX_BASE:
        raise ValueError(f"seed: {base!r} is no seed, use an integer from 0 to {MAX_BASE}")
    return (base + (base >> 30) * HIGH_STEP) * GOLDEN % HALF


def _check_index(key: str, index: int) -> int:
    if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < HALF:
        raise ValueError(f"{key}: {index!r} is out of range, use an integer from 0 to {HALF - 1}")
    return index
