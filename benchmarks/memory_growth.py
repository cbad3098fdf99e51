"""Peak memory of a station with 100 clients relative to one with 10, and of a server likewise.

Clients return a ResNet-18 with Grams and do not train. The process holds all tiers, so a tier
that kept its children's replies would show. A reply is 45 MB: keeping all would take 4 GB more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from measure import Figure, options, peak_bytes, publish
from workloads import three_tiers


def round_of(stations: int, each: int, model: str) -> Callable[[], object]:
    size = "" if model == "lenet5" else ",channels=3,size=32"
    return three_tiers(
        {
            "dataset": "workloads:random_images",
            "dataset-params": f"examples={stations * each}{size}",
            "train-fn": "workloads:no_training",
            "model": model,
            "server-rule": "hfedatm",
            "stations": stations,
            "clients-per-station": each,
            "rounds": 1,
            "station-rounds": 1,
            "validation-fraction": 0.0,
            "gram-min-rows": 1,
            "lambda": 1.0,
        }
    )


def main(given: Sequence[str] | None = None) -> None:
    chosen = options(__doc__, given)
    model, few, many = ("lenet5", 2, 4) if chosen.smoke else ("resnet18", 10, 100)
    figures = []
    for tier, shape in (("station", lambda n: (1, n)), ("server", lambda n: (n, 1))):
        peaks = [peak_bytes(round_of, *shape(count), model) for count in (few, many)]
        figures.append(
            Figure(
                f"peak memory of a {tier} with 100 children",
                peaks[1] / peaks[0],
                1.1,
                "the same with 10 children",
                details={"GB": [round(peak / 1e9, 3) for peak in peaks], "model": model},
            )
        )
    publish(__file__, figures, chosen)


if __name__ == "__main__":
    main()
