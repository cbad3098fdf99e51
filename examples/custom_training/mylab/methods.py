"""A client method: a dataclass whose fields are its parameters; it overrides only the loss."""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from hfedatm.contracts import Inputs, Method, forward


@dataclass
class Smoothed(Method):
    """Cross-entropy with smoothed labels.

    Parameters
    ----------
    smoothing
        Probability mass that is spread over all classes.
    """

    smoothing: float = 0.1

    def loss(self, model: nn.Module, inputs: Inputs, targets: Tensor) -> Tensor:
        """Return the loss of a batch."""
        return F.cross_entropy(forward(model, inputs), targets, label_smoothing=self.smoothing)
