"""One station by itself: the model of a chosen station, as if there were no others.

This is no way to merge but a bound to compare with: what a station reaches alone. In a run of one
global round the stations train apart for all their station rounds. ``hfedatm reproduce --bounds``
runs it for every station and shows the one with the best source validation.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from hfedatm.contracts import Rule, Situation, option
from hfedatm_core import Merged, Update


@dataclass
class OneStation(Rule):
    """The model of one station, unchanged."""

    station: int = option(0, "number of the station, counted from 0", ge=0)

    def merge(self, updates: Iterable[Update], situation: Situation) -> Merged:
        """Return the station's model; without its answer there is none."""
        wanted, found = f"station {self.station}", None
        for update in updates:
            if update.name == wanted:
                found = update.state
            del update
        if found is None:
            raise ValueError(f"{wanted} gave no usable answer")
        return Merged(dict(found))
