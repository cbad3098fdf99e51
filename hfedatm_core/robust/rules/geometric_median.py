"""Geometric median (Pillutla et al., 2022): the point with the smallest summed distance to all.

Weiszfeld's iteration computes it as a weighted mean in which a distant update has a small weight.
The rule keeps only these weights: every update enters the merge with its weight as its share. Every
update has one vote, however many examples it claims: weighted by claims, one of three or four
updates could make up half of the total.

Pillutla et al., "Robust Aggregation for Federated Learning", arXiv:1912.13445.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hfedatm_core.robust.rules.base import RobustRule, products
from hfedatm_core.robust.updates import BoundedUpdates
from hfedatm_core.update import Update

ITERATIONS = 100


@dataclass
class GeometricMedian(RobustRule):
    """Lower the share of distant updates; ``liars`` is not used."""

    def admit(self, updates: BoundedUpdates) -> Iterable[Update]:
        """Give every update its share."""
        if len(updates) < 3:
            return updates
        claims = updates.claims()  # the mean multiplies by them: divide them out
        shares = weiszfeld(products(updates)) * claims.min() / claims
        pairs = zip(updates, shares.tolist(), strict=True)
        return (replace(update, share=update.share * share) for update, share in pairs)


def weiszfeld(products: Tensor) -> Tensor:
    """Return ``1 / ‖u_k − z‖`` at the geometric median ``z``, the largest being 1.

    The distances to a mean of the updates follow from the inner products of their moves alone.
    """
    own = products.diagonal()
    shares = torch.ones_like(own)
    for _ in range(ITERATIONS):
        mean = shares / shares.sum()
        squares = (own - 2 * products @ mean + mean @ products @ mean).clamp(min=0)
        # An update at the median itself would have an infinite weight.
        floor = 1e-3 * float(squares.median()) or 1e-12 * float(own.max()) or 1.0
        shares = squares.clamp(min=floor).rsqrt()
        shares = shares / shares.max()
    return shares
