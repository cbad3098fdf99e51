"""A server rule: it turns the stations' updates into the next global model."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from hfedatm.contracts import Merged, Rule, Situation, Update


@dataclass
class Median(Rule):
    """Coordinate-wise median: one station that is far off cannot move the model far.

    Parameters
    ----------
    step
        How far to go from the previous model to the median; 1 goes all the way.
    """

    step: float = 1.0

    def merge(self, updates: Iterable[Update], situation: Situation) -> Merged:
        """Return the median of the station models."""
        states = [update.state for update in updates]  # a median needs all of them
        if not states:
            raise ValueError("there is no station to take the median of")
        merged = {}
        for name, before in situation.previous.items():
            median = torch.stack([state[name] for state in states]).median(dim=0).values
            merged[name] = torch.lerp(before, median, self.step)
        return Merged(merged)
