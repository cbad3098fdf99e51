"""No robust rule beyond the bounds."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from hfedatm_core.robust.rules.base import RobustRule
from hfedatm_core.robust.updates import BoundedUpdates
from hfedatm_core.update import Update


@dataclass
class Everybody(RobustRule):
    """Merge every update."""

    def admit(self, updates: BoundedUpdates) -> Iterable[Update]:
        """Return all updates."""
        return updates
