"""From YAML files and the command line to one checked, frozen Config; and back from a run folder."""

import importlib.metadata
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from agent.actor import ActorSettings
from agent.checkpoint import CheckpointSettings
from agent.distributed import DistributedSettings
from agent.learner import LearnerSettings
from agent.losses import LossSettings
from agent.network import NetworkSettings, NetworkSpec
from agent.optimisers import OptimiserSettings
from agent.transport.listener import RemoteSettings
from launch.settings import check_ranges, first_line, flatten, merge, parse_overrides, read_yaml
from tasks.dmlab import without_dummies
from tasks.environment import EnvironmentSettings
from tasks.registry import load_suite
from tasks.suite import Suite

PRESET_FILE = "preset_fast.yaml"
CONFIG_FILE, RESOLVED_FILE = "config.yaml", "resolved.yaml"
MAX_SEED = 2**63 - 1
# From a lost rank to the end of the others: they look who is missing, and rank 0 writes a checkpoint.
LOST_SECONDS = 10
ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class LogSettings:
    """Records of a run.

    Attributes:
        every_seconds: between two lines of metrics.jsonl, two points in TensorBoard and two lines on the screen.
        tensorboard: write TensorBoard files.
        mean_over_episodes: returns on the screen and in metrics.jsonl are means over so many last episodes of a task.
    """

    every_seconds: float = field(default=10.0, metadata={"min": 0.1})
    tensorboard: bool = True
    mean_over_episodes: int = field(default=100, metadata={"min": 1})


@dataclass(frozen=True)
class SupervisorSettings:
    """Watching over the processes.

    Attributes:
        silent_seconds: an actor or learner that gives no sign of life for so long is killed. Longer than the slowest reset.
        start_seconds: the same, from the start of a process to its first unroll.
        backoff_seconds: wait before a restart; doubles with each failure in a row, up to a minute.
        sound_seconds: a worker that lived so long and did some work was sound: its failures before are forgotten.
        max_start_failures: a worker that dies so often in a row ends the run; ten times as often if it has worked before.
        stop_seconds: for the learner to write its checkpoint and end when the run is told to stop. Give the host's own limit
            some seconds more: `docker stop -t`, Slurm's `--signal`.
    """

    silent_seconds: float = field(default=120.0, metadata={"min": 1})
    start_seconds: float = field(default=300.0, metadata={"min": 5})
    backoff_seconds: float = field(default=1.0, metadata={"min": 0})
    sound_seconds: float = field(default=60.0, metadata={"min": 0})
    max_start_failures: int = field(default=3, metadata={"min": 1})
    stop_seconds: float = field(default=120.0, metadata={"min": 1})


@dataclass(frozen=True)
class ClusterSettings:
    """Placement on a cluster (--cluster ray).

    Attributes:
        actors_per_node: actors on each node; 0 = as many as it has CPUs beside its learner ranks.
        cpus_per_rank: kept free of actors for each learner rank.
    """

    actors_per_node: int = field(default=0, metadata={"min": 0})
    cpus_per_rank: int = field(default=1, metadata={"min": 1})


@dataclass(frozen=True)
class DebugSettings:
    """For looking closely.

    Attributes:
        dump_unrolls: write the first N unrolls to RUN/unrolls, as the learner receives them.
    """

    dump_unrolls: int = field(default=0, metadata={"min": 0})


@dataclass(frozen=True)
class Config:
    """All settings of a run.

    Attributes:
        suite: name of a suite or path of a YAML file.
        tasks: a subset of its tasks; empty = all.
        preset: published = the suite's file in launch/configs, with the settings of papers; fast = over them, what reaches a
            score soonest on a small machine (launch/configs/preset_fast.yaml); suite = the suite has settings of its own only.
        score_table: of the suite; empty = its default.
        seed: 0 to 2^63 - 1; environments, action sampling and initial parameters follow from it.
        total_frames: environment frames (action repeat counted) to train on.
    """

    suite: str = "toy"
    tasks: list[str] = field(default_factory=list)
    preset: Literal["published", "fast", "suite"] = "published"
    score_table: str = ""
    seed: int = field(default=0, metadata={"min": 0, "max": MAX_SEED})
    total_frames: int = field(default=200_000_000, metadata={"min": 1})
    environment: EnvironmentSettings = field(default_factory=EnvironmentSettings)
    network: NetworkSettings = field(default_factory=NetworkSettings)
    actor: ActorSettings = field(default_factory=ActorSettings)
    learner: LearnerSettings = field(default_factory=LearnerSettings)
    distributed: DistributedSettings = field(default_factory=DistributedSettings)
    loss: LossSettings = field(default_factory=LossSettings)
    optimiser: OptimiserSettings = field(default_factory=OptimiserSettings)
    checkpoint: CheckpointSettings = field(default_factory=CheckpointSettings)
    log: LogSettings = field(default_factory=LogSettings)
    supervisor: SupervisorSettings = field(default_factory=SupervisorSettings)
    cluster: ClusterSettings = field(default_factory=ClusterSettings)
    debug: DebugSettings = field(default_factory=DebugSettings)
    remote: RemoteSettings = field(default_factory=RemoteSettings)


class RunFiles(NamedTuple):
    """What a run folder says about its run.

    frames_per_step: environment frames of one whole agent step. dropped_tasks: had games before a resume cut them off.
    code_version: of this program when the run last started.
    """

    config: Config
    suite: Suite
    network: NetworkSpec
    frames_per_step: int
    dropped_tasks: tuple[str, ...] = ()
    code_version: str = ""


def load_config(suite: str, config_file: Path | None, overrides: Sequence[str]) -> Config:
    """Defaults, then the suite's own file in launch/configs, the preset's, `config_file`, and `key=value` overrides.

    Raises:
        ValueError: an unknown or duplicate key, a wrong type, a value out of range; one sentence that names the key.
    """
    merged = _schema()
    built_in = files("launch.configs") / ("own.yaml" if suite.endswith((".yaml", ".yml")) else f"{suite}.yaml")
    if built_in.is_file():
        merged = _merge(merged, OmegaConf.create(built_in.read_text(encoding="utf-8")), f"launch/configs/{suite}.yaml")
    more = [] if config_file is None else [(read_yaml(config_file), str(config_file))]
    more.append((parse_overrides([f"suite={suite}", *overrides]), "the command line"))
    chosen = [layer["preset"] for layer, _ in more if "preset" in layer]
    has_own = merged["preset"] == "suite"
    if has_own and {*chosen} - {"suite"}:
        raise ValueError(f"preset={chosen[-1]}: suite {suite} has settings of its own only, leave it out")
    if "suite" in chosen and not has_own:
        raise ValueError("preset=suite cannot be chosen: use fast or published")
    if (chosen or [merged["preset"]])[-1] == "fast":
        text = (files("launch.configs") / PRESET_FILE).read_text(encoding="utf-8")
        merged = _merge(merged, OmegaConf.create(text), f"launch/configs/{PRESET_FILE}")
    for layer, source in more:
        merged = _merge(merged, layer, source)
    return _finish(merged)


def override_config(config: Config, overrides: Sequence[str], fixed: Sequence[str]) -> Config:
    """A run's configuration with some keys changed, for a resume.

    Raises:
        ValueError: as `load_config`, or a key (or section) in `fixed` would change.
    """
    changed = _finish(_merge(OmegaConf.structured(config), parse_overrides(overrides), "the command line"))
    before, after = flatten(config), flatten(changed)
    for key in before:
        if before[key] != after[key] and (key in fixed or key.split(".")[0] in fixed):
            raise ValueError(f"{key}={after[key]} cannot change on --resume, the run has {before[key]}: start a new run")
    return changed


def write_run(run_dir: Path, files: RunFiles) -> None:
    """RUN/config.yaml, and RUN/resolved.yaml: what followed from it."""
    for name, text in run_texts(files).items():
        temporary = run_dir / f".{name}.tmp"
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(run_dir / name)


def run_texts(files: RunFiles) -> dict[str, str]:
    """The files of `write_run`, name -> text."""
    resolved = {
        "suite": files.suite.to_dict(),
        "network": files.network.to_dict(),
        "frames_per_step": files.frames_per_step,
        "dropped_tasks": list(files.dropped_tasks),
        "code_version": code_version(),
    }
    return {
        CONFIG_FILE: OmegaConf.to_yaml(OmegaConf.structured(files.config)),
        RESOLVED_FILE: yaml.safe_dump(resolved, sort_keys=False, allow_unicode=True),
    }


def read_run(run_dir: Path) -> RunFiles:
    """What `write_run` wrote.

    Raises:
        ValueError: not a run folder, or its files do not fit this version.
    """
    config_file, resolved_file = run_dir / CONFIG_FILE, run_dir / RESOLVED_FILE
    if not config_file.is_file() or not resolved_file.is_file():
        raise ValueError(f"{run_dir} is no run folder: it has no {CONFIG_FILE} and {RESOLVED_FILE}")
    config = read_yaml(config_file)
    return _run_files(config, str(config_file), resolved_file.read_text(encoding="utf-8"))


def parse_run(texts: Mapping[str, str]) -> RunFiles:
    """Inverse of `run_texts`; errors as `read_run`."""
    return _run_files(cast(DictConfig, OmegaConf.create(texts[CONFIG_FILE])), CONFIG_FILE, texts[RESOLVED_FILE])


def _run_files(config: DictConfig, source: str, resolved_text: str) -> RunFiles:
    resolved = yaml.safe_load(resolved_text)
    return RunFiles(
        _finish(_merge(_schema(), config, source)),
        Suite.from_dict(resolved["suite"]),
        NetworkSpec.from_dict(resolved["network"]),
        resolved["frames_per_step"],
        tuple(resolved.get("dropped_tasks", ())),
        resolved.get("code_version", ""),
    )


def code_version() -> str:
    """The version of this package, with the commit where it runs from its own checkout."""
    version = importlib.metadata.version("multitask-agents")
    if not (ROOT / ".git").exists():
        return version
    try:
        call = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude=*"]
        done = subprocess.run(call, capture_output=True, encoding="utf-8", check=False, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return version
    return f"{version}+{done.stdout.strip()}" if done.returncode == 0 else version


def suite_of(config: Config) -> Suite:
    """The suite that a configuration names, cut to its tasks."""
    suite = load_suite(config.suite, config.tasks, config.score_table)
    return without_dummies(suite, config.environment.dmlab)


def _schema() -> DictConfig:
    schema = OmegaConf.structured(Config)
    OmegaConf.set_readonly(schema, False)
    return schema


def _merge(base: DictConfig, more: Any, source: str) -> DictConfig:
    return merge(base, more, source, list(flatten(Config())))


def _finish(merged: DictConfig) -> Config:
    try:
        config = cast(Config, OmegaConf.to_object(merged))
    except OmegaConfBaseException as error:
        raise ValueError(f"{getattr(error, 'full_key', None) or 'a setting'}: {first_line(error)}") from error
    check_ranges(config)
    actor = config.actor
    if actor.num_envs % 2:
        raise ValueError(f"actor.num_envs={actor.num_envs} is odd: the two half-groups need an even number")
    if config.optimiser.name == "adam" and config.optimiser.decay >= 1:
        raise ValueError(f"optimiser.decay={config.optimiser.decay:g} does not fit optimiser.name=adam: it must be below 1")
    learner = config.learner
    if learner.batch_size % learner.minibatches:
        raise ValueError(
            f"learner.batch_size={learner.batch_size} does not fall into learner.minibatches={learner.minibatches} equal "
            f"parts: use a multiple of {learner.minibatches}"
        )
    if config.loss.value_normalisation == "popart" and config.network.value_head == "shared":
        raise ValueError("loss.value_normalisation=popart does not fit network.value_head=shared: use per_task")
    patience, silent = config.distributed.timeout_seconds, config.supervisor.silent_seconds
    if config.learner.ranks > 1 and patience + LOST_SECONDS > silent:
        raise ValueError(
            f"distributed.timeout_seconds={patience:g} is too long for supervisor.silent_seconds={silent:g}: a rank that waits "
            f"for a hanging one would count as hanging, too; leave {LOST_SECONDS} s between them"
        )
    return config
