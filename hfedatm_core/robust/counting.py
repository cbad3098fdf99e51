"""Counts of right answers, bounded so that one node cannot outweigh the others."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

Counts = Mapping[str, float]


def bounded_counts(counts: Sequence[Counts], factor: float) -> list[dict[str, float]]:
    """Return every node's counts, scaled down for a node that claims too many examples.

    ``num-examples`` counts up to ``factor`` times the median over the nodes that have examples (of
    two nodes, the smaller number); ``factor = 0`` is no bound. Whole numbers stay whole, and the
    counts of the domains (``num-examples/<domain>``) still add up to the total.
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
    for name, value in counts.items():
        if name.startswith("correct") and not float(value).is_integer():
            # Scores of a task that grades: they shrink as their examples do, and never exceed them.
            examples = name.replace("correct", "num-examples", 1)
            scaled[name] = value * scaled[examples] / counts[examples]
    for kind in ("num-examples", "correct"):
        parts = [value for name, value in scaled.items() if name.startswith(f"{kind}/")]
        if parts:
            scaled[kind] = sum(parts)
    return scaled


def with_domains(counts: Sequence[Counts]) -> list[Counts]:
    """Return the counts; a node that names no domain is counted under the domain ``unknown``.

    Otherwise one such node would make the sum over the domains differ from the total.
    """
    if not any("/" in name for one in counts for name in one):
        return list(counts)
    kinds = ("num-examples", "correct")
    return [
        one
        if any("/" in name for name in one)
        else {**one, **{f"{k}/unknown": one[k] for k in kinds}}
        for one in counts
    ]


def score(counts: Sequence[Counts]) -> float:
    """Return the accuracy by which the best model is chosen.

    For one or two nodes it is the accuracy over all examples together. For more nodes it is the
    mean over the nodes, in which the best node counts as the second best and the worst as the
    second worst: no single node decides which model is the best.
    """
    having = [one for one in counts if one["num-examples"]]
    if len(having) < 3:
        return sum(one["correct"] for one in having) / sum(one["num-examples"] for one in having)
    rates = sorted(one["correct"] / one["num-examples"] for one in having)
    return statistics.fmean([rates[1], *rates[1:-1], rates[-2]])
