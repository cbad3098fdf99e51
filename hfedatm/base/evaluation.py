"""Evaluate a model on given examples."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from hfedatm.base.errors import UserError
from hfedatm.base.plugins import calling
from hfedatm_core import forward
from hfedatm_core.data import Batch
from hfedatm_core.metrics import Metric
from hfedatm_core.tasks import CLASSES, LearningTask
from hfedatm_core.tensors import State


@dataclass(frozen=True)
class Evaluation:
    """Scores of a model on some examples; all but the mean loss can be summed over nodes.

    Attributes
    ----------
    loss
        Mean loss of the task.
    correct, examples
        Sum of the task's scores (the number of right answers, if it has classes), and the number of
        examples.
    sums
        The sums of each metric.
    """

    loss: float
    correct: float
    examples: int
    sums: State = field(default_factory=dict)


@torch.no_grad()
def evaluate(
    model: nn.Module,
    batches: Iterable[Batch],
    metrics: Mapping[str, Metric] | None = None,
    task: LearningTask = CLASSES,
) -> Evaluation:
    """Return the model's scores over all batches."""
    model.eval()
    loss, correct, count = 0.0, 0.0, 0
    sums = {}
    for name, metric in (metrics or {}).items():
        with calling("metrics", name):  # an empty batch may be what a user's metric did not expect
            sums[name] = metric.nothing()
    for inputs, targets in batches:
        outputs = forward(model, inputs)
        loss += float(task.total_loss(outputs, targets))
        correct += float(_checked(task.scores(outputs, targets), targets, task).sum())
        count += len(targets)
        for name, metric in (metrics or {}).items():
            with calling("metrics", name):
                found = metric.sums(outputs, targets).double().cpu()
                if found.shape != sums[name].shape:
                    raise ValueError(
                        f"sums has shape {tuple(found.shape)} for {len(targets)} examples and "
                        f"{tuple(sums[name].shape)} for none; the shape must not depend on them"
                    )
                sums[name] = sums[name] + found
    return Evaluation(loss / max(count, 1), correct, count, sums)


def _checked(scores: Tensor, targets: Tensor, task: LearningTask) -> Tensor:
    """Return a task's scores; an output that is not finite has the score 0."""
    scores = scores.cpu().double().nan_to_num(nan=0.0)
    right = scores.shape == (len(targets),) and bool(((scores >= 0) & (scores <= 1)).all())
    if not right:
        raise UserError(
            f"task: scores of {type(task).__name__} must return a number from 0 to 1 for each of "
            f"{len(targets)} examples, not a tensor of shape {tuple(scores.shape)}"
            + (f" from {float(scores.min()):g} to {float(scores.max()):g}" if len(scores) else "")
        )
    return scores
