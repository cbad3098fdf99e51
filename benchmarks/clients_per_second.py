"""Simulated clients per second through three tiers, against flat Flower FedAvg on the same engine.

No client trains, so the time goes into messages, records, models, checks and sums. Both sides run
in this process over the same Grid; the flat side is Flower's own FedAvg strategy with a client like
that of Flower's quickstart. All clients receive, build, load and return a LeNet-5.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from measure import Figure, details, options, publish, side_by_side
from workloads import flat_fedavg, three_tiers

COMPARED = "Flower's FedAvg with the same number of clients, no stations"


def settings(stations: int, each: int, rule: str = "avg") -> dict[str, Any]:
    return {
        "dataset": "workloads:random_images",
        "dataset-params": f"examples={4 * stations * each}",
        "train-fn": "workloads:no_training",
        "server-rule": rule,
        "stations": stations,
        "clients-per-station": each,
        "rounds": 1,
        "station-rounds": 1,
        "validation-fraction": 0.0,
        "gram-min-rows": 1,
    }


def warm(prepare: Callable[..., Callable[[], object]], *given: Any) -> Callable[[], object]:
    """Return a job that has already run once."""
    job = prepare(*given)
    job()
    return job


def at_once(size: tuple[int, int]) -> Callable[[], object]:
    """Return a round of this many clients, in a process that has already run a small round."""
    three_tiers(settings(2, 2))()
    return three_tiers(settings(*size))


def in_turn(size: tuple[int, int], times: int) -> Callable[[], object]:
    """Return a small round, repeated until it has served as many clients as a large one."""
    job = at_once(size)
    return lambda: [job() for _ in range(times)]


def main(given: Sequence[str] | None = None) -> None:
    chosen = options(__doc__, given)
    sizes = [(2, 2), (2, 4)] if chosen.smoke else [(10, 10), (10, 100)]
    largest = (4, 4) if chosen.smoke else (100, 100)
    figures = []
    for stations, each in sizes:
        clients = stations * each
        pair = side_by_side(
            (warm, (flat_fedavg, clients, 1)),
            (warm, (three_tiers, settings(stations, each))),
            pairs=1 if chosen.smoke else 2,
            times=1 if chosen.smoke else 3000 // clients,
        )
        figures.append(
            Figure(
                f"throughput of {clients:,} clients through three tiers",
                pair["ratio"],
                0.9,
                COMPARED,
                at_least=True,
                details={
                    "clients per second": round(clients / pair["theirs"]),
                    "flat": round(clients / pair["ours"]),
                    **{key: details(pair)[key] for key in ("low", "high", "repeats")},
                },
            )
        )
    few, clients = sizes[0][0] * sizes[0][1], largest[0] * largest[1]
    pair = side_by_side((at_once, (largest,)), (in_turn, (sizes[0], clients // few)), pairs=1)
    figures.append(
        Figure(
            f"cost per client at {clients:,} clients",
            pair["ratio"],
            1.2,
            f"cost per client at {few} clients",
            details={
                "milliseconds": [
                    round(1e3 * pair[side] / clients, 3) for side in ("ours", "theirs")
                ]
            },
        )
    )
    publish(__file__, figures, chosen)


if __name__ == "__main__":
    main()
