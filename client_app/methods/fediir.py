"""FedIIR (Guo et al., 2023): make the classifier's gradient the same everywhere.

Before a round every client sends the mean gradient of the *classifier* at the received model. It is
averaged up the tree and smoothed, ``g_bar <- ema * g_bar + (1 - ema) * mean``. The training loss is

    loss = CE + gamma * || grad_classifier(CE) - g_bar ||^2 .

Guo et al., "Out-of-Distribution Generalization of Federated Learning via Implicit Invariant
Relationships", ICML 2023, https://openreview.net/forum?id=JC05k0E2EM.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from hfedatm.contracts import Method, State, mean_loss_gradient
from hfedatm_core.data import Batch, Inputs
from hfedatm_core.models.base import head_name


@dataclass
class FedIIR(Method):
    """Penalise the part of the classifier gradient that is particular to this client.

    Parameters
    ----------
    gamma
        Strength of the penalty (the paper: 1e-3 on PACS, 5e-4 on Office-Home).
    ema
        Share of the old average that is kept; the first round starts from its own average.
    level
        Average over all clients (``global``) or over those of one station (``station``).
    """

    needs_classes: ClassVar[bool] = True

    gamma: float = 1e-3
    ema: float = 0.95
    level: Literal["global", "station"] = "global"

    def __post_init__(self) -> None:
        """Check the level, which decides whether the server or each station averages."""
        if self.level not in ("global", "station"):
            raise ValueError(f"level must be 'global' or 'station', got {self.level!r}")
        self.sharing = self.level  # type: ignore[misc]

    def share(self, model: nn.Module, batches: Iterable[Batch]) -> State:
        """Return the mean gradient of the classifier at the received model."""
        return mean_loss_gradient(model, batches, _classifier(model))

    def blend(self, old: State, new: State) -> State:
        """Return the average smoothed over rounds."""
        if not old:
            return new
        return {name: self.ema * old[name] + (1 - self.ema) * new[name] for name in new}

    def begin(self, model: nn.Module, shared: State, memory: State) -> None:
        """Take the average gradient that all clients compare theirs with."""
        device = next(model.parameters()).device
        self._average = {name: g.to(device) for name, g in shared.items()}

    def loss(self, model: nn.Module, inputs: Inputs, targets: Tensor) -> Tensor:
        """Return cross-entropy plus the penalty; its gradient needs a second backward pass."""
        error = super().loss(model, inputs, targets)
        classifier = _classifier(model)
        own = torch.autograd.grad(error, list(classifier.values()), create_graph=True)
        distance = sum(
            (g - self._average[name]).square().sum()
            for name, g in zip(classifier, own, strict=True)
        )
        return error + self.gamma * distance


def _classifier(model: nn.Module) -> dict[str, nn.Parameter]:
    prefix = head_name(model)
    return {f"{prefix}.{n}": p for n, p in model.get_submodule(prefix).named_parameters()}
