"""Trimmed mean (Yin et al., 2018), in the form that keeps every update a model of its own.

The ``liars`` lowest and highest values of every coordinate are not dropped but set to the nearest
remaining value (Winsorised). So no value outside the range of the honest updates enters the mean,
and the updates still differ within that range, which RegMean needs.

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
class TrimmedMean(RobustRule):
    """Clamp every coordinate into the range of the values that remain after trimming."""

    def admit(self, updates: BoundedUpdates) -> Iterable[Update]:
        """Clamp the updates."""
        liars = self.expected(updates)
        if len(updates) < 3 or liars == 0:
            return updates
        return self._clamped(updates, liars)

    def _clamped(self, updates: BoundedUpdates, liars: int) -> Iterator[Update]:
        low, high = ranges(updates, liars)
        for update in updates:
            state = {n: value.clamp(low[n], high[n]) for n, value in update.state.items()}
            yield replace(update, state=state)
            del update, state
