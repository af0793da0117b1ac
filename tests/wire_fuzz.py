"""Messages that no listener may take: noise, and true messages that were damaged, cut, swollen, repeated or turned."""

from collections.abc import Iterator, Sequence

import numpy as np

from agent.transport import wire
from agent.transport.wire import Kind
from agent.unroll import UnrollSpec

Frames = list[bytes]


def messages(rng: np.random.Generator, spec: UnrollSpec, session: int, count: int) -> Iterator[Frames]:
    """`count` messages as lists of frames, each of them wrong in some way for a peer that has not said hello."""
    makers = (_noise, _damaged, _cut, _swollen, _parts, _other_kind, _stranger, _hello)
    for _ in range(count):
        yield makers[int(rng.integers(len(makers)))](rng, spec, session)


def _true(rng: np.random.Generator, spec: UnrollSpec, session: int) -> Frames:
    payload = rng.integers(0, 256, spec.unroll_bytes(), np.uint8).tobytes()
    ring, sequence = int(rng.integers(-2, 4)), int(rng.integers(-5, 2**40))
    return [bytes(part) for part in wire.pack(Kind.UNROLL, session, ring, sequence, payload)]


def _noise(rng: np.random.Generator, spec: UnrollSpec, session: int) -> Frames:
    return [rng.bytes(int(rng.integers(0, 200))) for _ in range(int(rng.integers(1, 5)))]


def _damaged(rng: np.random.Generator, spec: UnrollSpec, session: int) -> Frames:
    """One bit of one byte."""
    frames = [bytearray(part) for part in _true(rng, spec, session)]
    frame = frames[int(rng.integers(2))]
    frame[int(rng.integers(len(frame)))] ^= 1 << int(rng.integers(8))
    return [bytes(part) for part in frames]


def _cut(rng: np.random.Generator, spec: UnrollSpec, session: int) -> Frames:
    header, payload = _true(rng, spec, session)
    if rng.random() < 0.5:
        return [header, payload[: int(rng.integers(len(payload)))]]
    return [header[: int(rng.integers(len(header)))], payload]


def _swollen(rng: np.random.Generator, spec: UnrollSpec, session: int) -> Frames:
    """A huge declared size, with a checksum that fits."""
    header, payload = _true(rng, spec, session)
    size = int(rng.integers(2**40, 2**62))
    header = header[:32] + size.to_bytes(8, "little")
    return [header + wire._checksum(header, payload).to_bytes(4, "little"), payload]


def _parts(rng: np.random.Generator, spec: UnrollSpec, session: int) -> Frames:
    """A message without its end, or with too much of it."""
    frames = _true(rng, spec, session)
    return frames[:1] if rng.random() < 0.5 else frames * int(rng.integers(2, 5))


def _other_kind(rng: np.random.Generator, spec: UnrollSpec, session: int) -> Frames:
    """What only the listener may say, or kinds that there are not."""
    kind = int(rng.choice([2, 3, 4, 6, 8, 10, 0, 11, 255]))
    return [bytes(part) for part in wire.pack(kind, session)]  # type: ignore[arg-type]


def _stranger(rng: np.random.Generator, spec: UnrollSpec, session: int) -> Frames:
    """Whole, but of nobody that has said hello."""
    if rng.random() < 0.5:
        return _true(rng, spec, session)
    return [bytes(part) for part in wire.pack(Kind.WANT, session, sequence=int(rng.integers(-(2**60), 2**60)))]


def _hello(rng: np.random.Generator, spec: UnrollSpec, session: int) -> Frames:
    """JSON that is none, or no object, or too deep."""
    texts: Sequence[bytes] = (b"[" * 4000, b"\xff\xfe{}", b"[1, 2]", b'"x"', b'{"a":' * 700, b"{}" + b" " * 4200, rng.bytes(90))
    return [bytes(part) for part in wire.pack(Kind.HELLO, session, payload=texts[int(rng.integers(len(texts)))])]
