"""FedAvg (McMahan et al., 2017): train with cross-entropy alone.

McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data",
arXiv:1602.05629.
"""

from dataclasses import dataclass
from typing import ClassVar

from hfedatm.contracts import Method


@dataclass
class FedAvg(Method):
    """Plain local training."""

    per_example_loss: ClassVar[bool] = True
