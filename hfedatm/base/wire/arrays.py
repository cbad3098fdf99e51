"""Read the arrays of a reply: expected names, shapes and types, finite, and never unpickled."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, RecordDict

from hfedatm.base.npy import read_array, read_layout
from hfedatm.base.privacy_settings import gram_mechanism
from hfedatm.base.records import BadReply, find_record
from hfedatm.base.wire.expected import Expected
from hfedatm_core.grams.definite import is_semidefinite
from hfedatm_core.grams.gram import FactorGram, Gram

MOST_INDEX = 1_000_000
"""Most bytes of the table of layer names in a reply's Grams."""
LARGEST_WEIGHT = 1e15
"""Largest weight or layer input; squares and sums of numbers up to this size are finite."""
_WIRE = {"float16": "float16", "bfloat16": "uint16", "float32": "float32"}
_ROUNDING = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 1e-5}
"""Largest relative error of a Gram's entries, from their type or from sums over many examples."""


def read_state(content: RecordDict, expected: Expected) -> dict[str, torch.Tensor]:
    """Return the tensors of a reply after checking names, shapes, types and finiteness."""
    key, reference = expected.record, expected.arrays
    record = find_record(content, key, ArrayRecord)
    if record is None:
        raise BadReply(f"reply has no '{key}' arrays")
    missing, extra = reference.keys() - record.keys(), record.keys() - reference.keys()
    if missing or extra:
        raise BadReply(
            f"{key}: missing tensors {sorted(missing)[:5]}, unknown tensors {sorted(extra)[:5]}"
        )
    state = {}
    for name, like in reference.items():
        shape, dtype = _layout(name, record[name])
        if shape != tuple(like.shape):
            raise BadReply(f"{key}: {name} has shape {shape}, not {tuple(like.shape)}")
        if (sent := getattr(torch, dtype.name, None)) != like.dtype:
            raise BadReply(f"{key}: {name} has type {sent or dtype}, not {like.dtype}")
        tensor = torch.from_numpy(read_array(record[name]))
        if not (top := _largest(tensor)) <= LARGEST_WEIGHT:
            what = f"beyond ±{LARGEST_WEIGHT:g}" if math.isfinite(top) else "that are not finite"
            raise BadReply(f"{key}: {name} has values {what}")
        state[name] = tensor
    return state


def read_grams(content: RecordDict, expected: Expected) -> dict[str, Gram]:
    """Return the Grams of a reply, each in the form and size that its layer's width requires."""
    record = find_record(content, "grams", ArrayRecord)
    if record is None:
        raise BadReply("reply has no 'grams' arrays")
    groups = _layer_table(record)
    names = [name for group in groups for name in group]
    missing, extra = expected.layers.keys() - set(names), set(names) - expected.layers.keys()
    if missing or extra or len(names) != len(set(names)):
        raise BadReply(
            f"grams: missing layers {sorted(missing)[:5]}, unknown layers {sorted(extra)[:5]}"
        )
    parts = {f"{i}/{field}" for i, group in enumerate(groups) for field in _fields(group, expected)}
    if parts != record.keys() - {"layers"}:
        # The most common reason, in terms of the settings.
        if any(key.endswith(("/factor", "/triangle")) and key not in parts for key in record):
            wrong = next(g[0] for i, g in enumerate(groups) if _other_form(i, record, parts))
            dim = expected.settings.gram_max_dim
            raise BadReply(f"grams: {wrong} has the wrong form for gram-max-dim = {dim}")
        raise BadReply(f"grams: wrong parts {sorted(parts ^ (record.keys() - {'layers'}))[:5]}")
    grams: dict[str, Gram] = {}
    for number, group in enumerate(groups):
        gram = _gram(
            {f: record[f"{number}/{f}"] for f in _fields(group, expected)}, group, expected
        )
        grams |= dict.fromkeys(group, gram)
    return {name: grams[name] for name in names}


def _fields(group: list[str], expected: Expected) -> tuple[str, ...]:
    if expected.layers[group[0]] > expected.settings.gram_max_dim:
        return ("factor", "diagonal", "rows", "rank", "scale")
    return ("triangle", "rows", "scale")


def _other_form(number: int, record: Mapping[str, Array], parts: set[str]) -> bool:
    return any(f"{number}/{f}" in record.keys() - parts for f in ("factor", "triangle"))


def _gram(parts: Mapping[str, Array], group: list[str], expected: Expected) -> Gram:
    name, width = group[0], expected.layers[group[0]]
    if any(expected.layers[other] != width for other in group):
        raise BadReply(f"grams: {', '.join(group[:5])} share one but differ in width")
    layouts = {field: _layout(f"Gram of layer '{name}', {field}", a) for field, a in parts.items()}
    rank, wire = expected.settings.gram_rank, _WIRE[expected.gram_dtype]
    for field, (shape, dtype) in layouts.items():
        if field == "triangle":
            size = shape[0] if len(shape) == 1 else -1
            if size != width * (width + 1) // 2:
                raise BadReply(f"grams: {name} is {_width(size)} wide, not {width}")
        elif field == "factor":
            if len(shape) != 2 or shape[1] != width or not 1 <= shape[0] <= rank:
                raise BadReply(
                    f"grams: {name} has a factor of shape {shape}, not (1 to gram-rank = {rank}, "
                    f"{width})"
                )
        elif shape != ((width,) if field == "diagonal" else (1,)):
            raise BadReply(f"grams: {field} of {name} has shape {shape}")
        allowed = {
            "diagonal": ("float32", "float64"),
            "scale": ("float64",),
            "rows": ("int64",),
            "rank": ("int64",),
        }.get(field, (wire,))
        if dtype.name not in allowed:
            raise BadReply(f"grams: {field} of {name} has type {dtype}, not {allowed[0]}")
    try:
        gram = Gram.from_arrays({field: read_array(array) for field, array in parts.items()})
    except ValueError as error:
        raise BadReply(f"grams cannot be read: Gram of layer '{name}': {error}") from error
    _check_size(gram, name)
    if gram.rows > expected.most_rows:
        raise BadReply(f"grams: {name} claims {gram.rows:.3g} rows, more than plausible")
    _check_definite(gram, name, expected)
    if isinstance(gram, FactorGram):
        # Use our rank: a node's claimed rank would decide how later factors are compressed.
        gram = FactorGram(gram.factor, gram.diagonal(), gram.rows, rank)
    return gram


def _check_definite(gram: Gram, name: str, expected: Expected) -> None:
    """Refuse a matrix that cannot be a Gram.

    A client's noise makes its Gram indefinite, and the station repairs the mean. A station's Gram
    is shrunk and has been rounded twice, and once more by every further level of stations.
    """
    station, rounding = expected.tier == "station", _ROUNDING[expected.gram_dtype]
    if gram_mechanism(expected.settings).noised and not station:
        return
    if bool((gram.diagonal() < 0).any()):
        raise BadReply(f"grams: {name} has a negative diagonal, which no Gram has")
    times = 1 + expected.height if station else 1
    if not is_semidefinite(gram, rounding * times, expected.alpha):
        raise BadReply(f"grams: {name} is not positive semi-definite, as every Gram is")


def _check_size(gram: Gram, name: str) -> None:
    """Refuse a Gram whose products with others would not be finite."""
    if isinstance(gram, FactorGram):
        fits = _largest(gram.factor) <= LARGEST_WEIGHT
    else:
        fits = _largest(gram.triangle) <= LARGEST_WEIGHT**2  # type: ignore[attr-defined]
    if not (fits and _largest(gram.diagonal()) <= LARGEST_WEIGHT**2):
        raise BadReply(f"grams: {name} has values beyond those of any layer's inputs")


def _largest(values: torch.Tensor) -> float:
    """Return the largest absolute value, NaN if any value is; one pass without allocation."""
    if not values.numel():
        return 0.0
    low, high = (float(value) for value in torch.aminmax(values))
    return high if math.isnan(high) else max(-low, high)


def _layer_table(record: ArrayRecord) -> list[list[str]]:
    problem = "grams cannot be read: 'layers' must be the bytes of a JSON list of lists of names"
    index = record.get("layers")
    if index is None:
        raise BadReply(problem)
    shape, dtype = _layout("layers", index)
    if len(shape) != 1 or dtype != np.uint8 or shape[0] > MOST_INDEX:
        raise BadReply(problem)
    try:
        table = json.loads(read_array(index).tobytes())
    except (ValueError, RecursionError) as error:
        raise BadReply(problem) from error
    if not isinstance(table, list) or not all(
        isinstance(group, list) and group and all(isinstance(name, str) for name in group)
        for group in table
    ):
        raise BadReply(problem)
    return table


def _layout(name: str, array: Array) -> tuple[tuple[int, ...], np.dtype[np.generic]]:
    try:
        return read_layout(array)
    except Exception as error:  # a hostile or broken node may send anything
        raise BadReply(f"{name} cannot be read: {error}") from error


def _width(size: int) -> int:
    return (int((8 * max(size, 0) + 1) ** 0.5) - 1) // 2
