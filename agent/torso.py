"""From a frame to a vector: IMPALA's shallow and deep torso, one for tiny frames, one for observations that are no image."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn


def make_torso(
    kind: str,
    frame_shape: tuple[int, int, int],
    frame_dtype: str,
    hidden_size: int,
    initialisation: str = "fan_in",
) -> "Torso":
    """A module from frames [N, H, W, C] to features [N, hidden_size]; `auto` chooses by the size of the frames.

    Raises:
        ValueError: an unknown kind, or frames too small for it.
    """
    if kind == "auto":
        smallest = min(frame_shape[:2])
        kind = "shallow" if smallest >= 36 else "small" if smallest >= 10 else "mlp"
    makers: dict[str, Callable[[int], list[nn.Module]]] = {
        "shallow": _shallow,
        "deep": _deep,
        "small": _small,
        "mlp": lambda channels: [],
    }
    if kind not in makers:
        raise ValueError(f"network.torso={kind} is unknown: use one of auto, {', '.join(makers)}")
    layers = makers[kind](frame_shape[-1])
    scale = 1 / 255 if frame_dtype == "uint8" else 1.0
    try:
        return Torso(layers, frame_shape, scale, hidden_size, initialisation)
    except RuntimeError as error:
        raise ValueError(
            f"network.torso={kind} cannot read frames of {frame_shape[0]}x{frame_shape[1]}: use network.torso=small or mlp"
        ) from error


@torch.no_grad()
def initialise(module: nn.Module, kind: str = "fan_in", gain: float = 2**0.5) -> None:
    """Weights of all convolutions and linear layers by `kind`, biases 0.

    orthogonal: times `gain`. fan_in: from a normal of standard deviation 1 / sqrt(fan-in), cut at two of them, as the
    published code. torch's own default is 0.58 times that, and over three layers the image fades to a fifth. In one supervised
    trial it did not find Pong's ball in 480 updates, this began to after 270.
    """
    for layer in module.modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            if kind == "orthogonal":
                # Made flat: torch's function wants rows that lie together, and channels-last weights do not.
                flat = layer.weight.new_empty(layer.weight.shape[0], layer.weight[0].numel())
                layer.weight.copy_(nn.init.orthogonal_(flat, gain).view(layer.weight.shape))
            else:
                deviation = layer.weight[0].numel() ** -0.5
                nn.init.trunc_normal_(layer.weight, 0.0, deviation, -2 * deviation, 2 * deviation)
            if layer.bias is not None:
                layer.bias.zero_()


class Torso(nn.Module):
    """Convolutions, then one fully connected layer with a ReLU."""

    def __init__(
        self, layers: list[nn.Module], frame_shape: tuple[int, int, int], scale: float, size: int, initialisation: str
    ) -> None:
        super().__init__()
        height, width, channels = frame_shape
        self.scale = scale
        self.layers = nn.Sequential(*layers)
        self.layers.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        with torch.no_grad():
            num_features = self.layers(torch.zeros(1, channels, height, width)).numel()
        self.output = nn.Linear(num_features, size)
        initialise(self, initialisation)

    def forward(self, frames: torch.Tensor) -> torch.Tensor:
        """frames [N, H, W, C], uint8 or float -> [N, size]."""
        # Channels last in memory already: the permutation is a view, and the cast keeps the layout.
        # Under autocast they go to its type at once: bfloat16 holds 0 to 256 exactly.
        device = frames.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else self.output.weight.dtype
        x = frames.permute(0, 3, 1, 2).to(dtype)
        if len(self.layers) == 0:
            x = x * self.scale
        else:
            first = self.layers[0]
            assert isinstance(first, nn.Conv2d)
            # Scaling the small weights instead of the large frames saves a pass over them: conv(x / 255) = conv / 255 (x).
            x = F.conv2d(x, first.weight * self.scale, first.bias, first.stride, first.padding)
            for layer in list(self.layers)[1:]:
                x = layer(x)
        return F.relu(self.output(x.flatten(1)))


class Residual(nn.Module):
    """x + conv(relu(conv(relu(x)))), all with the same number of channels."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1)
        self.second = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[N, channels, h, w] -> the same shape."""
        return x + self.second(F.relu(self.first(F.relu(x))))


def _shallow(channels: int) -> list[nn.Module]:
    return [nn.Conv2d(channels, 16, 8, 4), nn.ReLU(), nn.Conv2d(16, 32, 4, 2), nn.ReLU()]


def _deep(channels: int) -> list[nn.Module]:
    layers: list[nn.Module] = []
    for width in (16, 32, 32):
        layers += [nn.Conv2d(channels, width, 3, padding=1), nn.MaxPool2d(3, 2, padding=1)]
        layers += [Residual(width), Residual(width)]
        channels = width
    return [*layers, nn.ReLU()]


def _small(channels: int) -> list[nn.Module]:
    return [nn.Conv2d(channels, 16, 4, 2), nn.ReLU(), nn.Conv2d(16, 32, 3, 2), nn.ReLU()]
