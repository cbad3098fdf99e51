"""Take back a round that made the model much worse.

The stations report how good the model is on their clients' validation examples. If most of them
find it much worse than the last accepted model, the run continues from that one. A majority
decides, so that no single station can take rounds back, or keep them, by its report alone.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass

from hfedatm.base.round_record import Source
from hfedatm_core.tensors import State

_PREFIX = "accepted-"


@dataclass(frozen=True)
class Accepted:
    """The last accepted model, the server's memory after it, and its scores."""

    model: State
    memory: Mapping[str, State]
    """By kind: the model that was sent out instead, the rule's state, the method's arrays."""
    source: Source | None = None
    round: int = 0

    def to_memory(self) -> dict[str, State]:
        """Return the state that a resumed run needs, by kind."""
        parts = {"model": self.model, **self.memory}
        # Copies, because a file of tensors cannot hold one tensor under two names.
        return {
            _PREFIX + kind: {name: value.clone() for name, value in state.items()}
            for kind, state in parts.items()
        }

    @classmethod
    def from_memory(cls, memory: Mapping[str, State]) -> Accepted | None:
        """Return the accepted model in ``memory``; None if it holds none."""
        own = {k.removeprefix(_PREFIX): s for k, s in memory.items() if k.startswith(_PREFIX)}
        return cls(own.pop("model"), own) if "model" in own else None


def fall(before: Source | None, now: Source) -> float:
    """Return how far source accuracy fell at the median station.

    Of an even number of stations, the smaller of the two middle falls counts: more than half of
    the stations have to agree that the model got worse.
    """
    earlier, later = before.stations if before else {}, now.stations
    falls = [earlier[n].accuracy - later[n].accuracy for n in earlier if n in later]
    return statistics.median_low(falls) if falls else 0.0


def sentence(before: Source | None, now: Source | None) -> str:
    """Say why a round is taken back; there are no scores if the model gives no finite numbers."""
    if before is None or now is None:
        return "most stations could not evaluate the model"
    was, became = (100 * scores.accuracy for scores in (before, now))
    return f"source {before.measure} fell from {was:.1f} % to {became:.1f} %"
