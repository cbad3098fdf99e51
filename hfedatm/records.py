"""What travels between tiers, and the checks on what arrives.

A message carries a ``task`` (what to do, with the run's settings), a ``model`` and, for some
methods, ``shared`` arrays. A reply carries a ``model``, ``grams``, ``metrics`` and, from a station,
the ``failures`` of its clients; or a ``failure`` that says why there is nothing else. Nothing is
ever unpickled, and nothing that fails a check reaches a sum.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict

from hfedatm.handover.recordfile import content_bytes
from hfedatm.npy import read_array, write_array
from hfedatm.settings import Settings
from hfedatm_core.arrays import is_finite
from hfedatm_core.gram import FactorGram, Gram
from hfedatm_core.sharing import pack_grams, unpack_grams

State = dict[str, torch.Tensor]
R = TypeVar("R", ArrayRecord, ConfigRecord, MetricRecord)


class BadReply(Exception):
    """A node's reply cannot be used; the message says why."""


@dataclass(frozen=True)
class Task:
    """What a node is asked to do."""

    kind: Literal["prepare", "train", "measure", "evaluate"]
    settings: Settings
    round: int
    station: int = -1
    station_round: int = 0
    client: int = -1
    send_grams: bool = False
    run: str = "run"

    def to_record(self) -> ConfigRecord:
        """Return the wire form."""
        return ConfigRecord({**self.__dict__, "settings": _write_settings(self.settings)})

    @classmethod
    def from_record(cls, record: ConfigRecord) -> Task:
        """Read the wire form; the settings are validated again."""
        given: dict[str, Any] = dict(record)
        return cls(**{**given, "settings": _read_settings(given["settings"])})

    def but(self, **changes: Any) -> Task:
        """Return this task with some fields changed."""
        return replace(self, **changes)


@lru_cache(maxsize=4)
def _write_settings(settings: Settings) -> str:
    """Return the wire form; a station writes the same settings for every client."""
    return settings.model_dump_json(by_alias=True)


@lru_cache(maxsize=4)
def _read_settings(text: str) -> Settings:
    """Check and read the wire form; a process that serves many clients does so once."""
    return Settings.model_validate_json(text)


@dataclass(frozen=True)
class Failure:
    """A node that was left out of a round, and why."""

    node: str
    reason: str

    def to_dict(self) -> dict[str, str]:
        """Return plain data."""
        return asdict(self)


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


def grams_to_record(grams: Mapping[str, Gram], dtype: str = "float32") -> ArrayRecord:
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
    return dict(zip(record["names"], record["widths"], strict=True))  # type: ignore[arg-type]


def failures_to_record(failures: Iterable[Failure]) -> ConfigRecord:
    """Wrap failures."""
    listed = list(failures)
    return ConfigRecord({"nodes": [f.node for f in listed], "reasons": [f.reason for f in listed]})


def record_to_failures(record: ConfigRecord) -> list[Failure]:
    """Unwrap failures."""
    nodes, reasons = record.get("nodes", []), record.get("reasons", [])
    return [Failure(str(node), str(reason)) for node, reason in zip(nodes, reasons, strict=False)]  # type: ignore[arg-type]


# --- unpacking what arrived


def find_record(content: RecordDict, key: str, kind: type[R]) -> R | None:
    """Return one record of a message, if it is there and of this kind.

    Not by ``content.array_records``: each use of that leaves a reference cycle behind, which keeps
    the whole message in memory until the garbage collector happens to run.
    """
    record = content.get(key)
    return record if isinstance(record, kind) else None


def open_reply(message: Message, max_mb: float) -> RecordDict:
    """Return the content of a reply, or raise `BadReply` with the node's reason."""
    if message.has_error():
        raise BadReply(message.error.reason or f"Flower error {message.error.code}")
    content = message.content
    if failure := find_record(content, "failure", ConfigRecord):
        raise BadReply(str(failure.get("reason", "unknown error")))
    size = content_bytes(content)
    if size > max_mb * 1e6:
        raise BadReply(f"reply of {size / 1e6:.1f} MB is larger than max-reply-mb = {max_mb:g}")
    return content


def open_state(
    content: RecordDict, reference: Mapping[str, torch.Tensor], key: str = "model"
) -> State:
    """Return the model in a reply after checking keys, shapes, types and finiteness."""
    record = find_record(content, key, ArrayRecord)
    if record is None:
        raise BadReply(f"reply has no '{key}' arrays")
    missing, extra = reference.keys() - record.keys(), record.keys() - reference.keys()
    if missing or extra:
        raise BadReply(f"{key}: missing tensors {sorted(missing)}, unknown tensors {sorted(extra)}")
    state: State = {}
    for name, expected in reference.items():
        tensor = _read(name, record[name])
        if tensor.shape != expected.shape:
            raise BadReply(
                f"{key}: {name} has shape {tuple(tensor.shape)}, not {tuple(expected.shape)}"
            )
        if tensor.dtype != expected.dtype:
            raise BadReply(f"{key}: {name} has type {tensor.dtype}, not {expected.dtype}")
        if not is_finite(tensor):
            raise BadReply(f"{key}: {name} has values that are not finite")
        state[name] = tensor
    return state


def _read(name: str, array: Array) -> torch.Tensor:
    try:
        value = read_array(array)
        if tuple(value.shape) != tuple(array.shape):
            raise ValueError(f"says shape {array.shape} but carries {value.shape}")
        return torch.from_numpy(value)
    except Exception as error:  # whatever a hostile or broken node put there
        raise BadReply(f"{name} cannot be read: {error}") from error


def open_grams(content: RecordDict, layers: Mapping[str, int], max_dim: int) -> dict[str, Gram]:
    """Return the Grams in a reply.

    ``layers`` maps each expected layer to its width; those above ``max_dim`` come as factors.
    """
    record = find_record(content, "grams", ArrayRecord)
    if record is None:
        raise BadReply("reply has no 'grams' arrays")
    try:
        grams = record_to_grams(record)
    except Exception as error:
        raise BadReply(f"grams cannot be read: {error}") from error
    missing, extra = layers.keys() - grams.keys(), grams.keys() - layers.keys()
    if missing or extra:
        raise BadReply(f"grams: missing layers {sorted(missing)}, unknown layers {sorted(extra)}")
    for name, width in layers.items():
        if grams[name].dim != width:
            raise BadReply(f"grams: {name} is {grams[name].dim} wide, not {width}")
        if isinstance(grams[name], FactorGram) != (width > max_dim):
            raise BadReply(f"grams: {name} has the wrong form for gram-max-dim = {max_dim}")
    return grams


def open_metrics(
    content: RecordDict,
    counts: Iterable[str] = ("num-examples",),
    needed: Iterable[str] = (),
    most: float = 1e12,
) -> dict[str, float]:
    """Return the metrics of a reply; ``counts`` must be there and be whole numbers up to ``most``.

    A count is a weight in a mean: whoever may claim any number decides the mean alone.
    """
    record = find_record(content, "metrics", MetricRecord)
    if record is None:
        raise BadReply("reply has no 'metrics'")
    metrics: dict[str, float] = {}
    for name, value in record.items():
        if not isinstance(value, int | float) or not math.isfinite(value):
            raise BadReply(f"metrics: {name} = {value!r} is not a finite number")
        metrics[name] = value
    for name in counts:
        count = metrics.get(name)
        if count is None or count != int(count) or not 0 < count <= most:
            raise BadReply(
                f"metrics: {name} = {count!r} is not a plausible count (1 to {most:g}; a client's "
                "limit is max-examples)"
            )
    missing = [name for name in needed if name not in metrics]
    if missing:
        raise BadReply(f"metrics: {', '.join(missing)} missing")
    return metrics


def open_scores(content: RecordDict, loss: str = "loss") -> dict[str, float]:
    """Return the metrics of an evaluation, in all and by domain; there may be no examples."""
    metrics = open_metrics(content, counts=(), needed=("correct", "num-examples", loss))
    for name, count in metrics.items():
        if name.startswith("num-examples"):
            correct = metrics.get(name.replace("num-examples", "correct"), -1.0)
            if not 0 <= correct <= count < 1e12:
                raise BadReply(f"metrics: {correct:g} of {name} = {count:g} cannot be correct")
    return metrics


def take_each(
    replies: Iterable[Message], take: Callable[[Message], None], kind: str
) -> list[Failure]:
    """Hand each reply to ``take``; whoever it refuses with `BadReply` is returned as a failure."""
    failures = []
    for reply in replies:
        try:
            take(reply)
        except BadReply as error:
            failures.append(Failure(f"{kind} {reply.metadata.src_node_id}", str(error)))
    return failures
