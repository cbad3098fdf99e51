"""Encode the numbers of a Gram as numpy arrays of 16, 32 or 64 bits, never as a pickle."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hfedatm_core.tensors import is_finite

Array = npt.NDArray[Any]
WireType = Literal["float16", "bfloat16", "float32", "float64"]

# Half of float16's range. The largest entry is scaled to it; entries down to 2e-9 of it survive.
_FLOAT16_TOP = 32768.0


def encode(values: Tensor, dtype: WireType | None = None) -> tuple[Array, float]:
    """Return ``(array, scale)`` with ``values ≈ array * scale``.

    ``dtype=None`` keeps the type of ``values``. The 16-bit types use one scale per tensor;
    bfloat16, which numpy lacks, travels as the ``uint16`` of its bits.
    """
    name = dtype or str(values.dtype).removeprefix("torch.")
    if name not in ("float16", "bfloat16", "float32", "float64"):
        raise ValueError(f"cannot send {name}; use float16, bfloat16, float32 or float64")
    if name in ("float32", "float64"):
        return values.to(getattr(torch, name)).numpy(), 1.0
    top = float(values.abs().max()) if values.numel() else 0.0
    scale = top / (_FLOAT16_TOP if name == "float16" else 1.0) or 1.0
    scaled = values.double() / scale
    if name == "float16":
        return scaled.to(torch.float16).numpy(), scale
    return scaled.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16), scale


def decode(array: Array, scale: float, what: str) -> Tensor:
    """Undo :func:`encode`; ``what`` names the array in an error.

    The tensor shares memory with ``array`` when neither type nor scale has to change.
    """
    if array.dtype == np.uint16:
        bits = torch.from_numpy(np.ascontiguousarray(array).view(np.int16).copy())
        values = bits.view(torch.bfloat16).float() * scale
    elif array.dtype == np.float16:
        values = torch.from_numpy(array.astype(np.float32) * np.float32(scale))
    elif array.dtype in (np.float32, np.float64):
        values = torch.from_numpy(_writable(array))
    else:
        raise ValueError(
            f"{what} has type {array.dtype}; "
            "expected float16, float32, float64 or uint16 (bfloat16)"
        )
    if not is_finite(values):
        raise ValueError(f"{what} holds values that are not finite (NaN or infinity)")
    return values


def one_integer(value: int) -> Array:
    """Return an array that holds one integer."""
    return np.array([value], dtype=np.int64)


def read_integer(arrays: Mapping[str, Array], key: str) -> int:
    """Read an array that holds one integer."""
    array = arrays.get(key)
    if array is None or array.shape != (1,) or array.dtype.kind not in "iu":
        raise ValueError(f"a sent Gram needs '{key}' as one integer")
    return int(array[0])


def read_values(arrays: Mapping[str, Array], key: str, ndim: int, scale_key: str | None) -> Tensor:
    """Read a float array of ``ndim`` axes, times the positive number under ``scale_key``."""
    scale = 1.0
    if scale_key is not None:
        array = arrays[scale_key]
        if array.shape != (1,) or array.dtype.kind != "f" or not 0 < float(array[0]) < np.inf:
            raise ValueError(f"a sent Gram needs '{scale_key}' as one positive number")
        scale = float(array[0])
    if arrays[key].ndim != ndim or arrays[key].size == 0:
        raise ValueError(f"'{key}' of a sent Gram has shape {arrays[key].shape}, wanted {ndim}-d")
    return decode(arrays[key], scale, f"'{key}' of a sent Gram")


def _writable(array: Array) -> Array:
    array = np.ascontiguousarray(array)
    return array if array.flags.writeable else array.copy()
