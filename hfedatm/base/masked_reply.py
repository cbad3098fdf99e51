"""A client's reply as one vector whose sum over clients gives their mean reply.

With n examples, the vector is n, then n times every number that is averaged by examples (weights,
shared arrays, loss), then the Grams times their weight. What it is made of, the layout, is no
secret; its numbers are.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

import numpy as np
import numpy.typing as npt
import torch
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from hfedatm.base.records import (
    BadReply,
    arrays_to_record,
    grams_to_record,
    record_to_arrays,
    record_to_grams,
)
from hfedatm_core.grams.by_layer import distinct
from hfedatm_core.grams.gram import PackedGram

Vector = npt.NDArray[np.float64]
IN_THE_CLEAR = ("epsilon", "seconds", "gram-seconds")
"""Metrics that say nothing about the data beyond the number of examples."""


@dataclass(frozen=True)
class ReplyLayout:
    """What a reply's vector is made of, in order.

    Attributes
    ----------
    metrics
        Names of the numbers averaged by examples.
    arrays
        Record, name, type and shape of the arrays averaged by examples.
    grams
        The layers of each distinct Gram, and its dimension.
    """

    metrics: list[str]
    arrays: list[tuple[str, str, str, list[int]]]
    grams: list[tuple[list[str], int]]

    def to_record(self) -> ConfigRecord:
        """Return the wire form."""
        return ConfigRecord({"layout": json.dumps(asdict(self))})

    @classmethod
    def from_record(cls, record: ConfigRecord) -> ReplyLayout:
        """Read the wire form."""
        try:
            fields = json.loads(str(record["layout"]))
            return cls(
                [str(name) for name in fields["metrics"]],
                [
                    (str(r), str(n), str(np.dtype(d)), list(map(int, s)))
                    for r, n, d, s in fields["arrays"]
                ],
                [(list(map(str, layers)), int(dim)) for layers, dim in fields["grams"]],
            )
        except (ValueError, TypeError, KeyError) as error:
            raise BadReply(f"the layout of the masked reply is not readable: {error}") from error

    @property
    def gram_size(self) -> int:
        """Numbers that belong to Grams."""
        return sum(dim * (dim + 1) // 2 for _, dim in self.grams)

    @property
    def size(self) -> int:
        """Length of the vector."""
        arrays = sum(int(np.prod(shape)) for *_, shape in self.arrays)
        return 1 + len(self.metrics) + arrays + self.gram_size


def flatten(reply: RecordDict, gram_weights: str) -> tuple[ReplyLayout, Vector]:
    """Return a reply's layout and vector."""
    metrics = dict(reply["metrics"])
    examples = float(metrics.pop("num-examples"))
    averaged = sorted(name for name in metrics if name not in IN_THE_CLEAR)
    arrays: list[tuple[str, str, str, list[int]]] = []
    parts = [np.array([examples]), np.array([metrics[n] * examples for n in averaged])]
    for key in sorted(reply):
        record = reply[key]
        if not isinstance(record, ArrayRecord) or key == "grams":
            continue
        for name, value in record_to_arrays(record).items():
            arrays.append((key, name, str(value.dtype), list(value.shape)))
            parts.append(value.astype(np.float64).ravel() * examples)
    grams = []
    if "grams" in reply:
        weight = examples if gram_weights == "examples" else 1.0
        for layers, gram in distinct(record_to_grams(reply["grams"])).items():
            assert isinstance(gram, PackedGram), "factors are refused before round 1"
            grams.append((list(layers), gram.dim))
            parts.append(gram.triangle.double().numpy() * weight)
    return ReplyLayout(averaged, arrays, grams), np.concatenate(parts)


def mean_reply(layout: ReplyLayout, total: Vector, clients: int, gram_weights: str) -> RecordDict:
    """Return the reply that stands for all clients of a sum; `BadReply` if the sum is not sound.

    A mask that was left in the sum makes a whole number of examples all but impossible.
    """
    examples = float(total[0])
    if examples != round(examples) or not clients <= examples < 1e12:
        raise BadReply(f"the secure sum is spoilt: it counts {examples:.6g} examples")
    values = _Reader(total[1:])
    metrics = {name: float(values.take(1)[0]) / examples for name in layout.metrics}
    records: dict[str, dict[str, np.ndarray]] = {}
    for key, name, dtype, shape in layout.arrays:
        mean = values.take(int(np.prod(shape))).reshape(shape) / examples
        whole = np.issubdtype(np.dtype(dtype), np.integer)
        records.setdefault(key, {})[name] = (np.rint(mean) if whole else mean).astype(dtype)
    reply = RecordDict({key: arrays_to_record(arrays) for key, arrays in records.items()})
    weight = examples if gram_weights == "examples" else float(clients)
    grams = {}
    for layers, dim in layout.grams:
        triangle = torch.from_numpy(values.take(dim * (dim + 1) // 2) / weight)
        grams |= dict.fromkeys(layers, PackedGram(triangle.float(), int(examples)))
    if grams:
        reply["grams"] = grams_to_record(grams)
    reply["metrics"] = MetricRecord(
        {**metrics, "num-examples": int(examples), "num-clients": clients}
    )
    return reply


class _Reader:
    def __init__(self, values: Vector) -> None:
        self._values, self._at = values, 0

    def take(self, count: int) -> Vector:
        self._at += count
        return self._values[self._at - count : self._at]
