"""The interface of a learning task: loss, prediction, score, and the form of the targets."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from hfedatm_core.data.base import DataSpec


class BadTargets(ValueError):
    """The targets of some examples do not suit a task.

    ``fault`` says what is wrong without describing the examples, ``detail`` describes them.
    """

    def __init__(self, fault: str, detail: str = "") -> None:
        super().__init__(fault + (f" ({detail})" if detail else ""))
        self.fault, self.detail = fault, detail


@dataclass(eq=False)
class LearningTask(ABC):
    """Base of all learning tasks.

    A task defines `losses`, `scores` and `check`; the other methods have defaults that suit one
    number per output of the network.

    Parameters
    ----------
    spec
        The description of the data.
    """

    measure: ClassVar[str] = "accuracy"
    """Name of the mean score in tables and figures."""

    has_classes: ClassVar[bool] = False
    """Whether a target is the number of one class, as some methods and metrics need it."""

    spec: DataSpec

    @property
    def output_shape(self) -> tuple[int, ...]:
        """The shape of the network's output for one example."""
        return (self.spec.num_classes,)

    @abstractmethod
    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of each example, a vector."""

    @abstractmethod
    def scores(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return how good each output is, a vector of numbers from 0 (wrong) to 1 (right).

        The mean over examples is the task's `measure`, by which the best round is chosen. It is
        bounded, so that a node's number of examples bounds its influence.
        """

    @abstractmethod
    def check(self, targets: Tensor) -> None:
        """Raise `BadTargets` unless these are targets of the task."""

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss, which training minimises."""
        return self.losses(outputs, targets).mean()

    def total_loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the sum of the losses, which an evaluation adds up."""
        return self.losses(outputs, targets).sum()

    def predict(self, outputs: Tensor) -> Tensor:
        """Return the answers that these outputs stand for, in the form of targets."""
        return outputs

    def strata(self, targets: Tensor) -> Tensor:
        """Return one number per example; validation takes evenly from the sorted numbers."""
        return torch.zeros(len(targets))

    def example(self, count: int = 2) -> Tensor:
        """Return valid targets of made-up examples."""
        return torch.zeros(count, *self.output_shape)


def shape_of(targets: Tensor) -> str:
    """Return the type and shape of targets, for messages."""
    return f"a tensor of {targets.dtype} and shape {tuple(targets.shape)}"
