"""Numbers that a method or a training function reports besides the loss.

Each tier averages these numbers by examples, over the nodes that report them. A node's number has
the weight of its bounded claim of examples; it changes a displayed number, never a model.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping

from hfedatm.base.errors import UserError
from hfedatm.base.settings import Settings
from hfedatm.base.text import names_in
from hfedatm.base.wire.numbers import BY_STATIONS, LARGEST, is_name

MOST_OWN = 32
"""Most own numbers of a client; a station passes on as many: those that most clients report."""
RESERVED = frozenset(
    (
        *("loss", "num-examples", "num-clients", "seconds", "epsilon", "name", "bytes_up"),
        *("bytes-up", "gram-bytes-up", "gram-seconds", *BY_STATIONS),
    )
)
"""Names that the tiers use for numbers of their own."""


def sendable(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the reported numbers that a client sends; raises `UserError` for a wrong name.

    A number that is not finite is left out, because the update itself may still be good.
    """
    own = [name for name in metrics if name != "loss"]
    if len(own) > MOST_OWN:
        raise UserError(f"training reports {len(own)} numbers; a client sends {MOST_OWN} at most")
    for name in own:
        if name in RESERVED or not is_name(name):
            raise UserError(
                f"training reports a number called {name!r}; choose another name: letters and "
                f"digits, and none of {', '.join(sorted(RESERVED))}"
            )
    return {
        name: value
        for name, value in metrics.items()
        if name == "loss" or (math.isfinite(value) and abs(value) <= LARGEST)
    }


def needed(settings: Settings, reports: tuple[str, ...]) -> tuple[str, ...]:
    """Return the numbers that a client must report.

    A secure sum holds only numbers agreed on beforehand: those the rule needs or the line shows.
    """
    shown = names_in(settings.show_metrics) if settings.secure_aggregation else ()
    return tuple(dict.fromkeys((*reports, *shown)))


class OwnMeans:
    """Means of the own numbers of several nodes, by examples.

    Parameters
    ----------
    others
        Names that belong to the server's rule; the rule decides whether they are averaged.
    """

    def __init__(self, others: Collection[str] = ()) -> None:
        self._skip = RESERVED | set(others)
        self._sums: Counter[str] = Counter()
        self._weights: Counter[str] = Counter()
        self._nodes: Counter[str] = Counter()

    def add(self, metrics: Mapping[str, float], weight: float) -> None:
        """Count one node's numbers with this weight."""
        for name in metrics.keys() - self._skip:
            self._sums[name] += metrics[name] * weight  # type: ignore[assignment]
            self._weights[name] += weight  # type: ignore[assignment]
            self._nodes[name] += 1

    def result(self) -> dict[str, float]:
        """Return the means; if there are too many names, those that most nodes report."""
        ranked = sorted(self._nodes, key=lambda name: (-self._nodes[name], name))[:MOST_OWN]
        return {n: self._sums[n] / self._weights[n] for n in sorted(ranked) if self._weights[n]}
