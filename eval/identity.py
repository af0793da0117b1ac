"""What was measured, and how: two reports that differ in it are not about the same thing."""

from dataclasses import dataclass
from typing import Any

from tasks.suite import Suite

UNSTATED = "unstated"


@dataclass(frozen=True)
class Identity:
    """What was measured, and how.

    source: run folder or file. policy: how actions were chosen. episodes: which ones were averaged. split: levels of
    "train" or "test". protocol: of Atari. time_limit, reward_transform: of the training; scores are raw returns.
    seed: base seed of the games played. checkpoint, parameter_hash: file and SHA-256 of the parameters that played.
    environment: the run's settings of environments, by name. frames_per_step: environment frames of an agent step
    (action repeat). observation: shape and type of a frame. action_set: legal actions per task. score_table: that the
    source itself states. runs: one entry per run: source, seed of the training, frames, checkpoint, parameter_hash.
    """

    source: str
    policy: str = UNSTATED
    episodes: str = UNSTATED
    split: str = UNSTATED
    protocol: str = UNSTATED
    time_limit: str = UNSTATED
    reward_transform: str = UNSTATED
    seed: int | None = None
    checkpoint: str | None = None
    parameter_hash: str | None = None
    environment: dict[str, Any] | None = None
    frames_per_step: int | None = None
    observation: str = UNSTATED
    action_set: dict[str, int] | None = None
    score_table: str = UNSTATED
    runs: tuple[dict[str, Any], ...] = ()


def differences(subject: Identity, baseline: Identity, subject_suite: Suite, baseline_suite: Suite) -> list[str]:
    """What differs in a way that changes the meaning of a comparison, one sentence each. Unstated equals anything."""
    found = []
    split_matters = any(task.train_level != task.test_level for task in subject_suite.tasks)
    for name, values in (
        ("score table", (subject.score_table, baseline.score_table)),
        ("split", (subject.split, baseline.split) if split_matters else ("", "")),
        ("protocol", (subject.protocol, baseline.protocol)),
        ("action repeat", (_repeat(subject), _repeat(baseline))),
        ("frame limit", (_limit(subject), _limit(baseline))),
    ):
        if UNSTATED not in values and None not in values and values[0] != values[1]:
            found.append(f"{name}: {values[0]} against {values[1]}")
    for task in subject_suite.tasks:
        if task.name not in baseline_suite.task_names:
            continue
        other = baseline_suite.task(task.name)
        scores = [(t.random_score, t.human_score) for t in (task, other)]
        if scores[0] != scores[1] and subject.score_table == baseline.score_table:
            found.append(f"random and human score of {task.name}: {scores[0]} against {scores[1]}")
        if (task.train_level, task.test_level, task.env_kwargs) != (other.train_level, other.test_level, other.env_kwargs):
            found.append(f"level of {task.name}: {task.test_level} against {other.test_level}")
    return found


def remarks(subject: Identity, baseline: Identity) -> list[str]:
    """What differs, or is not known, and does not forbid a comparison."""
    found = []
    for name in ("policy", "split", "protocol", "time_limit", "reward_transform", "observation", "action_set"):
        here, there = getattr(subject, name), getattr(baseline, name)
        if name == "action_set" and here and there:
            there = {task: count for task, count in there.items() if task in here}
            here = {task: count for task, count in here.items() if task in there}
        label = name.replace("_", " ")
        if there in (None, UNSTATED) and here not in (None, UNSTATED, "-"):
            if name in ("policy", "split", "protocol"):
                found.append(f"the baseline's {label} is not stated")
        elif here not in (None, UNSTATED) and there not in (None, UNSTATED) and here != there:
            found.append(f"{label}: {here} against {there}")
    return found


def _repeat(identity: Identity) -> int | None:
    return identity.frames_per_step


def _limit(identity: Identity) -> int | None:
    return (identity.environment or {}).get("max_episode_frames") if identity.protocol not in ("-", UNSTATED) else None
