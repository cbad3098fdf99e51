"""Spoil what a node says: records, numbers, text, arrays and bytes, the same for the same seed."""

from __future__ import annotations

import json
import math
from io import BytesIO
from random import Random
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, MetricRecord, RecordDict

NUMBERS: list[Any] = [
    math.nan, math.inf, -math.inf, 0, -0.0, -1, 1, 1.5, 2.0, 5e-324, 1e308, -1e308, 1e15, 1e15 + 2,
    2**31, 2**53 + 1, 2**63 - 1, -(2**63), 2**64 - 1, 10**400, -(10**400), True, [], [1, 2], [0.5],
]  # fmt: skip
TEXTS: list[Any] = [
    "", "x", "\n", "\x1b[2J", "\u202e", "\ud800", "<script>", "$\\frac{$", "../../etc", "a" * 300,
    "name", "num-examples", "num-examples/x", "correct/x", "layers", "0/triangle", "model",
    "€" * 90,
]  # fmt: skip
ODD: list[Any] = [
    *NUMBERS, *TEXTS, b"", b"\xff" * 40, b"x" * 70_000, "y" * 70_000, ["a", "b"], [b"a"], [True],
    ["z"] * 5000, [1.0] * 5000,
]  # fmt: skip


def spoil(content: RecordDict, rng: Random) -> RecordDict | Error:
    """Return the content of a reply with one to three things wrong, or perhaps not wrong."""
    made = _copy(content)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        change = rng.choices((_records, _values, _arrays), (1, 4, 4))[0]
        found = change(made, rng)
        if isinstance(found, Error):
            return found
    return made


def flip(data: bytes, rng: Random) -> bytes:
    """Return bytes with some of them changed, cut, doubled, inserted or swapped."""
    given = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 5))):
        at = (
            rng.randrange(len(given) + 1)
            if rng.random() < 0.6
            else rng.randrange(min(len(given), 200) + 1)
        )
        match rng.randrange(6):
            case 0 if given:
                given[at % len(given)] ^= 1 << rng.randrange(8)
            case 1:
                del given[at:]
            case 2:
                given[at:at] = rng.randbytes(rng.choice((1, 4, 64)))
            case 3:
                given[at : at + rng.choice((1, 4, 16))] = b""
            case 4:
                given[at : at + 8] = rng.choice((b"\xff" * 8, b"\x00" * 8, b"\x7f" * 8, b"[" * 8))
            case _:
                given[at:at] = given[: rng.randrange(len(given) + 1)]
    return bytes(given)


def spoil_json(value: Any, rng: Random) -> Any:
    """Return plain data with one thing in it replaced, removed or added."""
    places: list[tuple[Any, Any]] = []

    def walk(node: Any) -> None:
        if isinstance(node, dict | list):
            keys = list(node) if isinstance(node, dict) else range(len(node))
            for key in keys:
                places.append((node, key))
                walk(node[key])

    made = json.loads(json.dumps(value))
    walk(made)
    if not places:
        return rng.choice([None, 3, "x", [], {}])
    node, key = rng.choice(places)
    odd = [v for v in ODD if not isinstance(v, bytes) and v != [b"a"]] + [
        None,
        {},
        {"a": []},
        [[[[]]]],
    ]
    match rng.randrange(5):
        case 0:
            del node[key]
        case 1 if isinstance(node, dict):
            node[str(rng.choice(TEXTS))] = node.pop(key)
        case 2 if isinstance(node, dict):
            node[str(rng.choice(TEXTS))] = rng.choice(odd)
        case 3 if isinstance(node, list):
            node.insert(key, rng.choice(odd))
        case _:
            node[key] = rng.choice(odd)
    return made


def _copy(content: RecordDict) -> RecordDict:
    made = RecordDict()
    for name, record in content.items():
        if isinstance(record, ArrayRecord):
            arrays = {k: Array(a.dtype, a.shape, a.stype, a.data) for k, a in record.items()}
            made[name] = ArrayRecord(arrays)
        else:
            made[name] = type(record)(dict(record))
    return made


def _put(record: Any, key: Any, value: Any) -> None:
    """Put a value into a record past Flower's own check, which a hostile node has not got."""
    record.__dict__["_data"][key] = value


def _records(content: RecordDict, rng: Random) -> Error | None:
    data: dict[str, Any] = content.__dict__["_data"]
    name = rng.choice(list(data) or ["model"])
    other: Any = rng.choice(
        [
            ConfigRecord({"reason": rng.choice([t for t in TEXTS if t])}),
            ConfigRecord({"reason": 7}),
            ConfigRecord(),
            MetricRecord({"num-examples": 3}),
            MetricRecord(),
            ArrayRecord({"x": Array(np.zeros(3, np.float32))}),
            ArrayRecord({"x": Array(np.zeros(400_000, np.float32))}),
            ArrayRecord(),
            ConfigRecord({"nodes": ["a", "b"], "reasons": ["c"]}),
            ConfigRecord({"nodes": ["a\x1b"] * 500, "reasons": ["c\n" * 300] * 500}),
            ConfigRecord({"nodes": [1], "reasons": [b"x"]}),
        ]
    )
    match rng.randrange(7):
        case 0:
            data.pop(name, None)
        case 1:
            data[name] = other
        case 2:
            data[rng.choice([*TEXTS, "failure", "failures", "grams", "shared", "junk"])] = other
        case 3:
            data[rng.choice(TEXTS)] = data.pop(name, other)
        case 4:
            data.clear()
        case 5:
            data["failure"] = other
        case _:
            return Error(rng.choice((0, 1, 1001)), rng.choice((None, *TEXTS)))
    return None


def _values(content: RecordDict, rng: Random) -> None:
    plain = [r for r in content.values() if isinstance(r, ConfigRecord | MetricRecord)]
    if not plain:
        return
    record = rng.choice(plain)
    data: dict[Any, Any] = record.__dict__["_data"]
    keys = list(data) or ["num-examples"]
    key = rng.choice(keys)
    odd = NUMBERS if isinstance(record, MetricRecord) and rng.random() < 0.8 else ODD
    match rng.randrange(6):
        case 0:
            data.pop(key, None)
        case 1:
            data[rng.choice(TEXTS)] = rng.choice(odd)
        case 2:
            data[rng.choice(TEXTS)] = data.pop(key, 1)
        case 3:
            data.update({f"m{n}": n for n in range(rng.choice((30, 100, 5000)))})
        case _:
            _put(record, key, rng.choice(odd))


def _arrays(content: RecordDict, rng: Random) -> None:
    records = [r for r in content.values() if isinstance(r, ArrayRecord) and len(r)]
    if not records:
        return _values(content, rng)
    record = rng.choice(records)
    data: dict[str, Array] = record.__dict__["_data"]
    key = rng.choice(list(data))
    array = data[key]
    match rng.randrange(12):
        case 0:
            del data[key]
        case 1:
            data[rng.choice(TEXTS)] = data.pop(key)
        case 2:
            data[rng.choice([*TEXTS, "1/triangle", "0/factor", "7/rows"])] = array
        case 3:
            array.data = flip(array.data, rng)
        case 4:
            array.shape = rng.choice([(), (0,), (-1,), (2**40,), (1, *array.shape), (True,)])
        case 5:
            array.dtype = rng.choice(["float64", "object", "", "<U9", "float32"])
        case 6:
            array.stype = rng.choice(["torch", "", "numpy.ndarray", "pickle"])
        case 7:
            data[key] = rng.choice(list(data.values()))
        case 8:
            array.data = _file(rng)
        case _:
            data[key] = _numbers(array, rng)
    return None


def _numbers(array: Array, rng: Random) -> Array:
    """Return an array whose file is sound but whose numbers, shape or type are others."""
    try:
        values = array.numpy().copy()
    except Exception:  # spoilt before
        return array
    if values.size and rng.random() < 0.6:
        flat = values.reshape(-1)
        odd = [math.nan, math.inf, -math.inf, 0, -1, 3.4e38, -3.4e38, 1e-45, 2**40, 2**62, -(2**62)]
        with np.errstate(all="ignore"):
            flat[rng.randrange(flat.size)] = np.array(rng.choice(odd)).astype(values.dtype)
        if rng.random() < 0.2:
            flat[:] = flat[0]
        return Array(values)
    changes = [
        lambda v: v.astype(
            rng.choice(["float64", "float16", "int64", "uint8", "bool", "complex64"])
        ),
        lambda v: np.concatenate([v.reshape(-1)] * 2),
        lambda v: v.reshape(-1)[:-1],
        lambda v: np.asfortranarray(np.stack([v, v])),
        lambda v: np.zeros((300, *v.shape), v.dtype),
        lambda v: v.reshape(-1)[:0],
        lambda v: np.frombuffer(
            rng.choice([b"[" * 900, b"[[]]", b'[["fc"]]', b"{}", b"nul"]), np.uint8
        ),
    ]
    with np.errstate(all="ignore"):
        return Array(np.asarray(rng.choice(changes)(values)))


def _file(rng: Random) -> bytes:
    stream = BytesIO()
    match rng.randrange(5):
        case 0:
            np.savez(stream, np.zeros(3))
        case 1:
            np.save(stream, np.array([print], dtype=object), allow_pickle=True)
        case 2:
            np.lib.format.write_array(stream, np.zeros(3), version=(3, 0))
        case 3:
            header = rng.choice(
                ["(999999999999,)", "(" + "1, " * 300 + ")", "(-3,)", "((3),)", "[3]"]
            )
            text = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {header}, }}\n".encode()
            return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + bytes(12)
        case _:
            return rng.randbytes(rng.randrange(200))
    return stream.getvalue()
