"""What depends on the round alone: the learning rate, and whether the model is evaluated."""

from __future__ import annotations

import math

from hfedatm.base.settings import Settings
from hfedatm.base.tiers import local_rounds


def learning_rate(settings: Settings, round: int, station_round: int) -> float:
    """Return the rate of one station round; the cosine spans all local rounds of the run."""
    if settings.schedule == "constant":
        return settings.lr
    each = local_rounds(settings)
    done = (round - 1) * each + station_round - 1
    return settings.lr * 0.5 * (1 + math.cos(math.pi * done / (settings.rounds * each)))


def evaluates(settings: Settings, round: int) -> bool:
    """Return whether clients evaluate the model of this round."""
    due = round % settings.evaluate_every == 0 or round == settings.rounds
    return due and settings.validation_fraction > 0
