"""Options of a server rule that need not wait for the slowest station."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hfedatm.base.errors import UserError
from hfedatm.base.options import option
from hfedatm.base.settings import Settings
from hfedatm.base.tiers import is_deep
from hfedatm.contracts.rule import Rule


@dataclass
class Paced(Rule):
    """A rule whose merge is a step from the current model, whoever takes part in it."""

    buffer: int = option(
        0,
        "merge as soon as so many stations have answered, the others go on working; 0 waits for "
        "all stations",
        ge=0,
    )
    staleness: float = option(
        0.5,
        "power a of the factor (1 + t)^-a of an update that is t rounds late; 0 takes it whole",
        ge=0,
        le=10,
    )
    max_staleness: int = option(
        10, "an update that is more rounds late than this is dropped", ge=0, le=1000
    )
    station_seconds: str = option(
        "",
        "virtual seconds of each station's round, '1:1:1:10': a clock of its own decides who is "
        "first, so that a run can be repeated; empty takes the real time",
    )

    def check(self, settings: Settings) -> None:
        """Refuse options that do not fit the stations."""
        if self.station_seconds and not self.buffer:
            raise UserError("rule-params: station_seconds has no meaning without buffer=<stations>")
        if not self.buffer:
            return
        if self.buffer > settings.stations:
            raise UserError(
                f"rule-params: buffer = {self.buffer} is more than stations = {settings.stations}"
            )
        if is_deep(settings):
            raise UserError(
                f"rule-params: buffer is for stations with clients of their own, not for "
                f"tiers={settings.tiers}; remove buffer or tiers"
            )
        if settings.station_models:
            raise UserError(
                "rule-params: buffer needs stations of one shape; set buffer=0 or leave "
                "station-models empty"
            )
        if settings.station_start == "own":
            raise UserError(
                "rule-params: buffer needs stations that share a start: models with starts of "
                "their own must be merged together; set buffer=0 or station-start=shared"
            )
        if self.station_seconds and len(self.durations()) != settings.stations:
            raise UserError(
                f"rule-params: station_seconds names {len(self.durations())} stations, the run has "
                f"{settings.stations}"
            )

    def durations(self) -> list[float]:
        """Return the virtual seconds of each station; empty without a virtual clock."""
        try:
            found = [float(part) for part in self.station_seconds.split(":") if part]
        except ValueError:
            found = [math.nan]
        if not all(0 < seconds < 1e9 for seconds in found):
            raise UserError(
                f"rule-params: station_seconds = {self.station_seconds!r}: give every station a "
                "positive number, '1:1:1:10'"
            )
        return found
