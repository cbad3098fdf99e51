"""What a station sends to be merged."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from hfedatm_core.grams.gram import Gram
from hfedatm_core.tensors import State, distance


@dataclass(frozen=True)
class Reach:
    """How far from a common start each tensor of a model may lie.

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


@dataclass(frozen=True)
class Update:
    """What one station sends: its model, the Grams of its layers' inputs, and its size.

    ``share`` is how much of it counts, between 0 and 1: a robust rule's doubt. ``reach`` is how far
    it may lie from the model it started from; a permutation that takes it further is not applied.
    """

    state: State
    grams: Mapping[str, Gram] = field(default_factory=dict)
    num_examples: int = 1
    num_clients: int = 1
    name: str = ""
    metrics: Mapping[str, float] = field(default_factory=dict)
    share: float = 1.0
    reach: Reach | None = None
