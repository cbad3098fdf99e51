"""The learning rate of every local round of a run."""

from __future__ import annotations

import math

from hfedatm.base.settings import Settings


def learning_rate(settings: Settings, round: int, station_round: int) -> float:
    """Return the rate of one station round; the cosine spans all local rounds of the run."""
    if settings.schedule == "constant":
        return settings.lr
    done = (round - 1) * settings.station_rounds + station_round - 1
    return (
        settings.lr
        * 0.5
        * (1 + math.cos(math.pi * done / (settings.rounds * settings.station_rounds)))
    )
