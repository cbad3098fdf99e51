"""The interface of a metric: sums over examples, and a value that is computed from the sums.

A ratio such as F1 is not the mean of the clients' ratios. So each client sends sums, stations and
server add them, and the ratio is computed once, from the total sums.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Metric(ABC):
    """Base of all metrics.

    Parameters
    ----------
    num_classes
        Classes of the data set.
    """

    num_classes: int

    @abstractmethod
    def sums(self, scores: Tensor, targets: Tensor) -> Tensor:
        """Return the sums over a batch, a vector whose length depends on the classes alone.

        Each entry is a sum over the examples of a number between 0 and 1, so that the number of a
        node's examples bounds its entries. ``scores`` are the network's outputs, one row per
        example; the batch may be empty.
        """

    @abstractmethod
    def value(self, sums: Tensor) -> float:
        """Return the metric from the sums over all examples; NaN where it is not defined."""

    def nothing(self) -> Tensor:
        """Return the sums over no examples."""
        empty = torch.zeros(0, self.num_classes)
        return self.sums(empty, torch.zeros(0, dtype=torch.long)).double()
