"""Stations with a model of their own size: the setting ``station-models``.

The run's ``model`` is the target: it is merged, evaluated and published. A station that is named in
``station-models`` trains another model of the target's family. The server alone knows of several
models: the task of such a station carries settings with the station's model, so that the station
and its clients work as in a run of one model.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import TYPE_CHECKING

from hfedatm.base.options import parse_params
from hfedatm.base.tiers import is_deep

if TYPE_CHECKING:
    from hfedatm.base.settings import Settings

_ENTRY = re.compile(r"(?P<who>[\d,\s-]+)=(?P<model>[^()=\s]+)\s*(\((?P<params>[^()]*)\))?")
_RANGE = re.compile(r"(\d{1,6})(?:-(\d{1,6}))?")
FORM = "write it like '0-2=lenet5(width=0.5); 4=lenet5(width=2)'"


@lru_cache(maxsize=8)
def parse_station_models(text: str, stations: int) -> dict[int, tuple[str, str]]:
    """Return station -> its model and model-params; raises ``ValueError`` for anything else."""
    found: dict[int, tuple[str, str]] = {}
    for entry in filter(None, map(str.strip, text.split(";"))):
        match = _ENTRY.fullmatch(entry)
        if match is None:
            raise ValueError(f"station-models: got {entry!r}; {FORM}")
        params = (match["params"] or "").strip()
        try:
            parse_params(params)
        except ValueError as error:
            raise ValueError(f"station-models: {entry!r}: {error}") from None
        for part in match["who"].split(","):
            numbers = _RANGE.fullmatch(part.strip())
            if numbers is None:
                raise ValueError(f"station-models: got {entry!r}; {FORM}")
            first, last = int(numbers[1]), int(numbers[2] or numbers[1])
            if not first <= last < stations:
                raise ValueError(
                    f"station-models: {part.strip()!r} is no station of 0 to {stations - 1}"
                )
            for station in range(first, last + 1):
                if station in found:
                    raise ValueError(f"station-models: station {station} is named twice")
                found[station] = match["model"], params
    return found


def check_station_models(s: Settings) -> None:
    """Raise ``ValueError`` for malformed models of stations, and settings that exclude them."""
    if not parse_station_models(s.station_models, s.stations):
        return
    if s.train_only:
        raise ValueError("station-models: with train-only all stations train one part: leave it")
    if is_deep(s):
        raise ValueError("station-models: with tiers all stations train one model: leave it")


def settings_of(settings: Settings, station: int | None) -> Settings:
    """Return the settings that a station's task carries; with None those of the target."""
    if not settings.station_models:
        return settings
    return _settings_of(settings, station)


@lru_cache(maxsize=64)
def _settings_of(settings: Settings, station: int | None) -> Settings:
    own = parse_station_models(settings.station_models, settings.stations)
    model, params = settings.model, settings.model_params
    if station is not None:
        model, params = own.get(station, (model, params))
    return settings.model_copy(
        update={"model": model, "model_params": params, "station_models": ""}
    )
