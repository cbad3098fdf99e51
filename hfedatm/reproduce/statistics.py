"""Mean, standard error, and whether a difference is more than chance."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from scipy import stats

LEVEL = 0.05
# Two differences that happen to be alike would look certain.
FEWEST_PAIRS = 3


@dataclass(frozen=True)
class Estimate:
    """A mean with its standard error, and the number of values it is made of."""

    mean: float
    error: float | None
    count: int


def estimate(values: Sequence[float]) -> Estimate | None:
    """Return ``mean ± s / sqrt(n)``; a single value has no error, none at all no estimate."""
    if not values:
        return None
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
    return Estimate(statistics.fmean(values), error, len(values))


def paired_p(ours: Sequence[float], theirs: Sequence[float]) -> float | None:
    """Return the p-value of the two-sided paired t-test; None when it is not defined."""
    differences = [a - b for a, b in zip(ours, theirs, strict=True)]
    if len(differences) < FEWEST_PAIRS or statistics.pstdev(differences) == 0.0:
        return None
    return float(stats.ttest_rel(ours, theirs).pvalue)


def significant(p_values: Mapping[str, float | None]) -> set[str]:
    """Return which tests hold together at the 5 % level, by Holm's step-down procedure."""
    tested = sorted((p, name) for name, p in p_values.items() if p is not None)
    found = set()
    for rank, (p, name) in enumerate(tested):
        if p > LEVEL / (len(tested) - rank):
            break
        found.add(name)
    return found
