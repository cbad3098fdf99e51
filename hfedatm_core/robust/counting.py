"""Counts of right answers, of which one node cannot claim more than its part."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

Counts = Mapping[str, float]


def bounded_counts(counts: Sequence[Counts], factor: float) -> list[dict[str, float]]:
    """Return every node's counts, those of too many examples in proportion less.

    ``num-examples`` counts up to ``factor`` times the median of the nodes that have any (of two,
    the smaller); ``factor = 0`` is no bound. Whole numbers stay whole, and those of the domains
    (``num-examples/<domain>``) still add up.
    """
    sizes = sorted(one["num-examples"] for one in counts if one["num-examples"])
    if not factor or len(sizes) < 2:
        return [dict(one) for one in counts]
    most = factor * (sizes[0] if len(sizes) == 2 else statistics.median(sizes))
    return [
        _scaled(one, most / one["num-examples"]) if one["num-examples"] > most else dict(one)
        for one in counts
    ]


def _scaled(counts: Counts, factor: float) -> dict[str, float]:
    scaled = {name: float(int(value * factor)) for name, value in counts.items()}
    if "loss-sum" in counts:
        scaled["loss-sum"] = counts["loss-sum"] * factor
    for kind in ("num-examples", "correct"):
        parts = [value for name, value in scaled.items() if name.startswith(f"{kind}/")]
        if parts:
            scaled[kind] = sum(parts)
    return scaled


def score(counts: Sequence[Counts]) -> float:
    """Return the accuracy over all nodes, none of which is better or worse than another one.

    Of three nodes or more the best counts as good as the second best, and the worst likewise, so
    that no single node decides which model is the best.
    """
    having = [one for one in counts if one["num-examples"]]
    rates = [one["correct"] / one["num-examples"] for one in having]
    if len(rates) > 2:
        _, low, *_ = sorted(rates)
        *_, high, _ = sorted(rates)
        rates = [min(max(rate, low), high) for rate in rates]
    weights = [one["num-examples"] for one in having]
    return sum(r * w for r, w in zip(rates, weights, strict=True)) / sum(weights)
