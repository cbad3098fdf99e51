"""Take a round back that made the model much worse.

The stations say how good the model is on their clients' validation examples. If most of them find
it much worse than the last one that was accepted, the run goes on from that one. A majority
decides, so that no station can take rounds back, or keep them, by what it says alone.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hfedatm.base.state import State

_PREFIX = "accepted-"


@dataclass(frozen=True)
class Accepted:
    """The last accepted model, what the server had in mind after it, and its scores."""

    model: State
    memory: Mapping[str, State]
    """By kind: what is sent out instead of the model, the rule's own, what a method shares."""
    source: Mapping[str, Any] = field(default_factory=dict)
    round: int = 0

    def to_memory(self) -> dict[str, State]:
        """Return what a resumed run needs, by kind."""
        parts = {"model": self.model, **self.memory}
        # Copies: a file of tensors does not take one under two names.
        return {
            _PREFIX + kind: {name: value.clone() for name, value in state.items()}
            for kind, state in parts.items()
        }

    @classmethod
    def from_memory(cls, memory: Mapping[str, State]) -> Accepted | None:
        """Read it; None if there is none."""
        own = {k.removeprefix(_PREFIX): s for k, s in memory.items() if k.startswith(_PREFIX)}
        return cls(own.pop("model"), own) if "model" in own else None


def fall(before: Mapping[str, Any], now: Mapping[str, Any]) -> float:
    """Return how far source accuracy fell at the station in the middle.

    Of an even number of stations the one that fell less of the two: more than half of them have to
    agree that the model got worse.
    """
    earlier, later = before.get("stations", {}), now["stations"]
    falls = [earlier[n]["accuracy"] - later[n]["accuracy"] for n in earlier if n in later]
    return statistics.median_low(falls) if falls else 0.0


def sentence(before: Mapping[str, Any], now: Mapping[str, Any] | None) -> str:
    """Say what happened; no scores at all are those of a model that gives no numbers."""
    if now is None:
        return "most stations could not evaluate the model"
    was, became = (100 * scores["accuracy"] for scores in (before, now))
    return f"source accuracy fell from {was:.1f} % to {became:.1f} %"
