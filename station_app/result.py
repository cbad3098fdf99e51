"""The outcome of a station's job."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from flwr.app import ArrayRecord, MetricRecord, RecordDict

from hfedatm.base.records import failures_to_record
from hfedatm.base.round_record import Failure


@dataclass(frozen=True)
class StationResult:
    """A station's answer to the server, as a value.

    Attributes
    ----------
    metrics
        Numbers for the server.
    arrays
        The requested arrays by the name of their record: ``model``, ``grams``, ``shared``,
        ``answers``, ``statistics`` or ``counts``.
    failures, cuts
        Clients that were left out, and clients whose update was cut back.
    """

    metrics: Mapping[str, Any]
    arrays: Mapping[str, ArrayRecord] = field(default_factory=dict)
    failures: Iterable[Failure] = ()
    cuts: Iterable[Failure] = ()

    def to_content(self, seconds: float) -> RecordDict:
        """Return the wire form; ``seconds`` is how long the job took."""
        return RecordDict(
            {
                **self.arrays,
                "metrics": MetricRecord({**self.metrics, "seconds": seconds}),
                "failures": failures_to_record(self.failures),
                "cuts": failures_to_record(self.cuts),
            }
        )


def grouped(failures: Iterable[Failure], most: int = 5) -> list[str]:
    """Return every reason once, with the clients that gave it: all may give the same one."""
    nodes: dict[str, list[str]] = {}
    for failure in failures:
        nodes.setdefault(failure.reason, []).append(failure.node)
    return [f"{', '.join(who[:most])}: {reason}" for reason, who in list(nodes.items())[:most]]


def below(station: str, failure: Failure) -> Failure:
    """Return a failure that a station reports, under the path of its node."""
    return Failure(node=f"{station}, {failure.node}", reason=failure.reason)
