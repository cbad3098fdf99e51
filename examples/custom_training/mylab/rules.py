"""A server rule: from the stations' updates to the next global model."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from hfedatm.contracts import Merged, MergeReport, Rule, Situation, Update


@dataclass
class Median(Rule):
    """Coordinate-wise median: one station that is far off cannot move the model far.

    Parameters
    ----------
    step
        Share of the way from the previous model to the median.
    """

    step: float = 1.0

    def merge(self, updates: Iterable[Update], situation: Situation) -> Merged:
        """Return the median of the station models."""
        states = {update.name: update.state for update in updates}  # a median needs all of them
        if not states:
            raise ValueError("there is no station to take the median of")
        merged = {}
        for name, before in situation.previous.items():
            median = torch.stack([state[name] for state in states.values()]).median(dim=0).values
            merged[name] = torch.lerp(before, median, self.step)
        report = MergeReport(reference="", stations={name: {} for name in states}, layers={})
        return Merged(merged, report, permutations={})
