"""What a learner asks of its device: TF32, and a compiled torso."""

import torch

from agent.network import Network


def allow_tf32(allowed: bool) -> None:
    """For this process, on a GPU: products and convolutions of float32 may round their factors to 10 bits."""
    torch.backends.cuda.matmul.allow_tf32 = allowed
    torch.backends.cudnn.allow_tf32 = allowed


def compile_torso(network: Network, num_frames: int) -> None:
    """torch.compile in place, forward and backward, for batches of `num_frames` frames; names of parameters stay.

    Only the torso, which has the same shape in every update: heads follow from the tasks of a batch. Other numbers of frames,
    as the conflict measurement has, run as they are: to compile them would halt a run, and all ranks with it, for a minute.

    Raises:
        ValueError: torch cannot compile here; gives its reason.
    """
    torch.compiler.set_stance("default")
    network.torso.compile()
    frame = torch.zeros(num_frames, *network.spec.frame_shape, dtype=network.seen_dtype)
    device = network.legal.device
    try:
        with torch.autocast(device.type, torch.bfloat16, enabled=network.bf16):
            total = network.torso(frame.to(device)).float().sum()
        total.backward()
    except Exception as error:  # whatever compiler and driver may say
        reason = " ".join(str(error).split())[:300]
        raise ValueError(f"learner.compile=true does not work on this machine ({reason}): use learner.compile=false") from error
    network.zero_grad(set_to_none=True)
    torch.compiler.set_stance("eager_on_recompile")
