"""Coordinate median (Yin et al., 2018): every number of the model is the median of the updates'.

All updates enter the merge with that model. Their Grams and sizes are kept, and the merging rule
finds no difference between the models.

Yin et al., "Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates",
arXiv:1803.01498.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from hfedatm_core.robust.rules.base import RobustRule, ranges
from hfedatm_core.robust.updates import BoundedUpdates
from hfedatm_core.update import Update


@dataclass
class CoordinateMedian(RobustRule):
    """Withstand every hostile minority; ``liars`` is not used."""

    def admit(self, updates: BoundedUpdates) -> Iterable[Update]:
        """Replace the model of every update by the median."""
        if len(updates) < 3:  # the median of two is their mean
            return updates
        return self._replaced(updates)

    def _replaced(self, updates: BoundedUpdates) -> Iterator[Update]:
        middle, _ = ranges(updates, trimmed=len(updates))
        for update in updates:
            yield replace(update, state=middle)
