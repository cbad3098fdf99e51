r"""Restore the spread of a merged network's units, which merging reduces.

The mean of several units that agree only in part varies less than each unit. This adds up layer
after layer, until nothing is left to classify. A layer's Gram determines the loss: with
:math:`M = [W\ b]` and the pooled Gram :math:`\bar G` the merged outputs have mean
:math:`m = M \bar g` and second moment :math:`\operatorname{diag}(M \bar G M^\top)`, and the
stations' own outputs, taken together, have

.. math:: m^* = \sum_e \gamma_e M_e g_e, \qquad q^* = \sum_e \gamma_e \operatorname{diag}(M_e G_e
    M_e^\top).

Every row is scaled, and its bias shifted, so that its variance and mean equal those of the
stations.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hfedatm_core.apart.folding import Moments
from hfedatm_core.grams.gram import Gram
from hfedatm_core.grams.layer_moments import layer_matrix, output_moments
from hfedatm_core.tensors import State

LEAST, MOST = 0.2, 5.0
"""The smallest and largest factor of a row."""

# A variance below this share of the second moment is a rounding error and is not scaled.
_ROUNDING = 1e-9


@dataclass
class OutputSums:
    """Running weighted sums of the moments of one layer's outputs, over the stations."""

    weight: float = 0.0
    mean: Tensor | None = None
    second: Tensor | None = None

    def add(self, mean: Tensor, second: Tensor, weight: float) -> None:
        """Add one station's moments, in the order of the merged network."""
        self.weight += weight
        self.mean = mean * weight if self.mean is None else self.mean + mean * weight
        self.second = second * weight if self.second is None else self.second + second * weight

    def moments(self) -> Moments:
        """Return mean and variance over all stations' data together."""
        assert self.mean is not None and self.second is not None
        mean, second = self.mean / self.weight, self.second / self.weight
        return Moments(mean, _variance(mean, second))


def repair_layer(
    state: dict[str, Tensor], layer: str, gram: Gram, wanted: Moments
) -> tuple[Moments, Moments]:
    """Scale and shift one layer of ``state``; return its moments before and after the repair.

    A unit that does not vary, in the merged network or in the stations, is only shifted. A layer
    without a bias is only scaled.
    """
    matrix = layer_matrix(state, layer)
    before = _moments(matrix, gram)
    scale = (wanted.variance / before.variance).sqrt()
    usable = (before.variance > 0) & (wanted.variance > 0) & torch.isfinite(scale)
    scale = torch.where(usable, scale.clamp(LEAST, MOST), 1.0)
    weight = state[f"{layer}.weight"]
    shape = (-1, *[1] * (weight.dim() - 1))
    state[f"{layer}.weight"] = (weight * scale.view(shape)).to(weight.dtype)
    bias = state.get(f"{layer}.bias")
    if bias is not None:
        moved = bias * scale + (wanted.mean - before.mean * scale)
        state[f"{layer}.bias"] = moved.to(bias.dtype)
    mean = before.mean * scale if bias is None else wanted.mean
    return before, Moments(mean, before.variance * scale.square())


def layer_moments(state: State, layer: str, gram: Gram) -> Moments:
    """Return the moments of a layer's outputs under a Gram."""
    return _moments(layer_matrix(state, layer), gram)


def _moments(matrix: Tensor, gram: Gram) -> Moments:
    mean, second = output_moments(matrix, gram)
    return Moments(mean, _variance(mean, second))


def _variance(mean: Tensor, second: Tensor) -> Tensor:
    variance = second - mean.square()
    return torch.where(variance > _ROUNDING * second.abs(), variance, 0.0)
