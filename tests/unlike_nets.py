"""Families of small networks of different width and depth, for the tests of resizing."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from hfedatm_core import models
from hfedatm_core.data import DataSpec
from hfedatm_core.resizing import Architecture

SPEC = DataSpec("image", 4, (1, 16, 16))
LARGE = DataSpec("image", 4, (3, 32, 32))


class Block(nn.Module):
    """A residual block."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(width, inner, 3, padding=1), nn.BatchNorm2d(inner)
        self.conv2, self.bn2 = nn.Conv2d(inner, width, 3, padding=1), nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum of the input and the branch."""
        return torch.relu(x + self.bn2(self.conv2(torch.relu(self.bn1(self.conv1(x))))))


def residual(width: int, blocks: int, inner: int = 3) -> nn.Module:
    """Return a residual network with so many blocks."""
    stem = nn.Sequential(nn.Conv2d(1, width, 3, stride=2), nn.BatchNorm2d(width), nn.ReLU())
    stage = nn.Sequential(*(Block(width, inner) for _ in range(blocks)))
    head = nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(4 * width, 4))
    return nn.Sequential(stem, stage, head)


def plain(widths: list[int], hidden: int) -> nn.Module:
    """Return convolutions with BatchNorm, ReLU and pooling, and two Linear layers."""
    layers: list[nn.Module] = []
    inputs = 1
    for width in widths:
        layers += [nn.Conv2d(inputs, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()]
        layers.append(nn.MaxPool2d(2))
        inputs = width
    side = 16 // 2 ** len(widths)
    layers += [nn.Flatten(), nn.Linear(inputs * side**2, hidden), nn.ReLU(), nn.Linear(hidden, 4)]
    return nn.Sequential(*layers)


def normed(width: int) -> nn.Module:
    """Return a network with a norm over its channels: they cannot be split."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(256, width), nn.LayerNorm(width), nn.ReLU(), nn.Linear(width, 4)
    )


def arch(model: nn.Module, name: str = "net", spec: DataSpec = SPEC) -> Architecture:
    """Return the architecture of a model."""
    return Architecture.of(model, spec.example(), name)


def built(name: str, spec: DataSpec = LARGE, **options: object) -> Architecture:
    """Return the architecture of a built-in model."""
    return arch(models.build(name, spec, **options), name, spec)


Make = Callable[[], Architecture]


def residual_model(spec: DataSpec, width: int = 4, blocks: int = 1) -> nn.Module:
    """Return a residual network for small images, as a model of a run."""
    stem = nn.Sequential(nn.Conv2d(spec.input_shape[0], width, 3), nn.BatchNorm2d(width), nn.ReLU())
    stage = nn.Sequential(*(Block(width, 3) for _ in range(blocks)))
    head = nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten())
    return nn.Sequential(stem, stage, head, nn.Linear(4 * width, spec.num_classes))
