"""Read and write the arrays of a message.

Flower sends an array as the bytes of a ``.npy`` file. NumPy writes and parses the text of its
header, a Python literal, for every array of every message; a federation sends the same few headers
over and over, so here they are kept.
"""

from __future__ import annotations

import math
from functools import lru_cache
from io import BytesIO
from typing import Any

import numpy as np
from flwr.app import Array

_PREFIX = b"\x93NUMPY\x01\x00"  # the format version that all arrays of plain numbers have
_START = len(_PREFIX) + 2


def read_array(array: Array) -> np.ndarray[Any, Any]:
    """Return what ``array.numpy()`` returns: a new array, never unpickled."""
    data = array.data
    if array.stype != "numpy.ndarray" or not data.startswith(_PREFIX):
        return array.numpy()
    end = _START + int.from_bytes(data[len(_PREFIX) : _START], "little")
    shape, fortran_order, dtype = _layout(data[:end])
    if dtype.hasobject or min(shape, default=0) < 0:
        raise ValueError(f"an array of type {dtype} and shape {shape} is not accepted")
    values = np.frombuffer(data, dtype, math.prod(shape), end)
    return values.reshape(shape, order="F" if fortran_order else "C").copy(order="K")


def write_array(values: np.ndarray[Any, Any]) -> Array:
    """Return what ``Array(values)`` returns for an array of plain numbers, in C order."""
    header = _header(values.shape, values.dtype)
    return Array(str(values.dtype), values.shape, "numpy.ndarray", header + values.tobytes())


@lru_cache(maxsize=4096)
def _header(shape: tuple[int, ...], dtype: np.dtype[Any]) -> bytes:
    stream = BytesIO()
    layout = {"descr": dtype.str, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(stream, layout)
    return stream.getvalue()


@lru_cache(maxsize=4096)
def _layout(header: bytes) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    stream = BytesIO(header)
    np.lib.format.read_magic(stream)
    return np.lib.format.read_array_header_1_0(stream)
