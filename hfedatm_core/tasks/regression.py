"""Each example has one number or several."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from hfedatm_core.tasks.base import BadTargets, LearningTask, shape_of

FAR = 1000.0
"""Targets this many spreads from their mean were not scaled as the spec says."""


class Regression(LearningTask):
    """Squared error, in units of the targets' spread.

    With ``z = (target - target_mean) / target_std`` from the spec, the network learns ``z``, the
    loss is ``mean (output - z)²`` over an example's numbers, and its score ``max(0, 1 - loss)``.
    The mean score is R², except that no example counts less than 0, so that a single outlier
    cannot hide what the network has learned.
    """

    measure: ClassVar[str] = "R² (capped)"

    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean squared error of each example's numbers, in units of the spread."""
        return (outputs - self._scaled(targets)).square().mean(1)

    def scores(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the share of the variance that is explained, at least 0."""
        return (1 - self.losses(outputs, targets)).clamp(min=0)

    def predict(self, outputs: Tensor) -> Tensor:
        """Return numbers in the units of the targets."""
        mean, std = self._constants(outputs)
        return outputs * std + mean

    def check(self, targets: Tensor) -> None:
        """Refuse targets that are no finite numbers, or of another size than the spec says."""
        count = self.spec.num_classes
        if targets.dtype != torch.float32 or targets.shape[1:] != (count,):
            raise BadTargets(
                f"targets is {shape_of(targets)}; regression needs torch.float32 of shape "
                f"(examples, {count}), as outputs of the DataSpec says: "
                f"targets.float().view(-1, {count})"
            )
        for name in ("target_mean", "target_std"):
            if len(getattr(self.spec, name)) not in (0, 1, count):
                raise BadTargets(f"{name} of the DataSpec needs 1 value, or {count}")
        if not bool(torch.isfinite(targets).all()):
            raise BadTargets("a target is NaN or infinite: remove such examples")
        if len(targets) and float(self._scaled(targets).abs().max()) > FAR:
            raise BadTargets(
                f"a target is more than {FAR:.0f} times target_std away from target_mean: set both "
                "in the DataSpec to the mean and the standard deviation of the targets"
            )

    def strata(self, targets: Tensor) -> Tensor:
        """Return the first number, so that validation has small and large ones."""
        return targets[:, 0]

    def _scaled(self, targets: Tensor) -> Tensor:
        mean, std = self._constants(targets)
        return (targets - mean) / std

    def _constants(self, like: Tensor) -> tuple[Tensor, Tensor]:
        return (
            torch.tensor(self.spec.target_mean or (0.0,)).to(like),
            torch.tensor(self.spec.target_std or (1.0,)).to(like),
        )
