"""Add a little noise to images or vectors."""

import torch
from torch import Tensor

from hfedatm_core.data.base import Batch, Inputs

SPREAD = 0.1
"""Standard deviation of the noise; scaled inputs have one of about 1."""


def augment(inputs: Inputs, targets: Tensor, generator: torch.Generator) -> Batch:
    """Add Gaussian noise to every number."""
    if not isinstance(inputs, Tensor):
        raise ValueError("noise is for images and vectors, and these inputs are text")
    noise = torch.randn(inputs.shape, generator=generator)
    return inputs + SPREAD * noise.to(inputs), targets
