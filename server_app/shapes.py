"""Stations whose model has another shape than the global model: what they get, what they send."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from flwr.app import Message

from hfedatm.base.index_maps import RECORD, StationMaps
from hfedatm.base.records import layers_to_record, record_to_state, state_to_record
from hfedatm.base.settings import Settings
from hfedatm.base.station_fits import StationFit
from hfedatm.base.station_models import settings_of
from hfedatm.base.wire import Expected, NodeUpdate, read_update
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
        self, station: int, records: Mapping[str, Any], kind: str, layers: bool, apart: bool
    ) -> dict[str, Any]:
        """Return the records that bring a station its model, in the station's shape."""
        found = self._fits.get(station)
        if found is None or kind != "train":
            return dict(records)
        own = dict(records)
        own["model"] = state_to_record(found.fit.down(record_to_state(own["model"])))
        own["layers"] = layers_to_record(self._layers(found, layers, apart))
        if RECORD in own:  # maps of the target's channels do not fit: what nodes keep is given up
            maps: StationMaps = StationMaps.from_arrays(record_to_state(own[RECORD]))
            own[RECORD] = StationMaps({}, max([maps.forgotten, *maps.rounds])).to_record()
        return own

    def read(self, reply: Message, expected: Expected) -> NodeUpdate:
        """Read a station's reply in its own shape; return it in the global model's shape."""
        found = self._fits.get(reply.metadata.src_node_id)
        if found is None:
            return read_update(reply, expected)
        fit, previous = found.fit, expected.arrays
        sent = fit.down(previous)
        layers = self._layers(found, bool(expected.layers), not expected.shrunk)
        update = read_update(reply, replace(expected, arrays=sent, layers=layers))
        return replace(
            update,
            state=fit.lift(update.state, sent, previous),
            grams=fit.up_grams(update.grams),
            absent=frozenset(fit.absent),
        )

    def _layers(self, found: StationFit, wanted: bool, apart: bool) -> dict[str, int]:
        return (found.all_layers if apart else found.layers) if wanted else {}
