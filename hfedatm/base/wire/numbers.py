"""Read the numbers of a reply: they are bounded before they are converted."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping

from flwr.app import MetricRecord, RecordDict

from hfedatm.base.records import BadReply, find_record
from hfedatm.base.text import printable
from hfedatm.base.tiers import DEEPEST

Metrics = dict[str, float]

LARGEST = 1e15
"""Largest number of a reply; integers up to this size are exact."""
LARGEST_LOSS = 1e9
"""Largest mean loss; a model beyond it has diverged, and sums of losses up to it stay finite."""
LONGEST = 1e9
"""Longest duration that a reply may claim, in seconds."""
MOST_METRICS = 64
MOST_SCORES = 512
"""Most numbers of an evaluation, which has two for each domain."""
MOVED = "channels-moved"
"""Channels that a station of stations has moved, itself or below."""
STATION_BYTES = "station-bytes-up"
"""Bytes that the stations below a station have sent to their parents."""
ANSWERED = "stations-at-"
"""Beginning of the names under which it counts the stations of a level that answered."""
BY_STATIONS = (MOVED, STATION_BYTES, *(f"{ANSWERED}{level}" for level in range(2, DEEPEST)))
"""Numbers that only stations of stations report."""
_AMOUNTS = {
    **dict.fromkeys(("seconds", "gram-seconds"), LONGEST),
    **dict.fromkeys(("epsilon", "bytes-up", "gram-bytes-up", *BY_STATIONS), LARGEST),
}
"""Numbers that must not be negative, and their largest values."""
_NAME = re.compile(r"\w[\w .,:/+()=@&'-]{0,99}")


def read_metrics(content: RecordDict, most: int = MOST_METRICS) -> Metrics:
    """Return the numbers of a reply by name."""
    record = find_record(content, "metrics", MetricRecord)
    if record is None:
        raise BadReply("reply has no 'metrics'")
    if len(record) > most:
        raise BadReply(f"metrics: {len(record)} of them, more than {most}")
    metrics: Metrics = {}
    for name, value in record.items():
        if not is_name(name):
            raise BadReply(f"metrics: {printable(name, 60)!r} is not a valid name")
        if type(value) not in (int, float) or not -LARGEST <= value <= LARGEST:  # type: ignore[operator]
            raise BadReply(
                f"metrics: {name} = {printable(value, 40)} is not a finite number within ±1e15"
            )
        metrics[name] = value  # type: ignore[assignment]
    for name, largest in _AMOUNTS.items():
        if not 0 <= metrics.get(name, 0) <= largest:
            raise BadReply(f"metrics: {name} = {metrics[name]:g} is not plausible")
    return metrics


def is_name(name: str) -> bool:
    """Return whether a number may have this name."""
    return _NAME.fullmatch(name) is not None


def need(metrics: Mapping[str, float], names: Iterable[str]) -> None:
    """Refuse metrics that lack one of these names."""
    if missing := [name for name in names if name not in metrics]:
        raise BadReply(f"metrics: {', '.join(missing)} missing")


def count(metrics: Mapping[str, float], name: str, most: int, least: int = 1) -> int:
    """Return a whole number in a range.

    A count is a weight in a mean: a node that could claim any count would decide the mean alone.
    """
    value = metrics.get(name)
    if value is None or value != int(value) or not least <= value <= most:
        raise BadReply(
            f"metrics: {name} = {value!r} is not a plausible count ({least} to {most:g}; "
            "a client's limit is max-examples)"
        )
    return int(value)


def read_counts(metrics: Mapping[str, float], most: int, graded: bool = False) -> Metrics:
    """Return the counts of an evaluation, in all and by domain, after checking that they add up.

    There may be no examples at all. ``correct`` counts right answers; a ``graded`` task gives each
    example a score from 0 to 1, and ``correct`` is their sum.
    """
    need(metrics, ("correct", "num-examples"))
    counts: Metrics = {}
    for name in metrics:
        if name == "num-examples" or name.startswith("num-examples/"):
            right = name.replace("num-examples", "correct", 1)
            counts[name] = float(count(metrics, name, most, least=0))
            counts[right] = (
                _score_sum(metrics, right, counts[name])
                if graded
                else float(count(metrics, right, int(counts[name]), least=0))
            )
    for kind in ("num-examples", "correct"):
        by_domain = [value for name, value in counts.items() if name.startswith(f"{kind}/")]
        exact = not graded or kind == "num-examples"
        if by_domain and not math.isclose(
            sum(by_domain), counts[kind], rel_tol=0 if exact else 1e-9, abs_tol=0 if exact else 1e-9
        ):
            raise BadReply(f"metrics: {kind} of the domains do not add up to {counts[kind]:g}")
    return {name: counts[name] for name in metrics if name in counts}


def _score_sum(metrics: Mapping[str, float], name: str, examples: float) -> float:
    value = metrics.get(name)
    if value is None or not 0 <= value <= examples * (1 + 1e-9):
        raise BadReply(f"metrics: {name} = {value!r} cannot come from {examples:g} examples")
    return min(float(value), examples)
