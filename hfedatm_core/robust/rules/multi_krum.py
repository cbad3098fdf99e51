"""Multi-Krum (Blanchard et al., 2017): exclude the updates with the most distant neighbours.

The score of an update is the sum of its squared distances to its ``n − f − 2`` nearest others, with
``f = liars``. The ``n − f`` updates with the lowest scores, and those that tie with them, are
merged.

Blanchard et al., "Byzantine-Tolerant Machine Learning", arXiv:1703.02757.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

from hfedatm_core.robust.rules.base import RobustRule, products
from hfedatm_core.robust.updates import BoundedUpdates
from hfedatm_core.update import Update


@dataclass
class MultiKrum(RobustRule):
    """Choose by distance; the distance of a tensor is measured in units of its usual move."""

    def admit(self, updates: BoundedUpdates) -> Iterable[Update]:
        """Exclude the outermost updates."""
        liars = self.expected(updates)
        if len(updates) < 3 or liars == 0:
            return updates
        scores = krum_scores(products(updates), liars)
        count = max(1, len(updates) - liars)
        worst = float(scores.sort().values[count - 1])
        chosen = scores <= worst * (1 + 1e-9)
        return (update for update, keep in zip(updates, chosen.tolist(), strict=True) if keep)


def krum_scores(products: Tensor, liars: int) -> Tensor:
    """Return every update's score from the inner products of their moves."""
    own = products.diagonal()
    distances = (own[:, None] + own - 2 * products).clamp(min=0)
    nearest = distances.sort(dim=1).values[:, 1:]  # the first is the update itself
    return nearest[:, : max(1, len(products) - liars - 2)].sum(1)
