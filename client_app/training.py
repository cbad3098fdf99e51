"""The local training loop, and evaluation."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import nn

from client_app.methods.base import Method
from hfedatm.errors import UserError
from hfedatm.settings import Settings
from hfedatm_core import forward
from hfedatm_core.data import Batch


class Diverged(UserError):
    """Training left the range of numbers."""


def learning_rate(settings: Settings, round: int, station_round: int) -> float:
    """Return the rate of one station round; the cosine spans all local rounds of the run."""
    if settings.schedule == "constant":
        return settings.lr
    done = (round - 1) * settings.station_rounds + station_round - 1
    return (
        settings.lr
        * 0.5
        * (1 + math.cos(math.pi * done / (settings.rounds * settings.station_rounds)))
    )


def make_optimizer(
    parameters: Iterable[nn.Parameter], settings: Settings, lr: float
) -> torch.optim.Optimizer:
    """Return the optimiser of one local round; no state survives the round."""
    trained = [p for p in parameters if p.requires_grad]
    if settings.optimizer == "sgd":
        return torch.optim.SGD(
            trained, lr=lr, momentum=settings.momentum, weight_decay=settings.weight_decay
        )
    return torch.optim.AdamW(
        trained, lr=lr, betas=(settings.momentum, 0.999), weight_decay=settings.weight_decay
    )


def train_locally(
    model: nn.Module, method: Method, batches: Iterable[Batch], settings: Settings, lr: float
) -> float:
    """Train for ``local-epochs`` epochs and return the mean loss of the last one."""
    optimizer = make_optimizer([*model.parameters(), *method.parameters()], settings, lr)
    model.train()
    for epoch in range(settings.local_epochs):
        total, count = torch.zeros((), device=next(model.parameters()).device), 0
        for inputs, targets in batches:
            optimizer.zero_grad(set_to_none=True)
            loss = method.loss(model, inputs, targets)
            loss.backward()
            method.correct(model)
            optimizer.step()
            total += loss.detach() * len(targets)
            count += len(targets)
        if not bool(torch.isfinite(total)):
            raise Diverged(
                f"the loss is {float(total)} in local epoch {epoch + 1} at lr {lr:g}: lower lr"
            )
    return float(total) / count


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


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Compute with this many CPU threads; 0 leaves the number alone."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
