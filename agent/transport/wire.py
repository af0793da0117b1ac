"""Bytes on the network: a fixed header and one payload of known size. Never pickle; JSON only in the handshake.

A message is two ZeroMQ frames, header and payload. The header is little-endian: magic, format, kind, session, ring, sequence,
size and checksum of the payload. What a kind may carry is known before (`Sizes`): anything else is refused unread.
"""

import json
import struct
import zlib
from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
import zstandard

from agent.unroll import UnrollSpec

MAGIC = b"MTAW"
FORMAT = 1
# Magic, format, kind, two zeros, session, ring, sequence, payload size, checksum of all before it and of the payload.
_HEADER = struct.Struct("<4sBBHqqqqI")
_BEFORE_CHECKSUM = _HEADER.size - 4
_FRAMES = struct.Struct("<q")
HELLO_BYTES = 4096
WELCOME_BYTES = 2**20
_ENCRYPTION_BYTES = 256
# Level 1: higher levels save no more of float32 numbers and cost three times as much.
_LEVEL = 1


class Kind(IntEnum):
    """relay -> listener: HELLO, UNROLL, PING, WANT. Back: WELCOME, REFUSED, AGAIN, ACK, PONG, PARAMETERS.

    Sequence is: of an UNROLL and an ACK the unroll's number in its ring; of a PONG the newest parameters' version; of a WANT
    the version that the relay has, or -1; of PARAMETERS their version, and then ring is the version that they are changes of,
    or -1. AGAIN: I do not know you (any more), say HELLO.
    """

    HELLO = 1
    WELCOME = 2
    REFUSED = 3
    AGAIN = 4
    UNROLL = 5
    ACK = 6
    PING = 7
    PONG = 8
    WANT = 9
    PARAMETERS = 10


Sizes = Mapping[Kind, tuple[int, int]]


class Message(NamedTuple):
    """One message; payload is read-only."""

    kind: Kind
    session: int
    ring: int
    sequence: int
    payload: memoryview


class WireError(ValueError):
    """A message that is not to be read; `fault` is one of FAULTS."""

    def __init__(self, fault: str, detail: str) -> None:
        super().__init__(detail)
        self.fault = fault


FAULTS = ("frames", "header", "format", "kind", "size", "checksum")


def to_listener(spec: UnrollSpec) -> Sizes:
    """Payload sizes, smallest and largest, of what a listener reads."""
    whole = spec.unroll_bytes()
    return {Kind.HELLO: (2, HELLO_BYTES), Kind.UNROLL: (whole, whole), Kind.PING: (0, 0), Kind.WANT: (0, 0)}


def to_relay(count: int) -> Sizes:
    """The same of what a relay reads; `count` parameters."""
    return {
        Kind.WELCOME: (2, WELCOME_BYTES),
        Kind.REFUSED: (2, HELLO_BYTES),
        Kind.AGAIN: (0, 0),
        Kind.ACK: (0, 0),
        Kind.PONG: (0, 0),
        Kind.PARAMETERS: (_FRAMES.size + 1, _FRAMES.size + 4 * count + count // 32 + 1024),
    }


def largest(sizes: Sizes) -> int:
    """Of any frame, as it travels: encryption adds some bytes."""
    return max(_HEADER.size, *(size for _, size in sizes.values())) + _ENCRYPTION_BYTES


def pack(
    kind: Kind, session: int, ring: int = 0, sequence: int = 0, payload: bytes | memoryview = b""
) -> tuple[bytes, bytes | memoryview]:
    """Header and payload."""
    size = payload.nbytes if isinstance(payload, memoryview) else len(payload)
    header = _HEADER.pack(MAGIC, FORMAT, kind, 0, session, ring, sequence, size, 0)[:_BEFORE_CHECKSUM]
    return header + struct.pack("<I", _checksum(header, payload)), payload


def unpack(frames: Sequence[bytes | memoryview], sizes: Sizes) -> Message:
    """The message in two frames.

    Raises:
        WireError: anything is not as it must be.
    """
    if len(frames) != 2:
        raise WireError("frames", f"{len(frames)} frames instead of 2")
    header, payload = frames[0], memoryview(frames[1])
    if len(header) != _HEADER.size or header[:4] != MAGIC:
        raise WireError("header", "no header")
    _, version, number, zeros, session, ring, sequence, size, checksum = _HEADER.unpack(header)
    if version != FORMAT or zeros:
        raise WireError("format", f"format {version} instead of {FORMAT}")
    if number not in sizes:
        raise WireError("kind", f"kind {number}")
    low, high = sizes[Kind(number)]
    if not low <= size <= high or size != payload.nbytes:
        raise WireError("size", f"{size:,} bytes declared, {payload.nbytes:,} sent, {low:,} to {high:,} allowed")
    if checksum != _checksum(bytes(header[:_BEFORE_CHECKSUM]), payload):
        raise WireError("checksum", "damaged")
    return Message(Kind(number), session, ring, sequence, payload)


def pack_json(content: Mapping[str, Any]) -> bytes:
    """For the handshake."""
    return json.dumps(content, ensure_ascii=False, allow_nan=False).encode()


def unpack_json(payload: memoryview) -> dict[str, Any]:
    """An object; what is in it is for the caller to check.

    Raises:
        WireError: it is none.
    """
    try:
        content = json.loads(bytes(payload))
    except (ValueError, RecursionError) as error:
        raise WireError("content", "no JSON") from error
    if not isinstance(content, dict):
        raise WireError("content", "no JSON object")
    return content


def pack_parameters(numbers: np.ndarray, frames: int, base: np.ndarray | None) -> bytes:
    """Parameters float32 [n] as the bits that differ from `base`, or as they are; `frames` trained on by then.

    Bytes of equal weight lie together: after small updates most of the high ones are zero.
    """
    bits = numbers.view(np.uint32) if base is None else numbers.view(np.uint32) ^ base.view(np.uint32)
    planes = np.ascontiguousarray(bits.view(np.uint8).reshape(-1, 4).T)
    return _FRAMES.pack(frames) + zstandard.ZstdCompressor(level=_LEVEL).compress(planes.data)


def unpack_parameters(payload: memoryview, count: int, base: np.ndarray | None) -> tuple[np.ndarray, int]:
    """Float32 [count] and frames.

    Raises:
        WireError: it holds something else; nothing is allocated for a declared size that does not fit.
    """
    packed = bytes(payload[_FRAMES.size :])
    try:
        if zstandard.frame_content_size(packed) != 4 * count:
            raise WireError("size", f"parameters of another size than {4 * count:,} bytes")
        planes = zstandard.ZstdDecompressor().decompress(packed)
    except zstandard.ZstdError as error:
        raise WireError("content", "no parameters") from error
    bits = np.ascontiguousarray(np.frombuffer(planes, np.uint8).reshape(4, count).T).reshape(-1).view(np.uint32)
    if base is not None:
        bits = bits ^ base.view(np.uint32)
    return bits.view(np.float32), int(_FRAMES.unpack(payload[: _FRAMES.size])[0])


def _checksum(header: bytes, payload: bytes | memoryview) -> int:
    return zlib.crc32(payload, zlib.crc32(header))
