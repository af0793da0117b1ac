"""Word ids: the same in every process, any Unicode, fixed length."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tasks.instruction import NUM_BUCKETS, word_ids

ROOT = Path(__file__).parents[1]


def test_by_value() -> None:
    # CRC-32 of "a" is 0xE8B7BE43 and of "abc" 0x352441C2 (published check values).
    assert word_ids("a  abc\n", 4).tolist() == [1 + 0xE8B7BE43 % 1000, 1 + 0x352441C2 % 1000, 0, 0]
    assert word_ids("", 3).tolist() == word_ids(" \t\u3000", 3).tolist() == [0, 0, 0]
    assert word_ids("a a a a", 2).shape == (2,) and word_ids("a", 2).dtype == np.int32


def test_same_ids_in_every_process() -> None:
    text = "pick up the größte blue café 猫"
    code = f"from tasks.instruction import word_ids; print(word_ids({text!r}, 9).tolist())"
    seeds: list[dict[str, str]] = [{"PYTHONHASHSEED": "0"}, {"PYTHONHASHSEED": "1", "LANG": "C"}, {}]
    base = {key: value for key, value in os.environ.items() if key != "PYTHONHASHSEED"}
    base["PYTHONUTF8"] = "1"
    for seed in seeds:
        run = subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, env=base | seed, capture_output=True, text=True, check=True
        )
        assert run.stdout.strip() == str(word_ids(text, 9).tolist())


def test_composed_and_decomposed_letters_are_the_same_word() -> None:
    assert word_ids("cafe\u0301", 1).tolist() == word_ids("caf\u00e9", 1).tolist()


@given(st.text(), st.integers(1, 20))
def test_any_text(text: str, length: int) -> None:
    ids = word_ids(text, length)
    used = min(length, len(text.split()))
    assert (ids[:used] >= 1).all() and (ids <= NUM_BUCKETS).all() and not ids[used:].any()


def test_lone_surrogate() -> None:
    assert word_ids("\ud800 x", 2).all()
