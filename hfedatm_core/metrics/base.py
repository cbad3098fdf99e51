"""The interface of a metric: sums over examples, and a value that is computed from the sums.

A ratio such as F1 is not the mean of the clients' ratios. So each client sends sums, stations and
server add them, and the ratio is computed once, from the total sums.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from hfedatm_core.tasks import LearningTask


@dataclass
class Metric(ABC):
    """Base of all metrics.

    Parameters
    ----------
    num_classes
        Classes of the data set, or how many numbers the network returns for an example.
    """

    needs_classes: ClassVar[bool] = False
    """Whether the metric is defined only if each target is the number of one class."""

    task: ClassVar[LearningTask | None] = None
    """The learning task; a run sets it. Without one it is classification."""

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
        if self.task is not None:
            outputs, targets = torch.zeros(0, *self.task.output_shape), self.task.example(0)
        else:
            outputs = torch.zeros(0, self.num_classes)
            targets = torch.zeros(0, dtype=torch.long)
        return self.sums(outputs, targets).double()
