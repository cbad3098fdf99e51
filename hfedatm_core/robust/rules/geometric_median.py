"""Geometric median (Pillutla et al., 2022): the point with the smallest summed distance to all.

Weiszfeld's iteration gives it as a mean in which an update counts the less the further it lies
away. The weights are what is kept of it: every update enters with its share.
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
    """Lower the share of what lies far away; ``liars`` is not used."""

    def admit(self, updates: BoundedUpdates) -> Iterable[Update]:
        """Give every update its share."""
        if len(updates) < 3:
            return updates
        shares = weiszfeld(products(updates), updates.claims()).tolist()
        pairs = zip(updates, shares, strict=True)
        return (replace(update, share=update.share * share) for update, share in pairs)


def weiszfeld(products: Tensor, weights: Tensor) -> Tensor:
    """Return ``1 / ‖u_k − z‖`` at the weighted geometric median ``z``, the largest being 1.

    Parameters
    ----------
    products
        Inner products of the updates' moves: all that the distances to a mean of them need.
    weights
        How much each distance counts.
    """
    own = products.diagonal()
    shares = torch.ones_like(own)
    for _ in range(ITERATIONS):
        mean = weights * shares / (weights * shares).sum()
        squares = (own - 2 * products @ mean + mean @ products @ mean).clamp(min=0)
        # An update at the median itself would weigh infinitely much.
        floor = 1e-3 * float(squares.median()) or 1e-12 * float(own.max()) or 1.0
        shares = squares.clamp(min=floor).rsqrt()
        shares = shares / shares.max()
    return shares
