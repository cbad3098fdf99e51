"""Evaluate a model on given examples."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import nn

from hfedatm.base.plugins import calling
from hfedatm_core import forward
from hfedatm_core.data import Batch
from hfedatm_core.metrics import Metric
from hfedatm_core.tensors import State


@dataclass(frozen=True)
class Evaluation:
    """Scores of a model on some examples; all but the mean loss can be summed over nodes.

    Attributes
    ----------
    loss
        Mean cross-entropy.
    correct, examples
        Number of right answers, and of all examples.
    sums
        The sums of each metric.
    """

    loss: float
    correct: int
    examples: int
    sums: State = field(default_factory=dict)


@torch.no_grad()
def evaluate(
    model: nn.Module, batches: Iterable[Batch], metrics: Mapping[str, Metric] | None = None
) -> Evaluation:
    """Return the model's scores over all batches."""
    model.eval()
    loss, correct, count = 0.0, 0, 0
    sums = {name: metric.nothing() for name, metric in (metrics or {}).items()}
    for inputs, targets in batches:
        logits = forward(model, inputs)
        loss += float(F.cross_entropy(logits, targets, reduction="sum"))
        correct += int((logits.argmax(1) == targets).sum())
        count += len(targets)
        for name, metric in (metrics or {}).items():
            with calling("metrics", name):
                found = metric.sums(logits, targets).double().cpu()
                if found.shape != sums[name].shape:
                    raise ValueError(
                        f"sums has shape {tuple(found.shape)} for {len(targets)} examples and "
                        f"{tuple(sums[name].shape)} for none; the shape must not depend on them"
                    )
                sums[name] = sums[name] + found
    return Evaluation(loss / max(count, 1), correct, count, sums)
