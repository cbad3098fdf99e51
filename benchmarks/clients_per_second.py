"""Simulated clients per second through three tiers, against flat Flower FedAvg on the same engine.

Nobody trains: what is left is messages, records, models, checks and sums. Both sides run in this
process over the same Grid; the flat side is Flower's own FedAvg strategy with a client as in
Flower's quickstart. All clients get, build, load and return a LeNet-5.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from measure import Figure, cpu_seconds, details, options, paired, publish
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


def main(given: Sequence[str] | None = None) -> None:
    chosen = options(__doc__, given)
    sizes = [(2, 2), (2, 4)] if chosen.smoke else [(10, 10), (10, 100)]
    largest = (4, 4) if chosen.smoke else (100, 100)
    figures, per_client = [], {}
    for stations, each in sizes:
        clients = stations * each
        ours, flat = three_tiers(settings(stations, each)), flat_fedavg(clients, rounds=1)
        pair = paired(flat, ours, repeats=3 if chosen.smoke else max(5, 1000 // clients))
        per_client[clients] = pair["theirs"] / clients
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
    clients = largest[0] * largest[1]
    run = three_tiers(settings(*largest))
    started = time.perf_counter()
    per_client[clients] = cpu_seconds(run) / clients
    wall = time.perf_counter() - started
    figures.append(
        Figure(
            f"cost per client at {clients:,} clients",
            per_client[clients] / per_client[sizes[0][0] * sizes[0][1]],
            1.2,
            f"cost per client at {sizes[0][0] * sizes[0][1]} clients",
            details={
                "milliseconds": {n: round(1e3 * cost, 3) for n, cost in per_client.items()},
                "wall seconds": round(wall, 2),
            },
        )
    )
    publish(__file__, figures, chosen)


if __name__ == "__main__":
    main()
