"""Messages between tiers, and their wire form.

A message carries a ``task`` (what to do, with the run's settings), a ``model`` and, for some
methods, ``shared`` arrays. A reply carries a ``model``, ``grams``, ``statistics`` of BatchNorms,
``answers`` about layers, ``metrics`` and, from a station, the ``failures`` of its clients; or only
a ``failure`` with the reason. Nothing is ever unpickled. `hfedatm.base.wire` reads replies and
takes nothing in them for granted.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal, TypeVar, get_args

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from pydantic import ValidationError

from hfedatm.base.npy import read_array, write_array
from hfedatm.base.round_record import Failure
from hfedatm.base.settings import Settings
from hfedatm.base.text import printable
from hfedatm.base.tiers import DEEPEST
from hfedatm_core.grams.by_layer import pack_grams, unpack_grams
from hfedatm_core.grams.encoding import WireType
from hfedatm_core.grams.gram import Gram
from hfedatm_core.tensors import State

Kind = Literal["prepare", "train", "measure", "refine", "look", "evaluate", "count"]
R = TypeVar("R", ArrayRecord, ConfigRecord, MetricRecord)

MOST_FAILURES = 64
"""Most failures that a reply lists; further ones are only counted."""
MOST_PATH = 160
"""Most characters of a node's path in a failure."""
_RUN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_MOST_SETTINGS = 100_000  # characters
_NUMBERS = {  # field of a task -> its smallest and largest value
    "round": range(2**31),
    "station_round": range(2**31),
    # A node without a place in the tree is identified by Flower's node id.
    "station": range(-1, 2**64),
    "client": range(-1, 2**64),
    # How often a client has trained in this station round (the rule fedhisyn).
    "hop": range(1000),
    "level": range(1, DEEPEST),
}


class BadReply(Exception):
    """A node's reply cannot be used; the message says why."""


class BadTask(ValueError):
    """A task cannot be read; the message says why."""


@dataclass(frozen=True)
class Task:
    """The work that a node is asked to do.

    ``level`` is the level of the asked station in the tree, or of the station that asks a client.
    To a station, ``station_round`` is the number of its station rounds that this global round has
    already had.
    """

    kind: Kind
    settings: Settings
    round: int
    station: int = -1
    station_round: int = 0
    client: int = -1
    send_grams: bool = False
    run: str = "run"
    hop: int = 0
    level: int = 1

    def to_record(self) -> ConfigRecord:
        """Return the wire form."""
        return ConfigRecord({**self.__dict__, "settings": _write_settings(self.settings)})

    @classmethod
    def from_record(cls, record: Any) -> Task:
        """Read the wire form; raises `BadTask` unless every field is present and in its range."""
        if not isinstance(record, ConfigRecord):
            raise BadTask("the message has no task")
        given: dict[str, Any] = dict(record)
        fields = cls.__dataclass_fields__.keys()
        if given.keys() != fields:
            wrong = sorted(given.keys() ^ fields)[:5]
            raise BadTask(f"task: its fields differ from this version's in {printable(wrong)}")
        for name, allowed in _NUMBERS.items():
            if type(given[name]) is not int or given[name] not in allowed:
                raise BadTask(f"task: {name} = {printable(given[name], 40)} is not plausible")
        if given["kind"] not in get_args(Kind) or type(given["send_grams"]) is not bool:
            raise BadTask(f"task: kind or send_grams is unknown: {printable(given['kind'], 40)}")
        # The run's name becomes the name of a folder.
        if type(given["run"]) is not str or not _RUN.fullmatch(given["run"]):
            raise BadTask(f"task: run = {printable(given['run'], 40)!r} is not a valid run name")
        text = given["settings"]
        if type(text) is not str or len(text) > _MOST_SETTINGS:
            raise BadTask("task: its settings are not text, or too long")
        return cls(**{**given, "settings": _read_settings(text)})

    def but(self, **changes: Any) -> Task:
        """Return this task with some fields changed."""
        return replace(self, **changes)


@lru_cache(maxsize=4)
def _write_settings(settings: Settings) -> str:
    """Return the wire form, cached: a station writes the same settings for every client."""
    return settings.model_dump_json(by_alias=True)


@lru_cache(maxsize=4)
def _read_settings(text: str) -> Settings:
    """Check and read the wire form, cached: a process that serves many clients reads it once."""
    try:
        return Settings.model_validate_json(text)
    except ValidationError as error:
        raise BadTask(printable(f"task: its settings are not valid: {error}")) from None


# --- packing


def arrays_to_record(arrays: Mapping[str, np.ndarray]) -> ArrayRecord:
    """Wrap named numpy arrays."""
    return ArrayRecord({name: write_array(value) for name, value in arrays.items()})


def record_to_arrays(record: ArrayRecord) -> dict[str, np.ndarray]:
    """Unwrap named numpy arrays."""
    return {name: read_array(array) for name, array in record.items()}


def state_to_record(state: Mapping[str, torch.Tensor]) -> ArrayRecord:
    """Wrap a state dict."""
    return ArrayRecord(
        {name: write_array(tensor.detach().cpu().numpy()) for name, tensor in state.items()}
    )


def record_to_state(record: ArrayRecord) -> State:
    """Unwrap a state dict."""
    return {name: torch.from_numpy(read_array(array)) for name, array in record.items()}


def grams_to_record(grams: Mapping[str, Gram], dtype: WireType = "float32") -> ArrayRecord:
    """Wrap Gram matrices; a Gram that several layers share is stored once."""
    return arrays_to_record(pack_grams(grams, dtype=dtype))


def record_to_grams(record: ArrayRecord) -> dict[str, Gram]:
    """Unwrap Gram matrices."""
    return unpack_grams(record_to_arrays(record))


def layers_to_record(layers: Mapping[str, int]) -> ConfigRecord:
    """Wrap the names and widths of the layers that need a Gram."""
    return ConfigRecord({"names": list(layers), "widths": list(layers.values())})


def record_to_layers(record: ConfigRecord) -> dict[str, int]:
    """Unwrap the names and widths of the layers that need a Gram."""
    names, widths = record.get("names"), record.get("widths")
    if not (isinstance(names, list) and isinstance(widths, list)) or len(names) != len(widths):
        raise BadTask("layers: 'names' and 'widths' must be lists of one length")
    layers = dict(zip(names, widths, strict=True))
    if len(layers) != len(names) or not all(
        type(name) is str and type(width) is int and 1 <= width < 2**31
        for name, width in layers.items()
    ):
        raise BadTask("layers: each needs a name of its own and a width")
    return layers  # type: ignore[return-value]


def failures_to_record(failures: Iterable[Failure]) -> ConfigRecord:
    """Wrap failures."""
    listed = list(failures)
    some = listed[:MOST_FAILURES]
    return ConfigRecord(
        {
            "nodes": [printable(f.node) for f in some],
            "reasons": [printable(f.reason) for f in some],
            "total": len(listed),
        }
    )


def record_to_failures(record: ConfigRecord) -> list[Failure]:
    """Unwrap failures; raises `BadReply` for malformed lists."""
    nodes, reasons = record.get("nodes", []), record.get("reasons", [])
    if not (isinstance(nodes, list) and isinstance(reasons, list)) or len(nodes) != len(reasons):
        raise BadReply("failures: 'nodes' and 'reasons' must be lists of one length")
    some = list(zip(nodes, reasons, strict=True))[:MOST_FAILURES]
    if not all(isinstance(text, str) for pair in some for text in pair):
        raise BadReply("failures: 'nodes' and 'reasons' must be text")
    failures = [
        Failure(node=printable(node, MOST_PATH), reason=printable(reason)) for node, reason in some
    ]
    total = record.get("total", len(nodes))
    if type(total) is not int or not len(some) <= total < 2**31:
        raise BadReply(f"failures: a total of {printable(total, 40)} is not plausible")
    if total > len(some):
        unlisted = f"{total - len(some)} more failures are not listed"
        failures.append(Failure(node="others", reason=unlisted))
    return failures


# --- finding the records of a message


def find_record(content: RecordDict, key: str, kind: type[R]) -> R | None:
    """Return one record of a message; None if it is missing or of another kind.

    This does not use ``content.array_records``: each use leaves a reference cycle behind, which
    keeps the whole message in memory until the garbage collector happens to run.
    """
    record = content.get(key)
    return record if isinstance(record, kind) else None


def need_record(content: RecordDict, key: str, kind: type[R]) -> R:
    """Return one record of a message; raises `BadTask` if it is missing or of another kind."""
    record = find_record(content, key, kind)
    if record is None:
        raise BadTask(f"the message has no {kind.__name__} {key!r}")
    return record
