"""FedProx (Li et al., 2020): keep the trained model near the received one.

Li et al., "Federated Optimization in Heterogeneous Networks", arXiv:1812.06127.
"""

from dataclasses import dataclass

from torch import Tensor, nn

from hfedatm.contracts import Method, State, snapshot
from hfedatm_core.data import Inputs


@dataclass
class FedProx(Method):
    """Add ``(mu / 2) ||w - w_received||^2``; the anchor is the station model of this station round.

    Parameters
    ----------
    mu
        Strength of the pull.
    """

    mu: float = 0.01

    def __post_init__(self) -> None:
        """Check the strength."""
        if self.mu < 0:
            raise ValueError(f"mu must be at least 0, got {self.mu}")

    def begin(self, model: nn.Module, shared: State, memory: State) -> None:
        """Keep the received weights as the anchor."""
        self._anchor = snapshot(model)

    def loss(self, model: nn.Module, inputs: Inputs, targets: Tensor) -> Tensor:
        """Return cross-entropy plus the proximal term."""
        squared = sum(
            (p - self._anchor[name]).square().sum()
            for name, p in model.named_parameters()
            if p.requires_grad
        )
        return super().loss(model, inputs, targets) + 0.5 * self.mu * squared
