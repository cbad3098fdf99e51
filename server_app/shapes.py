"""Stations whose model has another shape than the global model: what they get, what they send."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from flwr.app import Message

from hfedatm.base.index_maps import RECORD, StationMaps
from hfedatm.base.records import layers_to_record, record_to_state, state_to_record
from hfedatm.base.settings import Settings
from hfedatm.base.station_fits import StationFit
from hfedatm.base.station_models import settings_of
from hfedatm.base.wire import Expected, NodeUpdate, read_update
from hfedatm_core import Merged, Update
from hfedatm_core.resizing import Fit
from hfedatm_core.resizing.merging import transported, way_back
from hfedatm_core.resizing.plans import Plan
from hfedatm_core.resizing.starting import calm_start, split_start
from hfedatm_core.tensors import State


class StationShapes:
    """The shapes of all stations of a run.

    Parameters
    ----------
    settings
        The run's settings.
    fits
        The stations whose model differs from the global model.
    """

    def __init__(self, settings: Settings, fits: Mapping[int, StationFit] | None = None) -> None:
        self._settings, self._fits = settings, dict(fits or {})
        self._found: dict[str, Fit] = {}  # ways that the merge of round 1 is finding

    def reading_order(self, stations: Iterable[int]) -> list[int]:
        """Return the stations, that which lacks least of the global model first.

        The first is the reference to which models with starts of their own are transported.
        """
        return sorted(stations, key=lambda station: (self._lost(station), station))

    def _lost(self, station: int) -> tuple[int, int]:
        found = self._fits.get(station)
        if found is None:
            return 0, 0
        return len(found.fit.absent), sum(a - b for a, b in found.fit.sizes.values())

    def start(self, model: State) -> State:
        """Return the first global model.

        It is the narrowest station's network, split, so that all stations share a start; blocks
        that some stations lack begin as the identity.
        """
        fits = [found.fit for found in self._fits.values()]
        narrow = [fit for fit in fits if fit.is_exact and any(a > b for a, b in fit.sizes.values())]
        if narrow:
            least = min(narrow, key=lambda fit: sum(own for _, own in fit.sizes.values()))
            model = split_start(least, model, least.station.model.state_dict())
        for fit in fits:
            model = calm_start(fit, model)
        return model

    def settings(self, station: int, kind: str) -> Settings:
        """Return the settings of a station's task; the global model is judged in its own shape."""
        return settings_of(self._settings, station if kind == "train" else None)

    def records(
        self,
        station: int,
        records: Mapping[str, Any],
        kind: str,
        layers: bool,
        apart: bool,
        own_start: bool = False,
    ) -> dict[str, Any]:
        """Return the records that bring a station its model, in the station's shape.

        A start of the station's own has that shape already.
        """
        found = self._fits.get(station)
        if found is None or kind != "train":
            return dict(records)
        own = dict(records)
        if not own_start:
            own["model"] = state_to_record(found.fit.down(record_to_state(own["model"])))
        own["layers"] = layers_to_record(self._layers(found, layers, apart))
        if RECORD in own:  # maps of the target's channels do not fit: what nodes keep is given up
            maps: StationMaps = StationMaps.from_arrays(record_to_state(own[RECORD]))
            own[RECORD] = StationMaps({}, max([maps.forgotten, *maps.rounds])).to_record()
        return own

    def read(self, reply: Message, expected: Expected, own_start: bool = False) -> NodeUpdate:
        """Read a station's reply in its own shape; return it in the global model's shape.

        The network of a station with a start of its own is brought up whole: it computes the same.
        """
        found = self._fits.get(reply.metadata.src_node_id)
        if found is None:
            return read_update(reply, expected)
        fit, previous = found.fit, expected.arrays
        sent = fit.down(previous)
        layers = self._layers(found, bool(expected.layers), not expected.shrunk)
        update = read_update(reply, replace(expected, arrays=sent, layers=layers))
        state = fit.up(update.state) if own_start else fit.lift(update.state, sent, previous)
        return replace(
            update,
            state=state,
            grams=fit.up_grams(update.grams),
            absent=frozenset(fit.absent),
        )

    def _layers(self, found: StationFit, wanted: bool, apart: bool) -> dict[str, int]:
        return (found.all_layers if apart else found.layers) if wanted else {}

    # --- stations with starts of their own

    def lifted(self, station: int, start: State) -> State:
        """Return a station's own start in the global model's shape."""
        found = self._fits.get(station)
        return start if found is None else found.fit.up(start)

    def matched(self, updates: Iterable[Update]) -> Iterator[Update]:
        """Yield the updates, those of other shapes by transport to the first update."""
        reference: Update | None = None
        self._found = {}
        known = {f"station {number}": found.fit for number, found in self._fits.items()}
        for update in updates:
            fit = known.get(update.name)
            if reference is None:
                reference = update
            elif fit is not None:
                # Splitting is exact, so this is the network that the station has sent.
                state, grams = fit.down(update.state), fit.down_grams(update.grams)
                small = replace(update, state=state, grams=grams)
                update, fit = transported(small, fit, reference)
            if fit is not None:
                self._found[update.name] = fit
            yield update
            del update

    def plans(self, merged: Merged) -> State:
        """Return the plans of all stations that were matched, as tensors to be kept."""
        return {
            f"{name.removeprefix('station ')}/{group}": plan.mass
            for name, fit in self._found.items()
            for group, plan in way_back(fit, merged, name).plans.items()
        }

    def use(self, plans: State) -> None:
        """Go these ways from now on; a station without a plan keeps its neighbours joined."""
        own: dict[int, dict[str, Plan]] = {}
        for key, mass in plans.items():
            name, _, group = key.partition("/")
            own.setdefault(int(name), {})[group] = Plan(mass)
        for station, found in own.items():
            before = self._fits[station]
            self._fits[station] = replace(before, fit=before.fit.with_plans(found))
