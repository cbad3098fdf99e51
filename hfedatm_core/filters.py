"""How much two sets of filters differ: the cost that the alignment minimises."""

from __future__ import annotations

import math
from functools import cached_property

import torch
from torch import Tensor

# arccos of a float32 cosine near one is only good to the square root of the rounding error.
_ANGLE_SLACK = 2e-3


class Filters:
    """The filters of one weight tensor, one flattened row per channel.

    Parameters
    ----------
    weight
        The tensor that produces the channels.
    offset, size, block
        Its first axis holds ``size`` channels of ``block`` rows each from ``offset`` on.
    """

    def __init__(self, weight: Tensor, offset: int, size: int, block: int) -> None:
        rows = weight.detach().narrow(0, offset, size * block).reshape(size, -1)
        self.rows = rows if rows.dtype == torch.float64 else rows.to(torch.float32)

    @cached_property
    def norms(self) -> Tensor:
        """Euclidean length of each filter."""
        norms: Tensor = torch.linalg.vector_norm(self.rows, dim=1)
        return norms

    @cached_property
    def nearest(self) -> Tensor:
        """Angle between each filter and the one nearest to it in the same tensor."""
        cosines = self._cosines(self)
        cosines.fill_diagonal_(-1.0)
        return torch.arccos(cosines.amax(1).clamp(-1.0, 1.0))

    def cost(self, other: Filters) -> Tensor:
        r"""Squared distances of the normalised filters, :math:`D_{ij} = \|\hat a_i - \hat b_j\|^2`.

        For filters other than zero that is ``2 - 2 cos``; a dead filter (all zero) is at distance 0
        from a dead one and at distance 1 from any other.
        """
        lengths = self._unit[:, None] + other._unit
        return lengths.sub_(self._cosines(other), alpha=2.0).clamp_(min=0.0)

    def identity_is_optimal(self, other: Filters) -> bool:
        r"""Tell cheaply that every column of ``self.cost(other)`` has its minimum on the diagonal.

        With :math:`\theta_j` the angle between :math:`a_j` and :math:`b_j`, the triangle inequality
        gives :math:`\angle(a_i, b_j) \ge \angle(a_i, a_j) - \theta_j`, so it suffices that
        :math:`2 \theta_j` is at most the angle from :math:`a_j` to its nearest neighbour. That
        needs no matrix product for a second ``other``. False says nothing.
        """
        if not (self._unit.all() and other._unit.all()):
            return False
        twice = 2 * torch.arccos(self.diagonal_cosines(other).clamp(-1.0, 1.0)) + _ANGLE_SLACK
        if float(twice.max()) > math.pi / 2:  # as far apart as unrelated filters: do not try
            return False
        return bool((twice <= self.nearest).all())

    def diagonal_cost(self, other: Filters) -> float:
        """Sum of the diagonal of ``self.cost(other)``."""
        costs = self._unit + other._unit - 2 * self.diagonal_cosines(other)
        return float(costs.clamp_(min=0.0).sum(dtype=torch.float64))

    def diagonal_cosines(self, other: Filters) -> Tensor:
        """Cosine between equally placed filters; 0 for a dead filter."""
        return (self.rows * other.rows).sum(1) * self._inverse * other._inverse

    def _cosines(self, other: Filters) -> Tensor:
        # Scaling the product instead of the filters saves two copies of the weights.
        return (self.rows @ other.rows.T).mul_(self._inverse[:, None]).mul_(other._inverse)

    @cached_property
    def _unit(self) -> Tensor:
        return (self.norms > 0).to(self.rows.dtype)

    @cached_property
    def _inverse(self) -> Tensor:
        return torch.where(self.norms > 0, 1 / self.norms, 0.0)
