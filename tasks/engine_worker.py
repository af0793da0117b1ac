"""One engine in a process of its own, the child's side: `python -m tasks.engine_worker SPEC`.

The parent sends a request and gets one reply: REPLY, or the letter E and a text where Python raised. The observation is
written into memory that both have mapped, before the reply is sent. The process ends when the parent does.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import signal
import socket
import struct
import sys
from typing import Any

import numpy as np

from tasks.adapters import DmEnvAdapter, OwnEnv
from tasks.dmlab import DmLab, DmLabSettings

REQUEST = struct.Struct("<ci")  # b"r" and a seed: reset; b"s" and an action: step, or the next episode after an end
# reward, terminated, truncated, the row is a reset, frames; of the level cache since the start: hits, misses, bytes, seconds
REPLY = struct.Struct("<d???i3qd")
_PR_SET_PDEATHSIG = 1


def observation_views(memory: mmap.mmap, offset: int, frame_shape: tuple[int, ...], words: int) -> dict[str, np.ndarray]:
    """One engine's part of the mapped memory: `frame` uint8 [H, W, C] and `instruction` int32 [L]."""
    size = int(np.prod(frame_shape))
    frame = np.frombuffer(memory, np.uint8, size, offset).reshape(frame_shape)
    return {"frame": frame, "instruction": np.frombuffer(memory, np.int32, words, offset + aligned(size))}


def observation_bytes(frame_shape: tuple[int, ...], words: int) -> int:
    """Bytes of one engine's part."""
    return aligned(int(np.prod(frame_shape))) + aligned(4 * words)


def aligned(size: int) -> int:
    """Rounded up to 64."""
    return -(-size // 64) * 64


def end_with_parent(parent: int) -> None:
    """Be killed when the parent ends, in whatever way: an engine that hangs would not notice by itself."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def serve(spec: dict[str, Any], connection: socket.socket) -> None:
    """Build the engine at the first request, then answer until the parent closes the connection."""
    memory = mmap.mmap(spec["memory"], 0)
    views = observation_views(memory, spec["offset"], tuple(spec["frame_shape"]), spec["words"])
    engine: DmLab | None = None
    over = False
    while request := connection.recv(REQUEST.size):
        kind, value = REQUEST.unpack(request)
        if engine is None:
            settings = DmLabSettings(**spec["settings"])
            engine = DmLab(spec["level"], settings, spec["action_repeat"], value, spec["test"])
            env = OwnEnv(DmEnvAdapter(engine), spec["words"], spec["task"])
        if kind == b"r":
            engine.seed(value)
        reset = kind == b"r" or over
        if reset:
            observation, _ = env.reset()
            reward, terminated, truncated, frames = 0.0, False, False, 0
        else:
            observation, reward, terminated, truncated, info = env.step(value)
            frames = info["frames"]
        over = terminated or truncated
        for name, view in views.items():
            view[...] = observation[name]
        cache = engine.cache
        counts = (cache.hits, cache.misses, cache.bytes, cache.build_seconds) if cache else (0, 0, 0, 0.0)
        connection.send(REPLY.pack(reward, terminated, truncated, reset, frames, *counts))
    if engine is not None:
        engine.close()


def main() -> None:
    """Serve, and tell the parent of an exception."""
    spec = json.loads(sys.argv[1])
    end_with_parent(spec["parent"])
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with socket.socket(fileno=spec["socket"]) as connection:
        try:
            serve(spec, connection)
        except (BrokenPipeError, ConnectionResetError):
            pass  # the parent has gone
        except Exception as error:
            text = f"E{type(error).__name__}: {error}".encode()[:4000]
            connection.send(text.ljust(REPLY.size + 1))  # never as long as a reply
            sys.exit(1)


if __name__ == "__main__":
    main()
