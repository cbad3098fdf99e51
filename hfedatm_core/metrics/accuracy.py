"""The share of right answers."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from hfedatm_core.metrics.base import Metric


class Accuracy(Metric):
    """``right / all``; every run reports it, even if it is not chosen."""

    needs_classes: ClassVar[bool] = True

    def sums(self, scores: Tensor, targets: Tensor) -> Tensor:
        """Return the number of right answers and the number of all answers."""
        right = (scores.argmax(1) == targets).sum()
        return torch.stack([right, torch.ones_like(targets).sum()]).double()

    def value(self, sums: Tensor) -> float:
        """Return their ratio."""
        return float(sums[0] / sums[1])
