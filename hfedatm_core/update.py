"""What a station sends to be merged."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from hfedatm_core.grams.gram import Gram
from hfedatm_core.tensors import State


@dataclass(frozen=True)
class Update:
    """What one station sends: its model, the Grams of its layers' inputs, and its size."""

    state: State
    grams: Mapping[str, Gram] = field(default_factory=dict)
    num_examples: int = 1
    num_clients: int = 1
    name: str = ""
    metrics: Mapping[str, float] = field(default_factory=dict)
