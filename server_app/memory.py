"""The server's state between rounds besides the model, and how the server goes back to it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from hfedatm.base.index_maps import StationMaps
from hfedatm.base.round_record import Source
from hfedatm.contracts import Paced, Rule
from hfedatm_core import ChannelGraph, Merged
from hfedatm_core.channels.index_maps import IndexMap
from hfedatm_core.tensors import State
from server_app.flights import Flights
from server_app.undoing import Accepted


class ServerMemory:
    """State that outlives a round and, saved to a file, a restart.

    Attributes
    ----------
    shared
        Mean of the arrays that the client method shares.
    broadcast
        Model the stations start from, if it is not the published one.
    standing
        Agreement of each station with the others so far.
    maps
        Station -> where merges moved its channels; for its nodes' memories.
    plans
        Station and channel group -> the transport plan that the merge of stations with starts and
        shapes of their own has found.
    flights
        Stations at work that the last merge has not waited for.
    accepted
        The last model that was not much worse than the one before.
    """

    def __init__(self, rule: Rule) -> None:
        self._rule = rule
        self.shared: State = {}
        self.broadcast: State = {}
        self.standing: dict[str, float] = {}
        self.maps: dict[str, StationMaps] = {}
        self.plans: State = {}
        self.flights = Flights(rule.max_staleness if isinstance(rule, Paced) else 0)
        self.accepted: Accepted | None = None

    def remember(self, round: int) -> State:
        """Return all that a resumed run needs, except the model of this round."""
        standing = {name: torch.tensor(value) for name, value in self.standing.items()}
        parts = {**self._parts(), "standing": standing, "flights": self.flights.remember()}
        if self.accepted and self.accepted.round != round:
            parts |= self.accepted.to_memory()  # from an earlier round than the current model
        return {f"{part}/{n}": t for part, state in parts.items() for n, t in state.items()}

    def restore(self, memory: State) -> None:
        """Restore the state that `remember` returned."""
        parts: dict[str, State] = {}
        for key, tensor in memory.items():
            part, _, name = key.partition("/")
            parts.setdefault(part, {})[name] = tensor
        self._put_back(parts)
        self.standing = {name: float(value) for name, value in parts.get("standing", {}).items()}
        self.flights.restore(parts.get("flights", {}))
        self.accepted = Accepted.from_memory(parts)

    def note_moves(
        self, round: int, merged: Merged, graph: ChannelGraph, late: Mapping[str, int]
    ) -> None:
        """Keep where a merge moved the channels of each station, under the round of its work.

        ``late`` says how many rounds before the merge a station was asked; 0 if it is not there.
        """
        for station, permutations in merged.permutations.items():
            found = IndexMap.of(graph, permutations, merged.state)
            if found:
                known = self.maps.get(station, StationMaps())
                self.maps[station] = known.plus(round - late.get(station, 0), found)

    def resume(self, model: State, source: Source, round: int) -> None:
        """Resume after a round, from its model and the scores of the last accepted model."""
        if self.accepted:
            self.accepted = replace(self.accepted, source=source)
        else:
            self.accept(model, source, round)

    def accept(self, model: State, source: Source, round: int) -> None:
        """Keep a model to go back to, with the state that belongs to it."""
        self.accepted = Accepted(model, self._parts(), source, round)

    def take_back(self, before: Accepted, round: int) -> State:
        """Return the model to continue from, as if this round had not happened."""
        self._put_back(before.memory)
        self.accepted = replace(before, round=round)
        return before.model

    def _parts(self) -> dict[str, State]:
        maps = {
            f"{station}/{name}": array
            for station, found in self.maps.items()
            for name, array in found.to_arrays().items()
        }
        parts = {"shared": self.shared, "rule": self._rule.remember(), "start": self.broadcast}
        return {**parts, "maps": maps, "plans": self.plans}

    def _put_back(self, parts: Mapping[str, State]) -> None:
        self.shared, self.broadcast = parts.get("shared", {}), parts.get("start", {})
        self._rule.restore(parts.get("rule", {}))
        self.plans = parts.get("plans", {})
        arrays: dict[str, State] = {}
        for key, array in parts.get("maps", {}).items():
            station, _, name = key.partition("/")
            arrays.setdefault(station, {})[name] = array
        self.maps = {name: StationMaps.from_arrays(found) for name, found in arrays.items()}
