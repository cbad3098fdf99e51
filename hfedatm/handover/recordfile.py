"""A `RecordDict` as bytes: an uncompressed zip of raw array bytes and a JSON index.

Nothing in it is executable when read (no pickle), arrays come back bit for bit, and the zip's
checksums tell damaged bytes from good ones.
"""

from __future__ import annotations

import json
import os
from base64 import b64decode, b64encode
from pathlib import Path
from typing import IO, Any
from zipfile import ZIP_STORED, BadZipFile, ZipFile

from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict

_PLAIN = {"config": ConfigRecord, "metric": MetricRecord}


def save(content: RecordDict, path: Path) -> None:
    """Write `content` to `path`, so that a reader sees the whole file or none."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as file:
        write(content, file)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def load(path: Path) -> RecordDict:
    """Read what :func:`save` wrote."""
    with path.open("rb") as file:
        return read(file)


def write(content: RecordDict, file: IO[bytes]) -> None:
    """Write `content` to an open file."""
    with ZipFile(file, "w") as archive:
        index = []
        for number, (name, record) in enumerate(content.items()):
            if isinstance(record, ArrayRecord):
                arrays = [(key, a.dtype, a.shape, a.stype) for key, a in record.items()]
                for place, array in enumerate(record.values()):
                    archive.writestr(f"{number}/{place}", array.data)
                index.append((name, "array", arrays))
            else:
                kind = "config" if isinstance(record, ConfigRecord) else "metric"
                index.append((name, kind, list(record.items())))
        archive.writestr("index.json", json.dumps(index, default=_encode_bytes))


def read(file: IO[bytes]) -> RecordDict:
    """Read what :func:`write` wrote; what anybody else wrote takes no more memory than its size."""
    content = RecordDict()
    with ZipFile(file) as archive:
        if any(entry.compress_type != ZIP_STORED for entry in archive.infolist()):
            raise BadZipFile("it is compressed")
        # Records are lists of pairs, so the only JSON objects are encoded bytes.
        index = json.loads(archive.read("index.json"), object_hook=_decode_bytes)
        for number, (name, kind, items) in enumerate(index):
            if kind == "array":
                content[name] = ArrayRecord(
                    {
                        key: Array(dtype, tuple(shape), stype, archive.read(f"{number}/{place}"))
                        for place, (key, dtype, shape, stype) in enumerate(items)
                    }
                )
            else:
                content[name] = _PLAIN[kind](dict(items))
    return content


def content_bytes(content: RecordDict) -> int:
    """Bytes of all arrays in a message."""
    records = content.values()
    return sum(record.count_bytes() for record in records if isinstance(record, ArrayRecord))


def _encode_bytes(value: Any) -> dict[str, str]:
    if not isinstance(value, bytes):
        raise TypeError(f"a record cannot hold a value of type {type(value).__name__}")
    return {"base64": b64encode(value).decode("ascii")}


def _decode_bytes(value: dict[str, str]) -> bytes:
    return b64decode(value["base64"])
