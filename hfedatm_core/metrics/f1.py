"""F1, the mean over classes (macro)."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from hfedatm_core.metrics.base import Metric


class F1(Metric):
    """``F1_c = 2 tp_c / (2 tp_c + fp_c + fn_c)``, averaged over the classes that occur.

    A class occurs if it is the target or the prediction of an example, as in scikit-learn's
    ``f1_score(average="macro")``. The nodes add up the counts of each class, not the ratios.
    """

    needs_classes: ClassVar[bool] = True

    def sums(self, scores: Tensor, targets: Tensor) -> Tensor:
        """Return, by class, the numbers of right predictions, of predictions and of examples."""
        predicted, right = scores.argmax(1), targets[scores.argmax(1) == targets]
        count = self.num_classes
        parts = [torch.bincount(some, minlength=count) for some in (right, predicted, targets)]
        return torch.cat(parts).double()

    def value(self, sums: Tensor) -> float:
        """Return the mean over the classes that occur."""
        right, predicted, there = sums.view(3, self.num_classes)
        occurs = predicted + there > 0
        return float((2 * right[occurs] / (predicted + there)[occurs]).mean())
