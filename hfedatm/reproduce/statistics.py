"""Mean, standard error, and tests of whether a difference is more than chance."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from scipy import stats

LEVEL = 0.05
# With fewer pairs, two differences that happen to be equal would look certain.
FEWEST_PAIRS = 3


@dataclass(frozen=True)
class Estimate:
    """A mean with its standard error, and the number of its values."""

    mean: float
    error: float | None
    count: int


def estimate(values: Sequence[float]) -> Estimate | None:
    """Return ``mean ± s / sqrt(n)``; one value gives no error, no value gives None."""
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
    """Return the tests that are jointly significant at the 5 % level, by Holm's procedure."""
    tested = sorted((p, name) for name, p in p_values.items() if p is not None)
    found = set()
    for rank, (p, name) in enumerate(tested):
        if p > LEVEL / (len(tested) - rank):
            break
        found.add(name)
    return found
