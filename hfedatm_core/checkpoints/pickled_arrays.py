"""Read a pickle that holds numpy arrays in dictionaries, and nothing else.

A pickle is a program: it may import any function and call it. This reader lends it three names,
those that numpy writes for an array, and gives these names functions of its own, so that neither
the file's nor numpy's code runs. Every other name is refused before anything is called.
"""

from __future__ import annotations

import math
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Arrays = dict[str, "npt.NDArray[Any] | Arrays"]
_TYPES = ("f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8")


class _Type:
    """A type of numbers, as numpy pickles it: a code, then its byte order."""

    def __init__(self, code: object, *_: object) -> None:
        if code not in _TYPES:
            raise pickle.UnpicklingError(f"arrays of type {str(code)[:20]!r} are refused")
        self.dtype = np.dtype(str(code))

    def __setstate__(self, state: Any) -> None:
        order = state[1]
        if order not in ("<", ">", "|"):
            raise pickle.UnpicklingError("an array has no byte order")
        self.dtype = self.dtype.newbyteorder(order)


class _Array:
    """An array, as numpy pickles it: first empty, then filled from bytes."""

    array: npt.NDArray[Any]

    def __init__(self, *_: object) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        _, shape, kind, fortran, content = state
        if not isinstance(kind, _Type) or not isinstance(content, bytes):
            raise pickle.UnpicklingError("an array is not made of plain numbers")
        sizes = [n for n in shape if type(n) is int and n >= 0]
        if len(sizes) != len(shape) or math.prod(sizes) * kind.dtype.itemsize != len(content):
            raise pickle.UnpicklingError("the bytes of an array do not fit its shape")
        order = "F" if fortran else "C"
        self.array = np.frombuffer(content, kind.dtype).reshape(sizes, order=order)  # type: ignore[call-overload]


class _Reader(pickle.Unpickler):
    """Knows the names that numpy writes for an array."""

    def find_class(self, module: str, name: str) -> Any:
        if module in ("numpy.core.multiarray", "numpy._core.multiarray"):
            if name == "_reconstruct":
                return _Array
        if module == "numpy" and name in ("ndarray", "dtype"):
            return _Type if name == "dtype" else _Array
        raise pickle.UnpicklingError(f"it asks for {module}.{name}"[:200])


def read_arrays(path: Path) -> Arrays:
    """Return the arrays of a pickle, in dictionaries as in the file.

    Raises
    ------
    ValueError
        The file is damaged, or holds or calls something else than arrays of numbers.
    """
    try:
        with path.open("rb") as file:
            found: Arrays = _checked(_Reader(file).load())
            return found
    except Exception as error:  # for a broken file the reader raises errors of many types
        raise ValueError(
            f"cannot read the arrays in {path}: {str(error)[:300]}; only numbers are read from "
            "it, objects are never unpickled"
        ) from error


def _checked(value: Any, depth: int = 0) -> Any:
    if type(value) is _Array and depth:
        return value.array
    if type(value) is not dict or depth > 8 or not all(type(key) is str for key in value):
        raise pickle.UnpicklingError("it holds something else than arrays by name")
    return {name: _checked(item, depth + 1) for name, item in value.items()}
