"""How good a model is on given examples."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import nn

from hfedatm_core import forward
from hfedatm_core.data import Batch


@torch.no_grad()
def evaluate(model: nn.Module, batches: Iterable[Batch]) -> dict[str, float]:
    """Return mean loss and number of right answers over all batches."""
    model.eval()
    loss, correct, count = 0.0, 0, 0
    for inputs, targets in batches:
        logits = forward(model, inputs)
        loss += float(F.cross_entropy(logits, targets, reduction="sum"))
        correct += int((logits.argmax(1) == targets).sum())
        count += len(targets)
    return {"loss": loss / max(count, 1), "correct": correct, "num-examples": count}
