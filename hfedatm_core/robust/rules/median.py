"""Coordinate median (Yin et al., 2018): every number of the model is the median of the updates'.

All updates enter with that model, so that their Grams and sizes stay, and whatever merges them
finds nothing to disagree about.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from hfedatm_core.robust.rules.base import RobustRule, ranges
from hfedatm_core.robust.updates import BoundedUpdates
from hfedatm_core.update import Update


@dataclass
class CoordinateMedian(RobustRule):
    """Withstands every minority; ``liars`` is not used."""

    def admit(self, updates: BoundedUpdates) -> Iterable[Update]:
        """Replace every model by the median."""
        if len(updates) < 3:  # the median of two is their mean
            return updates
        return self._replaced(updates)

    def _replaced(self, updates: BoundedUpdates) -> Iterator[Update]:
        middle, _ = ranges(updates, trimmed=len(updates))
        for update in updates:
            yield replace(update, state=middle)
