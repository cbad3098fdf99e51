"""The inputs of a model: a tensor, or tensors by keyword."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

Inputs = Tensor | Mapping[str, Tensor]
Batch = tuple[Inputs, Any]


def forward(model: nn.Module, inputs: Inputs) -> Tensor:
    """Call ``model`` on a tensor, or on a mapping by keyword, and return its logits."""
    logits: Tensor = model(**inputs) if isinstance(inputs, Mapping) else model(inputs)
    return logits
