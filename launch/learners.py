"""A learner as a run's configuration wants it, and the device that it is on."""

import torch

from agent.device import allow_tf32, compile_torso
from agent.distributed import Ranks
from agent.learner import Learner
from agent.network import Network
from launch.config import RunFiles


def make_learner(run: RunFiles, device: torch.device, ranks: Ranks | None = None) -> Learner:
    """With new parameters, and precision, TF32 and compiler set.

    Raises:
        ValueError: learner.compile does not work here.
    """
    config, settings = run.config, run.config.learner
    network = Network(run.network, settings.precision == "bf16").to(device)
    allow_tf32(settings.tf32)
    if settings.compile:
        compile_torso(network, settings.batch_size // settings.minibatches * (config.actor.unroll_length + 1))
    return Learner(network, config.loss, config.optimiser, config.total_frames, ranks, settings, config.seed)


def choose_device(name: str, local_rank: int = 0, local_size: int = 1, key: str = "learner.device") -> torch.device:
    """auto = a GPU if there is one, each of several ranks on this machine its own.

    Raises:
        ValueError: torch does not know it, it is not here, or there are too few for the ranks.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda") and local_size > 1:
        if name != "cuda" or local_size > torch.cuda.device_count():
            raise ValueError(
                f"learner.device={name} does not fit {local_size} learner ranks on this machine, each needs a GPU of its own "
                f"and torch sees {torch.cuda.device_count()}: use fewer ranks, or learner.device=cpu"
            )
        return torch.device("cuda", local_rank)
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"{key}={name} is no device: use auto, cpu, cuda or cuda:0") from error
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"{key}={name} is not supported: use auto, cpu, cuda or cuda:0")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"{key}={name} is not here: torch sees {torch.cuda.device_count()} GPUs")
    return device
