"""Index maps on their way back: the server sends a station's maps, the nodes below apply them.

A map belongs to the round in which an alignment moved the channels of a station. State that a node
saved in this round is in the station's order; the model that the node gets next is in the order of
the merged model. State of other rounds has other maps or none. So maps are never combined: a node
that was away for some rounds needs the map of the round in which it saved its state, and gets it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from flwr.app import ArrayRecord, RecordDict

from hfedatm.base.npy import read_array, read_layout
from hfedatm.base.records import BadTask, find_record, state_to_record
from hfedatm.base.text import printable
from hfedatm_core.channels.index_maps import Follows, IndexMap
from hfedatm_core.tensors import State

RECORD = "index-maps"
MOST_ROUNDS = 8
"""Most rounds whose maps a station gets; state from before the oldest of them is given up."""
_FORGOTTEN = "forgotten"
_NAME = re.compile(r"(\d{1,9})/(.+):(\d{1,2})", re.DOTALL)


@dataclass(frozen=True)
class StationMaps:
    """The maps of one station.

    Attributes
    ----------
    rounds
        Round -> where its merge moved the station's channels.
    forgotten
        State that was saved in this round or before is given up: its map is no longer known.
    """

    rounds: Mapping[int, IndexMap] = field(default_factory=dict)
    forgotten: int = 0

    def __bool__(self) -> bool:
        """Tell whether there is anything to send."""
        return bool(self.rounds or self.forgotten)

    def plus(self, round: int, found: IndexMap) -> StationMaps:
        """Return the maps with that of another round; the oldest gives way if there are many."""
        if not found:
            return self
        rounds, forgotten = {**self.rounds, round: found}, self.forgotten
        for oldest in sorted(rounds)[:-MOST_ROUNDS]:
            forgotten = max(forgotten, oldest)
            del rounds[oldest]
        return StationMaps(rounds, forgotten)

    def before(self, round: int) -> StationMaps:
        """Return the maps of earlier rounds."""
        return StationMaps({r: m for r, m in self.rounds.items() if r < round}, self.forgotten)

    def moved(self, saved: int, kept: State, model: State, follows: Follows) -> State:
        """Return state that was saved in a round, in the order of ``model``; empty if given up."""
        if saved <= self.forgotten:
            return {}
        found = self.rounds.get(saved)
        return found.moved(kept, model, follows) if found and kept else kept

    # --- as arrays

    def to_arrays(self) -> State:
        """Return the maps as named arrays."""
        arrays = {
            f"{round}/{name}:{axis}": order.to(torch.int32)
            for round, found in self.rounds.items()
            for (name, axis), order in found.orders.items()
        }
        if self.forgotten:
            arrays[_FORGOTTEN] = torch.tensor(self.forgotten)
        return arrays

    @classmethod
    def from_arrays(cls, arrays: State) -> StationMaps:
        """Read arrays of `to_arrays`, from the server's own memory."""
        rounds: dict[int, dict[tuple[str, int], torch.Tensor]] = {}
        forgotten = int(arrays.get(_FORGOTTEN, 0))
        for key, order in arrays.items():
            if key != _FORGOTTEN:
                round, name, axis = _parse(key)
                rounds.setdefault(round, {})[name, axis] = order.long()
        return cls({r: IndexMap(orders) for r, orders in rounds.items()}, forgotten)

    def to_record(self) -> ArrayRecord:
        """Return the wire form."""
        return state_to_record(self.to_arrays())


def read_maps(content: RecordDict, model: State, round: int) -> StationMaps:
    """Return the maps in a message; raises `BadTask` unless each permutes an axis of the model.

    Parameters
    ----------
    content
        The message.
    model
        The model in the message.
    round
        The message's round; maps come from earlier ones.
    """
    record = find_record(content, RECORD, ArrayRecord)
    if record is None:
        return StationMaps()
    arrays: State = {}
    seen: set[int] = set()
    for key, array in record.items():
        if key == _FORGOTTEN:
            length = None
        else:
            saved, name, axis = _parse(key)
            seen.add(saved)
            if not 1 <= saved < round or len(seen) > MOST_ROUNDS:
                raise BadTask(f"index maps: round {saved} has no place in round {round}")
            if name not in model or axis >= model[name].dim():
                raise BadTask(f"index maps: the model has no axis {printable(key, 80)}")
            length = model[name].shape[axis]
        try:
            shape, dtype = read_layout(array)
        except Exception as error:  # a broken array may be anything
            raise BadTask(f"index maps: {printable(key, 80)} cannot be read: {error}") from None
        wanted = ((), "int64") if length is None else ((length,), "int32")
        if (shape, dtype.name) != wanted:
            raise BadTask(f"index maps: {printable(key, 80)} has type {dtype} and shape {shape}")
        value = torch.from_numpy(read_array(array))
        if length is None:
            if not 0 <= int(value) < round:
                raise BadTask(f"index maps: round {int(value)} has no place in round {round}")
        elif not torch.equal(value.sort().values, torch.arange(length, dtype=torch.int32)):
            raise BadTask(f"index maps: {printable(key, 80)} is not a permutation")
        arrays[key] = value
    return StationMaps.from_arrays(arrays)


def _parse(key: str) -> tuple[int, str, int]:
    found = _NAME.fullmatch(key)
    if found is None:
        raise BadTask(f"index maps: {printable(key, 80)} is not the name of a map")
    return int(found[1]), found[2], int(found[3])
