"""Layers that see the same input share one Gram: keep, combine and send it once."""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Mapping
from typing import TypeVar

import numpy as np

from hfedatm_core.grams.encoding import Array, WireType
from hfedatm_core.grams.gram import Gram
from hfedatm_core.grams.grouped import read_gram

T = TypeVar("T")
_INDEX = "layers"


def regroup(
    groups: Mapping[tuple[str, ...], T],
    inputs: Mapping[str, Hashable],
    copy: Callable[[T, tuple[str, ...]], T],
) -> dict[tuple[str, ...], T]:
    """Split the groups whose members no longer see the same input.

    Parameters
    ----------
    groups
        The value of each group of layer names.
    inputs
        A key of each layer's input, different for different inputs; absent layers had no input.
    copy
        ``copy(value, members)`` returns the value of a part that leaves its group.
    """
    refined: dict[tuple[str, ...], T] = {}
    for members, value in groups.items():
        parts: dict[Hashable, list[str]] = {}
        for name in members:
            parts.setdefault(inputs.get(name), []).append(name)
        for part in map(tuple, parts.values()):
            refined[part] = value if part == members else copy(value, part)
    return refined


def distinct(grams: Mapping[str, Gram]) -> dict[tuple[str, ...], Gram]:
    """Return every distinct Gram object once, under the names of the layers that share it."""
    names: dict[int, list[str]] = {}
    for name, gram in grams.items():
        names.setdefault(id(gram), []).append(name)
    return {tuple(group): grams[group[0]] for group in names.values()}


def grams_nbytes(grams: Mapping[str, Gram]) -> int:
    """Return the bytes of all Grams, shared ones counted once."""
    return sum(gram.nbytes for gram in distinct(grams).values())


def pack_grams(grams: Mapping[str, Gram], dtype: WireType | None = None) -> dict[str, Array]:
    """Return all Grams as one flat dictionary of numpy arrays, each distinct Gram once.

    ``"layers"`` holds the table of layer names as the bytes of a JSON list, one entry per distinct
    Gram; the arrays of entry ``k`` are named ``"k/triangle"`` and so on (see ``Gram.to_arrays``).
    """
    groups = distinct(grams)
    table = json.dumps([list(group) for group in groups]).encode()
    arrays: dict[str, Array] = {_INDEX: np.frombuffer(table, dtype=np.uint8).copy()}
    for number, gram in enumerate(groups.values()):
        arrays |= {f"{number}/{key}": value for key, value in gram.to_arrays(dtype).items()}
    return arrays


def unpack_grams(arrays: Mapping[str, Array]) -> dict[str, Gram]:
    """Undo :func:`pack_grams`; layers that shared a Gram share one object again."""
    parts: dict[int, dict[str, Array]] = {}
    for key, array in arrays.items():
        number, _, field = key.partition("/")
        if key == _INDEX:
            continue
        if not (number.isascii() and number.isdigit() and field):
            raise ValueError(f"'{key}' is not a part of packed Grams")
        parts.setdefault(int(number), {})[field] = array
    table = _layer_table(arrays)
    if sorted(parts) != list(range(len(table))):
        raise ValueError(f"packed Grams name {len(table)} matrices but hold {sorted(parts)}")
    grams: dict[str, Gram] = {}
    for position, names in enumerate(table):
        try:
            gram = read_gram(parts[position])
        except ValueError as error:
            raise ValueError(f"Gram of layer '{names[0]}': {error}") from None
        grams |= dict.fromkeys(names, gram)
    return grams


def _layer_table(arrays: Mapping[str, Array]) -> list[list[str]]:
    problem = f"packed Grams need '{_INDEX}': the bytes of a JSON list of lists of layer names"
    if _INDEX not in arrays:
        raise ValueError(problem)
    try:
        table = json.loads(np.asarray(arrays[_INDEX], dtype=np.uint8).tobytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(problem) from error
    names = [name for group in table for name in group] if _is_table(table) else None
    if names is None or len(names) != len(set(names)):
        raise ValueError(problem)
    return table  # type: ignore[no-any-return]


def _is_table(table: object) -> bool:
    return isinstance(table, list) and all(
        isinstance(group, list) and group and all(isinstance(name, str) for name in group)
        for group in table
    )
