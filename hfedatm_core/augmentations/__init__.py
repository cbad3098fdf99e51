"""Random changes to training batches: one file each, found by name."""

from collections.abc import Callable

import torch

from hfedatm_core.data.base import Batch, Inputs

Augment = Callable[[Inputs, torch.Tensor, torch.Generator], Batch]
"""``augment(inputs, targets, generator) -> (inputs, targets)``; random numbers come from the
generator alone, so that a run can be repeated."""
