"""Lengths of tensors and sizes of Grams, in float64 and whatever a hostile node puts there."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hfedatm_core.grams.gram import FactorGram, Gram, PackedGram


def distance(value: Tensor, start: Tensor) -> float:
    """Return ``‖value − start‖`` in float64; infinite only where no float64 can hold it."""
    if value.is_floating_point():
        norm = float(torch.linalg.vector_norm(value.detach() - start, dtype=torch.float64))
        if math.isfinite(norm):
            return norm
    return norm_of(value.detach().double() - start.double())


def norm_of(values: Tensor) -> float:
    """Return the norm of any values, also of those whose squares overflow."""
    top = float(values.abs().max()) if values.numel() else 0.0
    if top == 0.0 or not math.isfinite(top):
        return top
    return top * float(torch.linalg.vector_norm(values.double() / top))


def gram_size(gram: Gram) -> float:
    """Return the trace of a Gram, or what its other entries amount to where that is more."""
    trace = float(gram.diagonal().double().abs().sum())
    if isinstance(gram, FactorGram):
        return max(trace, norm_of(gram.factor) ** 2)
    if isinstance(gram, PackedGram):
        # The triangle holds every pair once: the norm of the whole is up to √2 times that.
        return max(trace, norm_of(gram.triangle))
    return trace
