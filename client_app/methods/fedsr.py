"""FedSR (Nguyen et al., 2022): a simple, domain-independent representation.

The input of the classifier becomes a Gaussian ``N(mu(x), sigma(x)^2)`` from which ``z`` is drawn:

    loss = CE + l2r * mean ||z|| + cmi * KL( N(mu, sigma) || N(r_mu[y], r_sigma[y]) )

The table ``r`` has one Gaussian per class, is learned with the model and stays on the client.

Nguyen, Torr and Lim, "FedSR: A Simple and Effective Domain Generalization Method for Federated
Learning", NeurIPS 2022, https://openreview.net/forum?id=mrt90D00aQX.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hfedatm.contracts import Method, State
from hfedatm_core.channels.index_maps import Follows
from hfedatm_core.data import Inputs
from hfedatm_core.models.base import head_name


class GaussianHead(nn.Module):
    """Replace a linear head by a Gaussian representation of the same width and a linear head."""

    mu: Tensor
    sigma: Tensor
    z: Tensor

    def __init__(self, head: nn.Linear, samples: int) -> None:
        super().__init__()
        width = head.in_features
        self.mean = nn.Linear(width, width)
        self.scale = nn.Linear(width, width)
        self.classifier = nn.Linear(width, head.out_features)
        self.samples = samples

    def forward(self, features: Tensor) -> Tensor:
        """Return logits: from one draw in training; from the mean or averaged draws otherwise."""
        self.mu = self.mean(features)
        self.sigma = F.softplus(self.scale(features))
        if self.training:
            self.z = self._draw()
            return self._logits(self.z)
        if self.samples == 0:
            return self._logits(self.mu)
        probabilities = sum(self._logits(self._draw()).softmax(-1) for _ in range(self.samples))
        return torch.log(torch.as_tensor(probabilities) / self.samples)

    def _logits(self, representation: Tensor) -> Tensor:
        logits: Tensor = self.classifier(representation)
        return logits

    def _draw(self) -> Tensor:
        return self.mu + self.sigma * torch.randn_like(self.sigma)


@dataclass
class FedSR(Method):
    """Regularise the representation.

    Parameters
    ----------
    l2r
        Weight of the norm of the representation.
    cmi
        Weight of the conditional mutual information bound.
    samples
        Draws averaged in evaluation; 0 uses the mean of the representation.
    """

    needs_classes: ClassVar[bool] = True

    l2r: float = 0.01
    cmi: float = 1e-3
    samples: int = 0

    def adapt(self, model: nn.Module) -> nn.Module:
        """Put the Gaussian representation before the classifier."""
        name = head_name(model)
        head = model.get_submodule(name)
        assert isinstance(head, nn.Linear), "head_name returns a Linear layer"
        model.set_submodule(name, GaussianHead(head, self.samples))
        return model

    def begin(self, model: nn.Module, shared: State, memory: State) -> None:
        """Restore the class table that this client kept from its last round."""
        self._head = next(m for m in model.modules() if isinstance(m, GaussianHead))
        classes, width = self._head.classifier.weight.shape
        device = self._head.classifier.weight.device
        start = {"mean": torch.zeros(classes, width), "scale": torch.ones(classes, width)}
        self._table = {
            key: nn.Parameter(memory.get(key, value).to(device)) for key, value in start.items()
        }

    def parameters(self) -> list[nn.Parameter]:
        """Return the class table."""
        return list(self._table.values())

    def loss(self, model: nn.Module, inputs: Inputs, targets: Tensor) -> Tensor:
        """Return cross-entropy plus both regularisers."""
        error = super().loss(model, inputs, targets)
        head = self._head
        kl = gaussian_kl(
            head.mu,
            head.sigma,
            self._table["mean"][targets],
            F.softplus(self._table["scale"][targets]),
        )
        norm: Tensor = head.z.norm(dim=1)
        return error + self.l2r * norm.mean() + self.cmi * kl.mean()

    def remember(self) -> State:
        """Keep the class table."""
        return {key: value.detach() for key, value in self._table.items()}

    def follows(self, model: nn.Module) -> Follows:
        """Return that the table's units are the inputs of the classifier."""
        head = next(n for n, m in model.named_modules() if isinstance(m, GaussianHead))
        units = {1: (f"{head}.classifier.weight", 1)}
        return {"mean": units, "scale": units}


def gaussian_kl(mean: Tensor, std: Tensor, mean_to: Tensor, std_to: Tensor) -> Tensor:
    """Return KL(N(mean, std^2) || N(mean_to, std_to^2)), summed over independent features."""
    ratio = (std.square() + (mean - mean_to).square()) / (2 * std_to.square())
    return (std_to.log() - std.log() + ratio - 0.5).sum(-1)
