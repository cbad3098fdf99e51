"""Move each image a little, and repeat its edge where it left."""

import torch
from torch import Tensor

from hfedatm_core.augmentations.images import covers, images
from hfedatm_core.data.base import Batch, Inputs

PART = 8
"""An image moves by up to this part of its height and width."""


def augment(inputs: Inputs, targets: Tensor, generator: torch.Generator) -> Batch:
    """Cut each image out at a random place, up to an eighth of its size away.

    A target of the image's size moves with it.
    """
    pictures = images(inputs, "crop")
    height, width = pictures.shape[-2:]
    down = _places(len(pictures), height, generator).to(pictures.device)
    right = _places(len(pictures), width, generator).to(pictures.device)
    return _move(pictures, down, right), (
        _move(targets, down, right) if covers(targets, pictures) else targets
    )


def _places(count: int, size: int, generator: torch.Generator) -> Tensor:
    """Return for each image which rows (or columns) it consists of afterwards."""
    most = size // PART
    moved = torch.randint(-most, most + 1, (count, 1), generator=generator)
    return (torch.arange(size) + moved).clamp(0, size - 1)


def _move(values: Tensor, down: Tensor, right: Tensor) -> Tensor:
    between = [1] * (values.ndim - 3)
    rows = down.view(len(values), *between, -1, 1).expand(values.shape)
    columns = right.view(len(values), *between, 1, -1).expand(values.shape)
    return values.gather(-2, rows).gather(-1, columns)
