"""Give a station's tensors the reference's shapes, or name a tensor that does not fit."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from hfedatm_core.tensors import State, is_finite


def require_finite(state: State, whose: str) -> None:
    """Raise a ``ValueError`` that names the first tensor with NaN or infinity in it."""
    for name, tensor in state.items():
        if not is_finite(tensor):
            raise ValueError(
                f"{whose}: {name} of shape {tuple(tensor.shape)} holds NaN or infinite values"
            )


def match_shapes(state: State, reference: State, kernels: frozenset[str]) -> dict[str, Tensor]:
    """Return ``state`` with the reference's shapes.

    A smaller convolution kernel gets zeros around it, which keeps the layer's function if its
    padding grows with its kernel. Of a larger kernel the middle is taken, which changes the
    function. Any other difference is an error.

    Parameters
    ----------
    kernels
        Names of the convolution weights.

    Raises
    ------
    ValueError
        A tensor is missing, is not known to the reference, is not finite, or has another shape.
    """
    missing = [name for name in reference if name not in state]
    unknown = [name for name in state if name not in reference]
    if missing or unknown:
        raise ValueError(
            "the state does not belong to the reference's architecture:"
            + "".join(f" {n} {tuple(reference[n].shape)} is missing;" for n in missing[:3])
            + "".join(f" {n} {tuple(state[n].shape)} is not in the reference;" for n in unknown[:3])
            + f" {len(missing)} missing and {len(unknown)} unknown in all"
        )
    fitted = {}
    for name, wanted in reference.items():
        tensor = state[name]
        if tensor.shape != wanted.shape:
            if name not in kernels or tensor.shape[:2] != wanted.shape[:2]:
                raise ValueError(
                    f"{name} has shape {tuple(tensor.shape)}, the reference {tuple(wanted.shape)}"
                )
            tensor = _resize(tensor, wanted.shape[2:])
        fitted[name] = tensor
    require_finite(fitted, "the state to align")
    return fitted


def _resize(kernel: Tensor, size: torch.Size) -> Tensor:
    """Put a kernel into the middle of zeros, or take its middle, axis by axis."""
    for axis, wanted in enumerate(size, start=2):
        missing = wanted - kernel.shape[axis]
        if missing < 0:
            kernel = kernel.narrow(axis, -missing // 2, wanted)
    padding: list[int] = []
    for axis in reversed(range(2, kernel.dim())):  # torch pads the last axis first
        missing = size[axis - 2] - kernel.shape[axis]
        padding += [missing // 2, missing - missing // 2]
    return functional.pad(kernel, padding)
