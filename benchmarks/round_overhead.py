"""A global round of HFedATM relative to one of plain averaging: the total cost of the method.

The paper's E = 10 epochs and N = 5 station rounds on small client data sets, which is the worst
case: Grams and the merge cost the same whether the clients train long or not. The time is that of
the whole round, from the server's messages to the merged model, with all tiers in this process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from measure import Figure, details, options, publish, side_by_side
from workloads import three_tiers

COMPARED = "the same round with server-rule = avg"


def lenet5(stations: int, each: int, examples: int, epochs: int) -> dict[str, Any]:
    return {
        "dataset": "workloads:random_images",
        "dataset-params": f"examples={stations * each * examples // 2}",
        "stations": stations,
        "clients-per-station": each,
        "rounds": 1,
        "station-rounds": 5,
        "local-epochs": epochs,
        "batch-size": 16,
        "validation-fraction": 0.0,
        "gram-min-rows": 1,
        "lambda": 1.0,
        "schedule": "constant",
        "lr": 0.01,
    }


def resnet18(stations: int, each: int, examples: int, epochs: int) -> dict[str, Any]:
    images = f"examples={stations * each * examples // 2},channels=3,size=32"
    return lenet5(stations, each, examples, epochs) | {
        "model": "resnet18",
        "dataset-params": images,
    }


def round_of(given: dict[str, Any]) -> Callable[[], object]:
    """Return the round as a job; one-time costs of the process are paid before."""
    three_tiers(lenet5(2, 1, 4, 1) | {"server-rule": given["server-rule"]})()
    return three_tiers(given)


def overhead(name: str, given: dict[str, Any], limit: float, pairs: int) -> Figure:
    hfedatm, averaging = ((given | {"server-rule": rule},) for rule in ("hfedatm", "avg"))
    pair = side_by_side((round_of, hfedatm), (round_of, averaging), pairs)
    return Figure(name, pair["ratio"], limit, COMPARED, details=details(pair))


def main(given: Sequence[str] | None = None) -> None:
    chosen = options(__doc__, given)
    if chosen.smoke:
        sizes = {"lenet5": (2, 1, 4, 1), "resnet18": (2, 1, 4, 1)}
    else:
        sizes = {"lenet5": (10, 10, 32, 10), "resnet18": (4, 2, 8, 10)}
    figures = [
        overhead(
            "global round of HFedATM, LeNet-5, 10 x 10", lenet5(*sizes["lenet5"]), 1.03, pairs=2
        ),
        overhead(
            "global round of HFedATM, ResNet-18, 4 x 2", resnet18(*sizes["resnet18"]), 1.05, pairs=1
        ),
    ]
    publish(__file__, figures, chosen)


if __name__ == "__main__":
    main()
