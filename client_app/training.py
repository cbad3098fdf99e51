"""The local training loop, and evaluation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from hfedatm.base.errors import UserError
from hfedatm.base.settings import Settings
from hfedatm.contracts import Method
from hfedatm_core.data import Batch


class Diverged(UserError):
    """Training diverged: the loss is no longer finite."""


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
            loss: Any = method.loss(model, inputs, targets)
            if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
                raise UserError(f"loss must return a tensor of one number, got {_shown(loss)}")
            loss.backward()  # type: ignore[no-untyped-call]
            method.correct(model)
            optimizer.step()
            total += loss.detach() * len(targets)
            count += len(targets)
        if not bool(torch.isfinite(total)):
            raise Diverged(
                f"the loss is {float(total)} in local epoch {epoch + 1} at lr {lr:g}: lower lr"
            )
    return float(total) / count


def _shown(loss: object) -> str:
    shape = f" of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else ""
    return f"a {type(loss).__name__}{shape}"


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Compute with this many CPU threads; 0 leaves the number alone."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
