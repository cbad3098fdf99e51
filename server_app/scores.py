"""Source-validation scores: of all examples, of each domain, of each station."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any


def source_scores(evaluated: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
    """Return scores from the stations' counts, by station.

    A station sends ``correct``, ``num-examples`` and ``loss-sum``, and the first two once more per
    domain as ``correct/<domain>`` and ``num-examples/<domain>``.
    """
    total: Counter[str] = Counter()
    for counts in evaluated.values():
        total.update(counts)  # type: ignore[arg-type]
    return {
        "accuracy": total["correct"] / total["num-examples"],
        "loss": total["loss-sum"] / total["num-examples"],
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


def _examples(counts: Mapping[str, float]) -> dict[str, float]:
    prefix = "num-examples/"
    return {
        key.removeprefix(prefix): n for key, n in counts.items() if key.startswith(prefix) and n
    }
