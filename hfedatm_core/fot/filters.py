"""The difference between two sets of filters: the cost that the alignment minimises."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

# arccos of a float32 cosine near one is only as exact as the root of the rounding error.
_ANGLE_SLACK = 2e-3
# This many filters are enough to distinguish unrelated tensors from those that stayed near.
_SAMPLE = 16
# The bound on the nearest neighbours multiplies one input in so many, and no fewer than these.
_ONE_IN, _LEAST_INPUTS = 8, 64
# Numbers of a row that are added in float32, one after the other.
_PIECE = 4096
# Filters agree if their mean cosine is this many standard deviations above chance.
_AGREEMENT = 5.0


class Filters:
    """The filters of one weight tensor, one flattened row per channel.

    Parameters
    ----------
    weight
        The tensor that produces the channels.
    offset, size, block
        Its first axis holds ``size`` channels of ``block`` rows each from ``offset`` on.
    places
        The rows of all channels, ``block`` for each, if they are not in that order.
    """

    def __init__(
        self,
        weight: Tensor,
        offset: int,
        size: int,
        block: int,
        places: Sequence[int] | None = None,
    ) -> None:
        if places is None:
            rows = weight.detach().narrow(0, offset, size * block)
        else:
            rows = weight.detach()[torch.tensor(places, device=weight.device)]
        rows = rows.reshape(size, -1)
        kind = torch.float64 if rows.dtype == torch.float64 else torch.float32
        self.rows = rows.to("cpu", kind)

    @cached_property
    def norms(self) -> Tensor:
        """Euclidean length of each filter."""
        norms: Tensor = torch.linalg.vector_norm(self.rows, dim=1)
        return norms

    @cached_property
    def nearest(self) -> Tensor:
        """Angle between each filter and the one nearest to it in the same tensor."""
        return _nearest(self._cosines(self))

    @cached_property
    def nearest_bound(self) -> Tensor:
        r"""Lower bound of :attr:`nearest`, from an eighth of the products.

        If :math:`h` is the first part of the inputs of a normalised filter and :math:`r` the rest,
        :math:`\langle \hat a_i, \hat a_j \rangle \le \langle h_i, h_j \rangle + \|r_i\| \|r_j\|`.
        """
        part = self.rows[:, : max(_LEAST_INPUTS, self.rows.shape[1] // _ONE_IN)].numpy()
        cosines = torch.from_numpy(part @ part.T).mul_(self._inverse[:, None]).mul_(self._inverse)
        rest = (1.0 - cosines.diagonal()).clamp_(min=0.0).sqrt_()
        return _nearest(cosines.addr_(rest, rest))

    def cost(self, other: Filters) -> Tensor:
        r"""Squared distances of the normalised filters, :math:`D_{ij} = \|\hat a_i - \hat b_j\|^2`.

        For filters other than zero this is ``2 - 2 cos``; a dead filter (all zero) is at distance 0
        from a dead filter and at distance 1 from any other.
        """
        lengths = self._unit[:, None] + other._unit
        return lengths.sub_(self._cosines(other), alpha=2.0).clamp_(min=0.0)

    def certain_identity(self, other: Filters) -> float | None:
        r"""Trace of ``self.cost(other)`` if a quick test proves that no assignment costs less.

        With :math:`\theta_j` the angle between :math:`a_j` and :math:`b_j`, the triangle inequality
        gives :math:`\angle(a_i, b_j) \ge \angle(a_i, a_j) - \theta_j`. So if :math:`2 \theta_j` is
        at most the angle from :math:`a_j` to its nearest neighbour, every column of the cost has
        its minimum on the diagonal. A bound on that angle will do if the filters hardly moved; the
        neighbours themselves are found once, and a second ``other`` then needs no matrix product.
        ``None`` means that the test proves nothing.
        """
        if self.rows.data_ptr() == other.rows.data_ptr():
            return 0.0  # the reference itself
        if not (self._unit.all() and other._unit.all()):
            return None
        for count in (_SAMPLE, len(self.rows)):  # most unrelated filters fail on the sample
            cosines = _row_products(self.rows[:count], other.rows[:count])
            cosines = cosines * self._inverse[:count] * other._inverse[:count]
            cosines = cosines.clamp_(-1.0, 1.0)
            twice = 2 * torch.arccos(cosines) + _ANGLE_SLACK
            # The filters may be unrelated: do not compute the neighbours.
            if float(twice.max()) > math.pi / 2:
                return None
        if not ((twice <= self.nearest_bound).all() or (twice <= self.nearest).all()):
            return None
        return float((2 - 2 * cosines).sum(dtype=torch.float64))

    def agree(self, other: Filters, order: Tensor) -> bool:
        """Tell whether the filters of ``other``, in this order, resemble these filters at all."""
        ours, theirs = self.rows[:_SAMPLE], other.rows[order[:_SAMPLE]]
        cosine = float(torch.cosine_similarity(ours, theirs).mean())
        # The mean of n cosines of random directions in d dimensions has deviation 1 / sqrt(n d).
        return cosine > _AGREEMENT / math.sqrt(ours.numel())

    def _cosines(self, other: Filters) -> Tensor:
        # NumPy's BLAS is faster than torch's, and scaling the product instead of the filters saves
        # two copies of the weights.
        product = torch.from_numpy(self.rows.numpy() @ other.rows.numpy().T)
        return product.mul_(self._inverse[:, None]).mul_(other._inverse)

    @cached_property
    def _unit(self) -> Tensor:
        return (self.norms > 0).to(self.rows.dtype)

    @cached_property
    def _inverse(self) -> Tensor:
        return torch.where(self.norms > 0, 1 / self.norms, 0.0)


def _nearest(cosines: Tensor) -> Tensor:
    """Return the angle between each filter and the nearest other one; changes ``cosines``."""
    cosines.fill_diagonal_(-1.0)
    return torch.arccos(cosines.amax(1).clamp(-1.0, 1.0))


def _row_products(left: Tensor, right: Tensor) -> Tensor:
    """Return the inner product of each row with its counterpart.

    NumPy's einsum holds no matrix of products in memory. It adds one number after the other; the
    sums of short pieces keep its rounding error below that of the angles.
    """
    total = left.new_zeros(len(left))
    for start in range(0, left.shape[1], _PIECE):
        piece = slice(start, start + _PIECE)
        total += torch.from_numpy(
            np.einsum("ij,ij->i", left[:, piece].numpy(), right[:, piece].numpy())
        )
    return total
