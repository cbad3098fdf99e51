"""A training function: it replaces the whole local training loop."""

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hfedatm.contracts import Batch, Settings, forward


def train(
    model: nn.Module, batches: Iterable[Batch], received: dict[str, Tensor], settings: Settings
) -> dict[str, float]:
    """Train with Adam and clipped gradients; every pass over ``batches`` is one epoch."""
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    model.train()
    total, count = 0.0, 0
    for _ in range(settings.local_epochs):
        for inputs, targets in batches:
            optimizer.zero_grad()
            loss = F.cross_entropy(forward(model, inputs), targets)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            total += loss.item() * len(targets)
            count += len(targets)
    moved = sum((p.detach().cpu() - received[n]).norm() for n, p in model.named_parameters())
    return {"loss": total / count, "moved": float(moved)}
