"""Index maps of an inner station: where it moved the channels of its stations, for their memory.

All levels align to the model that the server sent, so a map is right whatever the server then does
with the round.
"""

from __future__ import annotations

from flwr.app import ArrayRecord

from hfedatm.base.index_maps import RECORD, StationMaps
from hfedatm.base.memory import Moment, NodeMemory
from hfedatm_core import ChannelGraph, Combined
from hfedatm_core.channels.index_maps import IndexMap
from hfedatm_core.tensors import State


class InnerMaps:
    """The maps of every station of one inner station, kept from round to round."""

    def __init__(self, run: str, node: str, at: Moment) -> None:
        self._memory, self._at = NodeMemory(run, f"{node}-maps"), at
        arrays: dict[str, State] = {}
        for key, array in self._memory.load(before=at).items():
            station, _, name = key.partition("/")
            arrays.setdefault(station, {})[name] = array
        self._maps = {name: StationMaps.from_arrays(found) for name, found in arrays.items()}

    def to(self, station: int) -> dict[str, ArrayRecord]:
        """Return the record that a station gets with its task."""
        found = self._maps.get(f"station {station}")
        return {RECORD: found.to_record()} if found else {}

    def keep(self, combined: Combined, graph: ChannelGraph, model: State) -> None:
        """Keep where the alignment of this round moved channels."""
        for station, permutations in combined.permutations.items():
            found = IndexMap.of(graph, permutations, model)
            if found:
                before = self._maps.get(station, StationMaps())
                self._maps[station] = before.plus(self._at[0], found)
        arrays = {
            f"{station}/{name}": array
            for station, found in self._maps.items()
            for name, array in found.to_arrays().items()
        }
        if arrays:
            self._memory.save(self._at, arrays)
