"""gPerXAN (Le et al., 2024): assembled normalisation and guidance by the global classifier.

Every BatchNorm becomes a mix of batch and instance normalisation,

    y = w BN(x) + (1 - w) IN(x),      w = sigmoid(v) learned per layer,

where instance normalisation removes features particular to a domain and batch normalisation keeps
those that separate classes. The features must also suit a frozen copy of the received classifier:

    loss = CE(classifier(features)) + guide * CE(received classifier(features)).

All layers are averaged up the tree, the mixed ones too, because the unseen domain has no client of
its own that could supply its normalisation.

Le et al., "Efficiently Assemble Normalization Layers and Regularization for Federated Domain
Generalization", arXiv:2403.15605.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hfedatm.base.errors import UserError
from hfedatm.contracts import Method, State
from hfedatm_core.data import Inputs
from hfedatm_core.models.base import head_name


class MixedNorm(nn.Module):
    """Batch and instance normalisation of the same channels, mixed by one learned number."""

    def __init__(self, norm: nn.BatchNorm2d, share: float) -> None:
        super().__init__()
        self.batch = norm
        self.instance = nn.InstanceNorm2d(norm.num_features, eps=norm.eps, affine=True)
        self.logit = nn.Parameter(torch.logit(torch.tensor(share)))

    def forward(self, x: Tensor) -> Tensor:
        """Mix the two normalisations."""
        share = torch.sigmoid(self.logit)
        mixed: Tensor = share * self.batch(x) + (1 - share) * self.instance(x)
        return mixed


@dataclass
class GPerXAN(Method):
    """Mix normalisations and guide features by the received classifier.

    Parameters
    ----------
    guide
        Weight of the guiding loss.
    batch_share
        Initial share of batch normalisation in the mix.
    """

    needs_classes: ClassVar[bool] = True

    guide: float = 0.5
    batch_share: float = 0.5

    def __post_init__(self) -> None:
        """Check the parameters."""
        if self.guide < 0 or not 0 < self.batch_share < 1:
            raise ValueError(
                f"guide must be at least 0 and batch_share in (0, 1), "
                f"got {self.guide} and {self.batch_share}"
            )

    def adapt(self, model: nn.Module) -> nn.Module:
        """Replace every BatchNorm by a mix."""
        norms = {n: m for n, m in model.named_modules() if isinstance(m, nn.BatchNorm2d)}
        if not norms:
            raise UserError(
                "client-method gperxan mixes BatchNorm with instance normalisation, and this model "
                "has no BatchNorm2d: use model=resnet18, or model-params=batch_norm=true for "
                "lenet5 and vgg11"
            )
        for name, norm in norms.items():
            model.set_submodule(name, MixedNorm(norm, self.batch_share))
        return model

    def begin(self, model: nn.Module, shared: State, memory: State) -> None:
        """Freeze a copy of the received classifier and record the inputs of the trained one."""
        head = model.get_submodule(head_name(model))
        assert isinstance(head, nn.Linear)
        self._weight = head.weight.detach().clone()
        self._bias = None if head.bias is None else head.bias.detach().clone()

        def keep_features(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            self._features = inputs[0]

        head.register_forward_pre_hook(keep_features)

    def loss(self, model: nn.Module, inputs: Inputs, targets: Tensor) -> Tensor:
        """Return cross-entropy plus the guiding loss."""
        error = super().loss(model, inputs, targets)
        guided = F.linear(self._features, self._weight, self._bias)
        return error + self.guide * F.cross_entropy(guided, targets)
