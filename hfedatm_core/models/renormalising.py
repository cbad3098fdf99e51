"""Give pretrained weights the images they were trained on, however the data set scales them."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn


class Renormalise(nn.Module):
    """Turn inputs that the data set has normalised into ``(x - wanted_mean) / wanted_std``.

    Here ``x`` are the bytes of an image, 0 … 255.
    """

    scale: Tensor
    shift: Tensor

    def __init__(
        self,
        mean: Sequence[float],
        std: Sequence[float],
        wanted_mean: Sequence[float],
        wanted_std: Sequence[float],
    ) -> None:
        super().__init__()
        means, stds = _column(mean or (0.0,)) * 255, _column(std or (1.0,)) * 255
        # They are constants of the data set, not weights: they are neither saved nor sent.
        self.register_buffer("scale", stds / _column(wanted_std), persistent=False)
        shift = (means - _column(wanted_mean)) / _column(wanted_std)
        self.register_buffer("shift", shift, persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        """Return the images as the pretrained weights expect them."""
        return images * self.scale + self.shift


def _column(values: Sequence[float]) -> Tensor:
    return torch.tensor(values).view(-1, 1, 1)
