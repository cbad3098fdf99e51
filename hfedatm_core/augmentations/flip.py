"""Mirror half of the images, left to right."""

import torch
from torch import Tensor

from hfedatm_core.augmentations.images import covers, images
from hfedatm_core.data.base import Batch, Inputs


def augment(inputs: Inputs, targets: Tensor, generator: torch.Generator) -> Batch:
    """Mirror each image with chance 1/2; a target of the image's size is mirrored with it."""
    pictures = images(inputs, "flip")
    mirrored = (torch.rand(len(pictures), generator=generator) < 0.5).to(pictures.device)
    return _mirror(pictures, mirrored), (
        _mirror(targets, mirrored) if covers(targets, pictures) else targets
    )


def _mirror(values: Tensor, which: Tensor) -> Tensor:
    return torch.where(which.view(-1, *[1] * (values.ndim - 1)), values.flip(-1), values)
