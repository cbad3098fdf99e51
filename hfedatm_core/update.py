"""What a station sends to be merged."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from hfedatm_core.grams.gram import Gram
from hfedatm_core.tensors import State


class Reach(Protocol):
    """How far from the model it started from an update may lie."""

    def holds(self, state: State) -> bool:
        """Tell whether all these tensors lie within the bound."""


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
