"""Settings by dotted key, from YAML and `key=value`: read, merged, checked against ranges. What they mean is not known here."""

import dataclasses
import difflib
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException


def parse_overrides(overrides: Sequence[str]) -> DictConfig:
    """`a.b=value` strings as a configuration; values are read as YAML (`false` is false, `1e-3` a number)."""
    keys: list[str] = []
    for text in overrides:
        if not text.partition("=")[0] or "=" not in text:
            raise ValueError(f"{text!r} is no setting: write key=value, such as optimiser.learning_rate=1e-3")
        try:
            found = [key for key, _ in _leaves(OmegaConf.from_dotlist([text]))]
        except (OmegaConfBaseException, yaml.YAMLError) as error:
            raise ValueError(f"the setting {text} cannot be read: {first_line(error)}") from error
        for key in found:
            if any(key == other or key.startswith(other + ".") or other.startswith(key + ".") for other in keys):
                raise ValueError(f"{key} is set twice on the command line: set it once")
        keys += found
    return OmegaConf.from_dotlist(list(overrides))


def flatten(settings: Any, prefix: str = "") -> dict[str, Any]:
    """Dotted key -> value of nested dataclasses."""
    flat: dict[str, Any] = {}
    for item in dataclasses.fields(settings):
        value = getattr(settings, item.name)
        key = prefix + item.name
        flat.update(flatten(value, key + ".") if dataclasses.is_dataclass(value) else {key: value})
    return flat


def read_yaml(path: Path) -> DictConfig:
    try:
        content = OmegaConf.create(path.read_text(encoding="utf-8")) if path.stat().st_size else OmegaConf.create({})
    except OSError as error:
        raise ValueError(f"cannot read the configuration {path}: {error.strerror}") from error
    except (yaml.YAMLError, OmegaConfBaseException, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is no YAML with unique keys: {' '.join(str(error).split())}") from error
    if not isinstance(content, DictConfig):
        raise ValueError(f"{path} must hold settings as `key: value` lines")
    return content


def merge(base: DictConfig, more: Any, source: str, known: Sequence[str]) -> DictConfig:
    """`base` with the settings of `more` from `source`, whose dotted keys must be in `known`."""
    OmegaConf.set_readonly(base, False)
    for key, value in _leaves(more):
        if any(name.startswith(key + ".") for name in known):
            if value != {}:
                raise ValueError(
                    f"{key}={value} in {source}: {key} is a section, set one of its keys, such as {_nearest(key, known)}"
                )
        elif not any(key == name or key.startswith(name + ".") for name in known):
            raise ValueError(f"unknown setting {key} in {source}: did you mean {_nearest(key, known)}?")
    try:
        return cast(DictConfig, OmegaConf.merge(base, more))
    except (OmegaConfBaseException, TypeError) as error:  # a list for a section raises the latter
        key = getattr(error, "full_key", None) or ", ".join(key for key, _ in _leaves(more))
        raise ValueError(f"{key} in {source}: {first_line(error)}") from error


def _leaves(config: DictConfig, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys and values of the leaves; an empty section counts as a leaf."""
    for key, value in config.items_ex(resolve=False):
        name = f"{prefix}{key!s}"
        if isinstance(value, DictConfig) and len(value):
            yield from _leaves(value, f"{name}.")
        else:
            yield name, value


def _nearest(key: str, known: Sequence[str]) -> str:
    """The known key most like this one; a bare name also finds the keys that end in it."""
    last = key.rsplit(".", 1)[-1]
    ends = [name for name in known if name.rsplit(".", 1)[-1] == last]
    close = difflib.get_close_matches(key, known, n=1, cutoff=0.0)
    by_end = difflib.get_close_matches(last, [name.rsplit(".", 1)[-1] for name in known], n=1, cutoff=0.75)
    by_end = [name for name in known if by_end and name.endswith(by_end[0])]
    return (ends or (close if difflib.SequenceMatcher(None, key, close[0]).ratio() > 0.75 else by_end) or close)[0]


def check_ranges(settings: Any, prefix: str = "") -> None:
    """`min` and `max` of every field's metadata, both allowed values; NaN and infinity never are."""
    for item in dataclasses.fields(settings):
        value, key = getattr(settings, item.name), prefix + item.name
        if dataclasses.is_dataclass(value):
            check_ranges(value, key + ".")
        elif isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{key}={value} is not a finite number")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            _check_range(key, value, item.metadata)


def _check_range(key: str, value: float, limits: Mapping[str, Any]) -> None:
    if "min" in limits and value < limits["min"]:
        raise ValueError(f"{key}={value} is out of range: it must be at least {limits['min']}")
    if "max" in limits and value > limits["max"]:
        raise ValueError(f"{key}={value} is out of range: it must be at most {limits['max']}")


def first_line(error: Exception) -> str:
    return str(error).splitlines()[0]
