"""The area under the ROC curve, each class against the rest, the mean over classes (macro)."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from hfedatm_core.metrics.base import Metric

BINS = 256
RANGE = 16.0
"""Log-odds beyond ±16 (probabilities within 1e-7 of 0 or 1) are not distinguished."""


class Auc(Metric):
    """The chance that an example of a class has a higher score for it than one of another class.

    The score of class ``c`` is its log-odds, ``z_c - log Σ_{k≠c} exp z_k``, which orders examples
    as the softmax does. Exact areas need all scores of all clients in one place. This metric adds
    histograms instead: how many examples of the class, and of the rest, have a score in each of 256
    bins of width 1/8 in log-odds. A pair of examples in one bin counts one half, so the area is off
    by at most half the share of such pairs, ``½ Σ_b p_b n_b``.
    """

    needs_classes: ClassVar[bool] = True

    def sums(self, scores: Tensor, targets: Tensor) -> Tensor:
        """Return for each class the histogram of its examples and that of all other examples."""
        count, scores = self.num_classes, scores.double()
        total = torch.zeros(2, count, BINS, dtype=torch.float64, device=scores.device)
        for one in range(count):
            rest = torch.cat([scores[:, :one], scores[:, one + 1 :]], dim=1)
            odds = scores[:, one] - rest.logsumexp(1)
            place = ((odds.nan_to_num() + RANGE) * (BINS / (2 * RANGE))).clamp(0, BINS - 1).long()
            for kind, some in enumerate((targets == one, targets != one)):
                total[kind, one] = torch.bincount(place[some], minlength=BINS)
        return total.flatten()

    def value(self, sums: Tensor) -> float:
        """Return the mean over the classes that some examples, but not all, belong to."""
        own, rest = sums.view(2, self.num_classes, BINS)
        below = rest.cumsum(1) - rest
        won = (own * (below + rest / 2)).sum(1)
        pairs = own.sum(1) * rest.sum(1)
        return float((won[pairs > 0] / pairs[pairs > 0]).mean())
