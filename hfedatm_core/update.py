"""The update that a station sends to be merged."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from hfedatm_core.grams.gram import Gram
from hfedatm_core.profiles import Profiles
from hfedatm_core.tensors import State, distance


@dataclass(frozen=True)
class Reach:
    """The largest distance that each tensor of a model may have from a common start.

    Models that left one start a few steps ago lie near each other channel by channel. If a
    permutation moves such a model far away, its channels had not really changed places: the
    permutation makes the mean worse. A hostile model can cause such permutations, of itself by
    strange filters or, as the reference, of all other models.
    """

    start: State
    limits: Mapping[str, float]

    def holds(self, state: State) -> bool:
        """Tell whether all these tensors lie within the bound."""
        return all(
            distance(value, self.start[name]) <= self.limits.get(name, math.inf) * (1 + 1e-9)
            for name, value in state.items()
            if value.shape == self.start[name].shape
        )


@dataclass(frozen=True)
class Update:
    """The update of one station: its model, the Grams of its layers' inputs, and its size.

    ``share``, between 0 and 1, is the part of its weight that a robust rule leaves to the update.
    ``reach`` bounds its distance from the model it started from; a permutation that moves it
    further is not applied. ``profiles`` are class profiles, by which :func:`merge_apart` also
    matches channels if every update has them. ``absent`` names the tensors on which the update has
    no vote, because its network lacks these layers (:mod:`hfedatm_core.resizing`). An update that
    stands for several stations (:func:`combine`) holds products beside its weights in ``state``,
    and in ``moved`` how many channels the alignment of its stations has moved.
    """

    state: State
    grams: Mapping[str, Gram] = field(default_factory=dict)
    num_examples: int = 1
    num_clients: int = 1
    name: str = ""
    metrics: Mapping[str, float] = field(default_factory=dict)
    share: float = 1.0
    reach: Reach | None = None
    profiles: Profiles | None = None
    absent: frozenset[str] = frozenset()
    moved: int = 0
