"""What the stand-in checks and declares: types, settings, actions, names of observations."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from .levels import Level

BOOLEANS = ("allowHoldOutLevels",)
ACTIONS = (
    ("LOOK_LEFT_RIGHT_PIXELS_PER_FRAME", -512, 512),
    ("LOOK_DOWN_UP_PIXELS_PER_FRAME", -512, 512),
    ("STRAFE_LEFT_RIGHT", -1, 1),
    ("MOVE_BACK_FORWARD", -1, 1),
    ("FIRE", 0, 1),
    ("JUMP", 0, 1),
    ("CROUCH", 0, 1),
)
VECTORS = {
    "MAP_FRAME_NUMBER": 1,
    "VEL.TRANS": 3,
    "VEL.ROT": 3,
    "DEBUG.POS.TRANS": 3,
    "DEBUG.POS.ROT": 3,
    "DEBUG.PLAYER_ID": 1,
}
PICTURES = ("RGB", "RGBD", "BGR", "BGRD")  # each also as NAME_INTERLEAVED, and by the old spelling NAME_INTERLACED


def check_types(level: Any, observations: Any, config: Any, renderer: Any) -> None:
    """Errors: TypeError."""
    for name, value in (("level", level), ("renderer", renderer)):
        if not isinstance(value, str):
            raise TypeError(f"Lab() argument '{name}' must be str, not {type(value).__name__}")
    if type(observations) is not list:
        raise TypeError(f"Lab() argument 'observations' must be list, not {type(observations).__name__}")
    if type(config) is not dict:
        raise TypeError(f"Lab() argument 'config' must be dict, not {type(config).__name__}")
    for text in (*observations, *config.keys(), *config.values()):
        if not isinstance(text, str):
            raise TypeError(f"bad argument type: {text!r} is no str")


def check_action(action: np.ndarray, frames: int) -> None:
    """Errors: ValueError."""
    if action.shape != (len(ACTIONS),):
        raise ValueError(f"action must have shape ({len(ACTIONS)})")
    if action.dtype != np.intc:
        raise ValueError("action must have dtype np.intc")
    if not action.flags.c_contiguous:
        raise ValueError("action must be C-contiguous")
    if frames < 1:
        raise ValueError(f"num_steps must be at least 1, was {frames}")


def read_settings(level: Level, config: dict[str, str]) -> dict[str, Any]:
    """The settings that matter here, read; levels get and ignore all others. Errors: RuntimeError."""
    settings: dict[str, Any] = {
        "width": 320,
        "height": 240,
        "fps": 60,
        "mixerSeed": 0,
        "gpuDeviceIndex": 0,
        "episodeLengthSeconds": None,
        "datasetPath": config.get("datasetPath", ""),
        "level_seconds": level.seconds,
    }
    for key in settings:
        if key in config and key != "datasetPath":
            read = float if key == "episodeLengthSeconds" else lambda text: int(text, 0)
            try:
                settings[key] = read(config[key])
            except ValueError:
                raise RuntimeError(f"Failed to apply setting '{key} = {config[key]}' - not a number") from None
            if not 0 <= settings[key] < 2**32:
                raise RuntimeError(f"Failed to apply setting '{key} = {config[key]}' - out of range")
    for key in ("width", "height"):
        if settings[key] <= 0 or settings[key] % 4:
            raise RuntimeError(f"Failed to init environment - {key} {settings[key]} is no multiple of 4")
    for key in BOOLEANS:
        if config.get(key, "false") not in ("true", "false"):
            raise RuntimeError(f"Failed to apply setting '{key} = {config[key]}' - must be 'true' or 'false'")
    if level.held_out and config.get("allowHoldOutLevels") != "true":
        raise RuntimeError(f"Failed to init environment - {level.name} is held out: set allowHoldOutLevels to 'true'")
    return settings


def seconds(settings: dict[str, Any]) -> float:
    """Length of an episode: the setting, else the environment variable, else the level's own."""
    if settings["episodeLengthSeconds"] is not None:
        return settings["episodeLengthSeconds"]
    return float(os.environ.get("DMLAB_STANDIN_EPISODE_SECONDS", settings["level_seconds"]))


def gpus() -> int:
    return int(os.environ.get("DMLAB_STANDIN_GPU", "0"))


def observation_spec(height: int, width: int) -> list[dict[str, Any]]:
    """Name, dtype and shape of every observation."""
    spec: list[dict[str, Any]] = []
    for name in PICTURES:
        channels = len(name)
        for ending in ("_INTERLEAVED", "_INTERLACED"):
            spec.append({"name": name + ending, "dtype": np.uint8, "shape": (height, width, channels)})
        spec.append({"name": name, "dtype": np.uint8, "shape": (channels, height, width)})
    spec += [{"name": name, "dtype": np.float64, "shape": (size,)} for name, size in VECTORS.items()]
    spec.append({"name": "INSTR", "dtype": str, "shape": ()})
    return spec


def as_asked(picture: np.ndarray, name: str) -> np.ndarray:
    """uint8 [H, W, 3] -> a fresh C-contiguous array in the named order of channels and axes."""
    order, _, interleaved = name.partition("_")
    if order.startswith("BGR"):
        picture = picture[..., ::-1]
    if order.endswith("D"):
        depth = 255 - picture.max(axis=2, keepdims=True)
        picture = np.concatenate([picture, depth], axis=2)
    if not interleaved:
        picture = picture.transpose(2, 0, 1)
    return np.array(picture, order="C")
