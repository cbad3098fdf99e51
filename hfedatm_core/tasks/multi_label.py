"""Each example has any number of labels."""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from hfedatm_core.tasks.base import BadTargets, LearningTask, shape_of


class MultiLabel(LearningTask):
    """Binary cross-entropy of each label; the score of an example is its F1.

    With the labels ``T`` of an example and the predicted ones ``P`` (outputs above 0), the score is
    ``2 |T ∩ P| / (|T| + |P|)``, and 1 if both are empty, as scikit-learn's
    ``f1_score(average="samples", zero_division=1)``. Counting right labels would praise a network
    that never finds a rare label.
    """

    measure: ClassVar[str] = "F1 per example"

    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean binary cross-entropy of each example's labels."""
        there = targets.to(outputs.dtype)
        return F.binary_cross_entropy_with_logits(outputs, there, reduction="none").mean(1)

    def scores(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the F1 of each example."""
        found, there = self.predict(outputs), targets.bool()
        both, all_ = (found & there).sum(1), found.sum(1) + there.sum(1)
        return torch.where(all_ > 0, 2 * both / all_.clamp(min=1), 1.0)

    def predict(self, outputs: Tensor) -> Tensor:
        """Return which labels are more likely than not."""
        return outputs > 0

    def check(self, targets: Tensor) -> None:
        """Refuse targets that are not 0 or 1 for each label."""
        count = self.spec.num_classes
        if targets.shape[1:] != (count,):
            raise BadTargets(
                f"targets is {shape_of(targets)}; multi-label needs 0 or 1 for each of the {count} "
                f"labels of each example: shape (examples, {count})"
            )
        if not bool(((targets == 0) | (targets == 1)).all()):
            raise BadTargets("a target is neither 0 nor 1")

    def strata(self, targets: Tensor) -> Tensor:
        """Return a number for each combination of labels that occurs."""
        combinations: Tensor = torch.unique(targets, dim=0, return_inverse=True)[1]
        return combinations
