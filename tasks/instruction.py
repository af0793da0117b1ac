"""Words to stable ids: the same text gives the same numbers in every process, on every machine, after every resume."""

from __future__ import annotations

import unicodedata
import zlib

import numpy as np

NUM_BUCKETS = 1_000  # hash buckets for words (IMPALA); ids are 1 to 1,000, and 0 stands for "no word"


def word_ids(text: str, length: int) -> np.ndarray:
    """Ids of the words of `text`, int32 [length]; split at white space, cut at `length`, filled with 0.

    CRC-32 of the word's UTF-8 bytes (Unicode NFC) picks the bucket: Python's own `hash()` differs per process.
    """
    ids = np.zeros(length, np.int32)
    for i, word in enumerate(unicodedata.normalize("NFC", text).split()[:length]):
        # surrogatepass: a text with a lone surrogate is odd, but no reason to end a run.
        ids[i] = 1 + zlib.crc32(word.encode("utf-8", "surrogatepass")) % NUM_BUCKETS
    return ids
