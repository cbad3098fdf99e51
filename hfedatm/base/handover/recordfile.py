"""A `RecordDict` as bytes: a header, an index, then the bytes of the arrays one after the other.

    8 bytes   magic
    4 bytes   CRC-32 of all that follows
    4 bytes   length of the index, little-endian
    index     JSON: [[name, kind, items], ...]
    the rest  the arrays' bytes, and those of byte strings, in the order of the index

Reading the bytes executes nothing and decompresses nothing, no two arrays share bytes, and the
sizes must add up exactly. The checksum detects damaged bytes; it does not protect against their
author.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path
from typing import IO, Any
from zlib import crc32

from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from hfedatm_files import replacing

MAGIC = b"HFEDREC\x01"
MOST_INDEX = 1_000_000
"""Most bytes of the index; the index of a model with a thousand tensors takes a tenth of this."""
MOST_LISTS = 50_000
"""Most lists and objects in the index; each takes far more memory than its characters."""
_PLAIN: dict[str, Callable[[dict[str, Any]], Any]] = {
    "config": ConfigRecord,
    "metric": MetricRecord,
}
_BYTES = "bytes"


class BadRecords(ValueError):
    """The bytes do not come from :func:`to_bytes`."""


def save(content: RecordDict, path: Path, *, durable: bool = True) -> None:
    """Write `content` to `path`; see `hfedatm_files.replacing` for `durable`."""
    with replacing(path, durable=durable) as temporary, temporary.open("wb") as file:
        file.writelines(_parts(content))


def load(path: Path) -> RecordDict:
    """Read a file that :func:`save` wrote; raises `BadRecords` for any other file."""
    with path.open("rb") as file:
        return _read(file, path.stat().st_size)


def to_bytes(content: RecordDict) -> bytes:
    """Return `content` as bytes."""
    return b"".join(_parts(content))


def from_bytes(data: bytes) -> RecordDict:
    """Read bytes that :func:`to_bytes` returned; raises `BadRecords` for any others."""
    return _read(BytesIO(data), len(data))


def content_bytes(content: RecordDict) -> int:
    """Return how many bytes all arrays in a message take."""
    records = content.values()
    return sum(record.count_bytes() for record in records if isinstance(record, ArrayRecord))


def _parts(content: RecordDict) -> list[bytes]:
    index, blobs = list[tuple[str, str, list[Any]]](), list[bytes]()
    for name, record in content.items():
        if isinstance(record, ArrayRecord):
            kind = "array"
            items: list[Any] = [
                (k, a.dtype, a.shape, a.stype, len(a.data)) for k, a in record.items()
            ]
            blobs += [array.data for array in record.values()]
        else:
            kind = "config" if isinstance(record, ConfigRecord) else "metric"
            items = [(key, _encode(value, blobs)) for key, value in record.items()]
        index.append((name, kind, items))
    text = json.dumps(index, separators=(",", ":")).encode()
    if len(text) > MOST_INDEX:
        raise ValueError(f"a message's index of {len(text)} bytes is longer than {MOST_INDEX}")
    parts = [len(text).to_bytes(4, "little"), text, *blobs]
    sum_ = 0
    for part in parts:
        sum_ = crc32(part, sum_)
    return [MAGIC, sum_.to_bytes(4, "little"), *parts]


def _encode(value: Any, blobs: list[bytes]) -> Any:
    if isinstance(value, list):
        return [_encode(each, blobs) for each in value]
    if isinstance(value, bytes):
        blobs.append(value)
        return {_BYTES: len(value)}
    return value


def _read(file: IO[bytes], size: int) -> RecordDict:
    try:
        return _Reader(file, size).content()
    except BadRecords:
        raise
    except Exception as error:  # errors of any class: anybody may have written the bytes
        raise BadRecords(f"{type(error).__name__}: {error}") from error


class _Reader:
    """Read a file from beginning to end, and never ask for more bytes than it has left."""

    def __init__(self, file: IO[bytes], size: int) -> None:
        self._file, self._left, self._sum = file, size, 0
        if self._take(len(MAGIC)) != MAGIC:
            raise BadRecords("it does not begin as a file of records does")
        self._expected = int.from_bytes(self._take(4), "little")
        self._sum = 0

    def content(self) -> RecordDict:
        """Return everything."""
        length = int.from_bytes(self._take(4), "little")
        if length > MOST_INDEX:
            raise BadRecords(f"its index of {length} bytes is longer than {MOST_INDEX}")
        text = self._take(length)
        if text.count(b"[") + text.count(b"{") > MOST_LISTS:
            raise BadRecords(f"its index has more than {MOST_LISTS} parts")
        content = RecordDict()
        for name, kind, items in json.loads(text, parse_constant=_number):
            if name in content:
                raise BadRecords("two records have one name")
            record = dict(self._arrays(items) if kind == "array" else self._plain(items))
            if len(record) != len(items):
                raise BadRecords("two parts of a record have one name")
            content[name] = ArrayRecord(record) if kind == "array" else _PLAIN[kind](record)
        if self._left:
            raise BadRecords(f"{self._left} bytes are left over")
        if self._sum != self._expected:
            raise BadRecords("its bytes are damaged: the checksum differs")
        return content

    def _arrays(self, items: list[Any]) -> Iterator[tuple[str, Array]]:
        for key, dtype, shape, stype, size in items:
            yield key, Array(dtype, tuple(shape), stype, self._take(size))

    def _plain(self, items: list[Any]) -> Iterator[tuple[str, Any]]:
        for key, value in items:
            yield key, self._decode(value)

    def _decode(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self._take(v[_BYTES]) if isinstance(v, dict) else v for v in value]
        return self._take(value[_BYTES]) if isinstance(value, dict) else value

    def _take(self, size: int) -> bytes:
        if type(size) is not int or not 0 <= size <= self._left:
            raise BadRecords(f"it ends too early, or a size in it is wrong: {size!r:.40}")
        self._left -= size
        data = self._file.read(size)
        if len(data) != size:
            raise BadRecords("it ends too early")
        self._sum = crc32(data, self._sum)
        return data


def _number(text: str) -> float:
    return float(text)  # NaN and Infinity are floats that a record may hold
