"""A client's reply as one vector whose sum over clients gives their mean reply.

With n examples, the vector is n, then n times every number that is averaged by examples (loss,
weights, shared arrays), then the weight of the Grams and the Grams times it. This weight is the
number of examples that the *Grams* were made of (``gram-batches``): with any other weight, an
example would count for more than its clip and the noise for less than was agreed. The layout of the
vector is no secret; its numbers are.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from hfedatm.base.errors import UserError
from hfedatm.base.privacy_settings import gram_examples
from hfedatm.base.records import (
    BadReply,
    arrays_to_record,
    grams_to_record,
    need_record,
    record_to_arrays,
    record_to_grams,
)
from hfedatm.base.settings import Settings
from hfedatm_core.grams.by_layer import distinct
from hfedatm_core.grams.gram import Gram, PackedGram
from hfedatm_core.secagg import FixedPoint

_WHOLE = 2.0**-24
Vector = npt.NDArray[np.float64]
Groups = tuple[tuple[str, ...], ...]
IN_THE_CLEAR = ("epsilon", "seconds", "gram-seconds")
"""Metrics that reveal nothing about the data beyond the number of examples."""


@dataclass(frozen=True)
class ReplyLayout:
    """The parts of a reply's vector, in order.

    Attributes
    ----------
    metrics
        Names of the numbers averaged by examples.
    arrays
        Record, name, type and shape of the arrays averaged by examples.
    grams
        The layers of each distinct Gram, and its dimension.
    """

    metrics: tuple[str, ...]
    arrays: tuple[tuple[str, str, str, tuple[int, ...]], ...]
    grams: tuple[tuple[tuple[str, ...], int], ...]

    @classmethod
    def expected(
        cls,
        metrics: Iterable[str],
        record: str,
        arrays: Mapping[str, torch.Tensor],
        layers: Mapping[str, int],
        groups: Groups,
    ) -> ReplyLayout:
        """Return the layout of the reply that a station expects.

        The model decides which layers share a Gram, so clients report the ``groups``. Each layer
        must be in exactly one group, and the layers of a group must have one width.
        """
        if sorted(name for group in groups for name in group) != sorted(layers):
            raise BadReply("its Grams are not of exactly the layers that were asked for")
        for group in groups:
            if len({layers[name] for name in group}) != 1:
                raise BadReply(f"layers of different widths cannot share a Gram: {group[:5]}")
        named = (
            (record, name, str(value.dtype).removeprefix("torch."), tuple(value.shape))
            for name, value in sorted(arrays.items())
        )
        grams = ((group, layers[group[0]]) for group in groups)
        return cls(tuple(sorted(metrics)), tuple(named), tuple(grams))

    def to_record(self) -> ConfigRecord:
        """Return a client's description of its vector: layers that share a Gram, and a hash."""
        groups = json.dumps([list(layers) for layers, _ in self.grams])
        return ConfigRecord({"groups": groups, "digest": self.digest})

    @property
    def digest(self) -> str:
        """Return a hash that tells two layouts apart."""
        return hashlib.sha256(json.dumps(asdict(self)).encode()).hexdigest()

    @property
    def gram_size(self) -> int:
        """How many numbers of the vector belong to Grams."""
        return sum(dim * (dim + 1) // 2 for _, dim in self.grams)

    @property
    def size(self) -> int:
        """Length of the vector."""
        return sum(count for _, count in self.parts())

    def parts(self) -> Iterator[tuple[str, int]]:
        """Yield the parts of the vector in order, each with its length."""
        yield "the number of examples", 1
        for name in self.metrics:
            yield f"{name!r} times the examples", 1
        for _, name, _, shape in self.arrays:
            yield f"{name!r} times the examples", math.prod(shape)
        if self.grams:
            yield "the weight of the Grams", 1
        for layers, dim in self.grams:
            yield f"the Gram of {layers[0]!r} times its weight", dim * (dim + 1) // 2


def read_groups(record: object) -> tuple[Groups, str]:
    """Read a record of `ReplyLayout.to_record`; raises `BadReply` for any other."""
    try:
        text, digest = record["groups"], record["digest"]  # type: ignore[index]
        table = json.loads(text)
    except (TypeError, KeyError, ValueError, RecursionError):
        raise BadReply("it does not say what its masked reply is made of") from None
    if not isinstance(table, list) or not all(
        isinstance(group, list) and group and all(isinstance(name, str) for name in group)
        for group in table
    ):
        raise BadReply("it does not say which layers share a Gram")
    return tuple(tuple(group) for group in table), str(digest)


def flatten(
    reply: RecordDict, settings: Settings, metrics: Iterable[str] = ("loss",)
) -> tuple[ReplyLayout, Vector]:
    """Return a reply's layout and vector; ``metrics`` says which numbers are averaged."""
    known: dict[str, Any] = dict(reply["metrics"])
    examples = float(known["num-examples"])
    averaged = tuple(sorted(metrics))
    if missing := [name for name in averaged if name not in known]:
        raise UserError(f"the station asks for numbers this client does not have: {missing[:5]}")
    arrays: list[tuple[str, str, str, tuple[int, ...]]] = []
    parts = [np.array([examples]), np.array([known[name] * examples for name in averaged])]
    for key in sorted(reply):
        record = reply[key]
        if not isinstance(record, ArrayRecord) or key == "grams":
            continue
        for name, value in sorted(record_to_arrays(record).items()):
            arrays.append((key, name, str(value.dtype), tuple(value.shape)))
            parts.append(value.astype(np.float64).ravel() * (examples * _unit(value.dtype)))
    grams = []
    if "grams" in reply:
        by_examples = settings.gram_weights == "examples"
        weight = float(gram_examples(settings, int(examples))) if by_examples else 1.0
        parts.append(np.array([weight]))
        sent = record_to_grams(need_record(reply, "grams", ArrayRecord))
        for layers, gram in distinct(sent).items():
            assert isinstance(gram, PackedGram), "factors are refused before round 1"
            grams.append((tuple(layers), gram.dim))
            parts.append(gram.triangle.double().numpy() * weight)
    return ReplyLayout(averaged, tuple(arrays), tuple(grams)), np.concatenate(parts)


def check_range(layout: ReplyLayout, vector: Vector, clients: int) -> None:
    """Raise `UserError` that names the number that a secure sum of so many clients cannot hold."""
    limit = FixedPoint().limit(clients)
    at = 0
    for name, count in layout.parts():
        part = vector[at : at + count]
        at += count
        largest = float(np.abs(part).max(initial=0.0))
        if not largest < limit - 1:
            raise UserError(
                f"secure-aggregation: {name} is {largest:.4g}, and a secure sum of {clients} "
                f"clients has room for numbers up to {limit:.4g}. Has training diverged? "
                "Otherwise normalise the inputs, or give each client fewer examples"
            )


def mean_reply(layout: ReplyLayout, total: Vector, clients: int) -> RecordDict:
    """Return the mean reply of all clients in a sum; raises `BadReply` if the sum is not sound.

    If a mask is left in the sum, a whole number of examples is all but impossible. A single
    client's vector cannot be checked, only the mean.
    """
    examples = float(total[0])
    if examples != round(examples) or not clients <= examples < 1e12:
        raise BadReply(f"the secure sum is spoilt: it counts {examples:.6g} examples")
    values = _Reader(total[1:])
    metrics = {name: float(values.take(1)[0]) / examples for name in layout.metrics}
    records: dict[str, dict[str, np.ndarray]] = {}
    for key, name, dtype, shape in layout.arrays:
        mean = values.take(math.prod(shape)).reshape(shape) / examples
        records.setdefault(key, {})[name] = _narrow(mean, np.dtype(dtype), name)
    reply = RecordDict({key: arrays_to_record(arrays) for key, arrays in records.items()})
    weight = float(values.take(1)[0]) if layout.grams else 1.0
    if weight != round(weight) or not 1 <= weight <= examples:
        raise BadReply(f"the secure sum is spoilt: its Grams weigh {weight:.6g}")
    grams: dict[str, Gram] = {}
    for layers, dim in layout.grams:
        triangle = torch.from_numpy(values.take(dim * (dim + 1) // 2) / weight)
        grams |= dict.fromkeys(layers, PackedGram(triangle.float(), int(examples)))
    if grams:
        reply["grams"] = grams_to_record(grams)
    reply["metrics"] = MetricRecord(
        {**metrics, "num-examples": int(examples), "num-clients": clients}
    )
    return reply


def _unit(dtype: np.dtype[Any]) -> float:
    """Return the number that stands for 1 in the vector: integers need no fraction, but more room.

    BatchNorm counts all batches of the run. Multiplied by the examples, this count exceeds what the
    fixed point of the sum can hold beside its fraction.
    """
    return 1.0 if dtype.kind == "f" else _WHOLE


def _narrow(mean: Vector, dtype: np.dtype[Any], name: str) -> np.ndarray:
    """Return a mean in the type that the tensor has in the model."""
    if dtype.kind == "f":
        return mean.astype(dtype)
    whole = np.rint(mean / _WHOLE)
    low, high = (0, 1) if dtype.kind == "b" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
    if whole.size and not (low <= whole.min() and whole.max() <= high):
        raise BadReply(f"the secure sum is spoilt: {name!r} is {whole.max():.6g}")
    return whole.astype(dtype)


class _Reader:
    def __init__(self, values: Vector) -> None:
        self._values, self._at = values, 0

    def take(self, count: int) -> Vector:
        self._at += count
        return self._values[self._at - count : self._at]
