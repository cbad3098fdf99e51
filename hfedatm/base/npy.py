"""Read and write the arrays of a message.

Flower sends an array as the bytes of a ``.npy`` file. Only the plain form of it is read: version 1,
numbers of a few types, in C order, as many bytes as the header says. NumPy would also accept
archives, pickles, other versions and any Python literal for a header. A federation sends the same
few headers over and over, so parsed headers are cached.
"""

from __future__ import annotations

import math
import re
from functools import lru_cache
from io import BytesIO
from typing import Any

import numpy as np
from flwr.app import Array

_PREFIX = b"\x93NUMPY\x01\x00"  # the format version of every array of plain numbers
_START = len(_PREFIX) + 2
_MOST_HEADER = 1024
_HEADER = re.compile(  # each repetition begins with a comma, so nothing is tried twice
    rb"\{'descr': '([<|][a-z]\d)', 'fortran_order': False, "
    rb"'shape': \(((?:\d{1,15}(?:, \d{1,15}){0,15},?)?)\), \} *\n"
)
_TYPES = {
    np.dtype(name).str: np.dtype(name)
    for name in ("bool", "u1", "u2", "u4", "u8", "i1", "i2", "i4", "i8", "f2", "f4", "f8")
}


def read_layout(array: Array) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Return an array's shape and type after checking all but its numbers; copies nothing."""
    shape, dtype, _ = _open(array)
    return shape, dtype


def read_array(array: Array) -> np.ndarray[Any, Any]:
    """Return a new array of the numbers that were sent; raises ``ValueError`` for anything else."""
    shape, dtype, start = _open(array)
    return np.frombuffer(array.data, dtype, math.prod(shape), start).reshape(shape).copy()


def write_array(values: np.ndarray[Any, Any]) -> Array:
    """Return the same as ``Array(values)``, for an array of plain numbers in C order."""
    header = _header(values.shape, values.dtype)
    return Array(str(values.dtype), values.shape, "numpy.ndarray", header + values.tobytes())


def _open(array: Array) -> tuple[tuple[int, ...], np.dtype[Any], int]:
    data = array.data
    if array.stype != "numpy.ndarray" or not data.startswith(_PREFIX):
        raise ValueError("it is not a .npy file of version 1")
    length = int.from_bytes(data[len(_PREFIX) : _START], "little")
    if length > _MOST_HEADER:
        raise ValueError(f"its header of {length} bytes is longer than {_MOST_HEADER}")
    start = _START + length
    shape, dtype = _layout(data[_START:start])
    if len(data) - start != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"it has {len(data) - start} bytes for shape {shape} of {dtype}")
    if tuple(array.shape) != shape:
        raise ValueError(f"it says shape {tuple(array.shape)} but carries {shape}")
    return shape, dtype, start


@lru_cache(maxsize=4096)
def _header(shape: tuple[int, ...], dtype: np.dtype[Any]) -> bytes:
    stream = BytesIO()
    layout = {"descr": dtype.str, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(stream, layout)
    return stream.getvalue()


@lru_cache(maxsize=4096)
def _layout(header: bytes) -> tuple[tuple[int, ...], np.dtype[Any]]:
    found = _HEADER.fullmatch(header)
    dtype = _TYPES.get(found[1].decode()) if found else None
    if found is None or dtype is None:
        raise ValueError("its header does not describe plain numbers in C order")
    return tuple(int(size) for size in found[2].replace(b",", b" ").split()), dtype
