"""Scores by domain and station from the counts of a round, and the outcome of all rounds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from hfedatm.base.metric_sums import HeldSums, values
from hfedatm.base.round_record import (
    ACCURACY,
    DomainScore,
    RoundRecord,
    Source,
    StationScore,
    optional_fields,
)
from hfedatm_core.metrics import Metric
from hfedatm_core.robust.counting import bounded_counts, score


def source_scores(
    evaluated: Mapping[str, Mapping[str, float]],
    claim_factor: float = 0.0,
    sums: HeldSums | None = None,
    metrics: Mapping[str, Metric] | None = None,
    measure: str = ACCURACY,
) -> Source:
    """Return scores from the stations' counts, by station.

    A station sends ``correct``, ``num-examples`` and ``loss-sum``, and the first two once more per
    domain as ``correct/<domain>`` and ``num-examples/<domain>``. Its examples count up to
    ``claim_factor`` times the median (0: as they are), and so do the ``sums`` of ``metrics``. The
    best model is chosen by ``score``. ``measure`` is the task's name of the mean score.
    """
    claimed = list(evaluated.values())
    bounded = bounded_counts(claimed, claim_factor)
    found = values(metrics or {}, sums.total(claimed, bounded) if sums else {})
    evaluated = dict(zip(evaluated, bounded, strict=True))
    total: Counter[str] = Counter()
    for counts in evaluated.values():
        total.update(counts)
    return Source(
        accuracy=total["correct"] / total["num-examples"],
        loss=total["loss-sum"] / total["num-examples"],
        score=score(bounded),
        domains={
            domain: DomainScore(
                accuracy=total[f"correct/{domain}"] / examples, examples=int(examples)
            )
            for domain, examples in sorted(_examples(total).items())
        },
        stations={
            name: StationScore(
                accuracy=counts["correct"] / counts["num-examples"],
                domains={domain: int(n) for domain, n in _examples(counts).items()},
            )
            for name, counts in sorted(evaluated.items())
        },
        **optional_fields(found or None, measure),
    )


def summarise(rounds: Sequence[RoundRecord]) -> dict[str, Any]:
    """Return the outcome: the last round, the best one by source validation, and the costs."""
    ranks = {record.source.rank: record for record in reversed(rounds) if record.source}
    return {
        "rounds": len(rounds),
        "last": _scores(rounds[-1]) if rounds else None,
        "best_by_source": _scores(ranks[max(ranks)]) if ranks else None,
        "seconds": sum(r.seconds for r in rounds),
        "bytes_up": {
            "clients": sum(r.bytes_up.clients for r in rounds),
            "stations": sum(r.bytes_up.stations for r in rounds),
        },
        "failures": sum(len(r.failures) for r in rounds),
    }


def _scores(record: RoundRecord) -> dict[str, Any]:
    return {
        "round": record.round,
        "loss": record.loss,
        "source_accuracy": record.source_accuracy,
        "unseen_accuracy": record.unseen_accuracy,
    }


def _examples(counts: Mapping[str, float]) -> dict[str, float]:
    prefix = "num-examples/"
    return {
        key.removeprefix(prefix): n for key, n in counts.items() if key.startswith(prefix) and n
    }
