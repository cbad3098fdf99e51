"""Scores: by domain and station from the counts of a round, and the outcome of all rounds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from hfedatm.base.results import source_rank
from hfedatm_core.robust.counting import bounded_counts, score


def source_scores(
    evaluated: Mapping[str, Mapping[str, float]], claim_factor: float = 0.0
) -> dict[str, Any]:
    """Return scores from the stations' counts, by station.

    A station sends ``correct``, ``num-examples`` and ``loss-sum``, and the first two once more per
    domain as ``correct/<domain>`` and ``num-examples/<domain>``. Its examples count up to
    ``claim_factor`` times the median (0: as they are). The best model is chosen by ``score``.
    """
    bounded = bounded_counts(list(evaluated.values()), claim_factor)
    evaluated = dict(zip(evaluated, bounded, strict=True))
    total: Counter[str] = Counter()
    for counts in evaluated.values():
        total.update(counts)  # type: ignore[arg-type]
    return {
        "accuracy": total["correct"] / total["num-examples"],
        "loss": total["loss-sum"] / total["num-examples"],
        "score": score(bounded),
        "domains": {
            domain: {"accuracy": total[f"correct/{domain}"] / examples, "examples": int(examples)}
            for domain, examples in sorted(_examples(total).items())
        },
        "stations": {
            name: {
                "accuracy": counts["correct"] / counts["num-examples"],
                "domains": {domain: int(n) for domain, n in _examples(counts).items()},
            }
            for name, counts in sorted(evaluated.items())
        },
    }


def summarise(rounds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the outcome: the last round, the best by source validation, and what it took."""
    scored = [r for r in rounds if "source" in r]
    best = max(scored, key=lambda r: (source_rank(r), -r["round"]), default=None)
    return {
        "rounds": len(rounds),
        "last": _scores(rounds[-1]) if rounds else None,
        "best_by_source": _scores(best) if best else None,
        "seconds": sum(r["seconds"] for r in rounds),
        "bytes_up": {t: sum(r["bytes_up"][t] for r in rounds) for t in ("clients", "stations")},
        "failures": sum(len(r["failures"]) for r in rounds),
    }


def _scores(record: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "round": record["round"],
        "loss": record.get("loss"),
        "source_accuracy": record.get("source", {}).get("accuracy"),
        "unseen_accuracy": record.get("unseen", {}).get("accuracy"),
    }


def _examples(counts: Mapping[str, float]) -> dict[str, float]:
    prefix = "num-examples/"
    return {
        key.removeprefix(prefix): n for key, n in counts.items() if key.startswith(prefix) and n
    }
