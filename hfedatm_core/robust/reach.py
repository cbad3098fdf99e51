"""How far from a common start a model may lie."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hfedatm_core.robust.distances import distance
from hfedatm_core.tensors import State


@dataclass(frozen=True)
class Reach:
    """A bound per tensor.

    Models that left one start a few steps ago lie near each other channel by channel. A permutation
    that takes one of them far away was not found because its channels had changed places: it makes
    the mean worse, and it is what a hostile model brings about, by its own strange filters or, as
    the reference, in everybody else.
    """

    start: State
    limits: Mapping[str, float]

    def holds(self, state: State) -> bool:
        """Tell whether all these tensors lie within the bound."""
        return all(
            distance(value, self.start[name]) <= self.limits[name] * (1 + 1e-9)
            for name, value in state.items()
            if value.shape == self.start[name].shape
        )
