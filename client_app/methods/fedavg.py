"""FedAvg (McMahan et al., 2017): cross-entropy, nothing else."""

from dataclasses import dataclass

from client_app.methods.base import Method


@dataclass
class FedAvg(Method):
    """Plain local training."""
