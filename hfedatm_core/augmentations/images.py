"""What all changes to images need."""

from torch import Tensor

from hfedatm_core.data.base import Inputs


def images(inputs: Inputs, name: str) -> Tensor:
    """Return the inputs if they are images, examples x channels x height x width."""
    if not isinstance(inputs, Tensor) or inputs.ndim != 4:
        raise ValueError(f"{name} is for images, and these inputs are none")
    return inputs


def covers(targets: Tensor, pictures: Tensor) -> bool:
    """Return whether a target has a value for each pixel, and so must move with its image."""
    return targets.ndim >= 3 and targets.shape[-2:] == pictures.shape[-2:]
