"""The type of tensors by name, and functions of tensors that several packages use."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

State = dict[str, Tensor]
"""The tensors of a model, or tensors that accompany a model, by their names."""

_NUMPY_HAS = {torch.float16, torch.float32, torch.float64, torch.int32, torch.int64}
_ONEDNN = getattr(torch.ops.mkldnn, "_linear_pointwise", None)


def is_finite(values: Tensor) -> bool:
    """Tell whether every entry is finite, in one pass that allocates nothing in the usual case."""
    if not values.is_floating_point() or bool(torch.isfinite(values.sum())):
        return True
    return bool(torch.isfinite(values).all())


def plain_floats(values: Tensor) -> Tensor:
    """Return the numbers on the CPU, contiguous; float64 stays, other types become float32."""
    kind = torch.float64 if values.dtype == torch.float64 else torch.float32
    return values.detach().to("cpu", kind).contiguous()


def take(values: Tensor, index: Tensor, axis: int) -> Tensor:
    """Return ``values.index_select(axis, index)``.

    NumPy takes two thirds of torch's time on the inner axes of a large tensor.
    """
    if values.device.type != "cpu" or values.dtype not in _NUMPY_HAS:
        return values.index_select(axis, index.to(values.device))
    return torch.from_numpy(np.take(values.detach().numpy(), index.numpy(), axis))


def times_transposed(left: Tensor, right: Tensor) -> Tensor:
    """Return ``left @ right.T`` of two matrices.

    In float32 oneDNN multiplies them, if torch has it: its kernels use the widest registers of any
    processor. MKL, which torch calls otherwise, uses them on some only, and takes twice the time
    on the others.
    """
    single = left.dtype == right.dtype == torch.float32 and left.device.type == "cpu"
    if _ONEDNN is None or not single or 0 in (*left.shape, *right.shape):
        return left @ right.T
    found: Tensor = _ONEDNN(left.contiguous(), right.contiguous(), None, "none", [], "")
    return found


def distance(value: Tensor, start: Tensor) -> float:
    """Return ``‖value − start‖`` in float64; infinite only if no float64 can hold the norm."""
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
