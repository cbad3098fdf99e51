"""Each example belongs to one of several classes."""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from hfedatm_core.data.base import DataSpec
from hfedatm_core.tasks.base import BadTargets, LearningTask, shape_of


class Classification(LearningTask):
    """Cross-entropy; the score of an example is 1 if its class has the highest output."""

    has_classes: ClassVar[bool] = True

    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the cross-entropy of each example."""
        return F.cross_entropy(outputs, targets, reduction="none")

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy, by torch's own reduction, so that its bits stay."""
        return F.cross_entropy(outputs, targets)

    def total_loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the summed cross-entropy, by torch's own reduction."""
        return F.cross_entropy(outputs, targets, reduction="sum")

    def scores(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return 1 for each right answer, 0 for each wrong one."""
        return (self.predict(outputs) == targets).float()

    def predict(self, outputs: Tensor) -> Tensor:
        """Return the class with the highest output."""
        return outputs.argmax(1)

    def check(self, targets: Tensor) -> None:
        """Refuse targets that are no class numbers."""
        if targets.dtype != torch.long or targets.ndim != 1:
            raise BadTargets(
                f"targets is {shape_of(targets)}; needed is one class number per example, as "
                "torch.long: targets.long(). Set task=regression to learn numbers, or "
                "task=multi-label if an example can have several labels"
            )
        count = self.spec.num_classes
        if self.spec.outputs:
            raise BadTargets(
                f"the DataSpec says outputs = {count}, and task=classification needs num_classes"
            )
        if len(targets) and (int(targets.min()) < 0 or int(targets.max()) >= count):
            raise BadTargets(
                f"a target is not a class: with num_classes = {count} targets are 0 … {count - 1}",
                f"its targets reach from {int(targets.min())} to {int(targets.max())}",
            )

    def strata(self, targets: Tensor) -> Tensor:
        """Return the classes, so that each gives its share of the validation examples."""
        return targets

    def example(self, count: int = 2) -> Tensor:
        """Return the first class for every example."""
        return torch.zeros(count, dtype=torch.long)


CLASSES = Classification(DataSpec("vector", 2, (1,)))
"""Classification of any data: its loss and scores do not depend on the number of classes."""
