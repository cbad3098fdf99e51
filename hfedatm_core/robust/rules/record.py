"""Trust by record: an update counts less if its record is below half of the median record.

With the records ``e_k`` of `hfedatm_core.robust.agreement`, an update counts with the share

    min(1, 2 e_k / med e)

and not at all if that is negative. Honest nodes of rare domains agree less than others, but more
than half as much, so their updates count fully. Noise, changed labels and nodes that agreed with
the others only for a while count for little, even if one step cannot tell them from the others.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hfedatm_core.robust.rules.base import RobustRule
from hfedatm_core.robust.updates import BoundedUpdates
from hfedatm_core.update import Update


@dataclass
class Record(RobustRule):
    """Lower the share of nodes that have agreed little so far; ``liars`` is not used."""

    def admit(self, updates: BoundedUpdates) -> Iterable[Update]:
        """Give every update its share."""
        if len(updates) < 3:
            return updates
        pairs = zip(updates, shares(updates.records()).tolist(), strict=True)
        return (replace(u, share=u.share * share) for u, share in pairs if share > 0)


def shares(records: Tensor) -> Tensor:
    """Return the share of each update; without any evidence all updates count fully."""
    usual = float(records.median())
    if usual <= 0.0:
        return torch.ones_like(records)
    return (2 * records / usual).clamp(0.0, 1.0)
