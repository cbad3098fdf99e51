"""What a round of any tree costs per tier in bytes, seconds and memory: a model of few constants.

    python benchmarks/scaling_model.py              # 10^3, 10^5 and 10^7 clients
    python benchmarks/scaling_model.py --check benchmarks/results/superlink_load.json

Bytes follow from the method and are exact. Seconds and memory of a link follow from the constants
that `superlink_load.py` measures (docs/scaling.md says how well they fit).
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy.optimize import nnls

RESULTS = Path(__file__).parent / "results" / "superlink_load.json"


@dataclass(frozen=True)
class Network:
    """Bytes of a model, of its Grams, and of the products that a station of stations adds."""

    name: str
    model: float
    grams: float
    products: float = 0.0


# Bytes of a reply's model and Grams, as `rounds.jsonl` counts them in a run with default settings.
LENET5 = Network("LeNet-5", 248_202, 183_490, 236_100)


@dataclass(frozen=True)
class Link:
    """Constants of one SuperLink with its gateway.

    Attributes
    ----------
    message_seconds, mb_seconds
        CPU seconds of the link per message there and back, and per MB of it in one direction.
    idle_mb, node_mb
        Its memory when it works, without nodes, and what every node adds while its message and
        reply are there.
    held_share
        Bytes of memory per byte of a reply that waits at the link.
    """

    message_seconds: float
    mb_seconds: float
    idle_mb: float
    node_mb: float
    held_share: float

    def seconds(self, children: int, mb: float) -> float:
        """Return the seconds that a link needs for one message to and from each child."""
        return children * (self.message_seconds + self.mb_seconds * mb)

    def memory(self, children: int, mb: float) -> float:
        """Return the memory of a link, in MB."""
        return self.idle_mb + children * (self.node_mb + self.held_share * mb)


def fit(measured: list[dict]) -> Link:
    """Return the constants that are closest to the loads and not negative.

    A link takes more memory as soon as it works, however few its nodes are. So the memory without
    nodes is fitted, too, instead of being that of a link which has not worked yet.
    """
    nodes = np.array([m["nodes"] for m in measured], dtype=float)
    mb = np.array([m["kilobytes"] / 1000 for m in measured])
    cpu = np.array([m["link CPU seconds per message"] for m in measured])
    memory = np.array([m["link memory MB"]["most"] for m in measured], dtype=float)
    one = np.ones_like(mb)
    (message_seconds, mb_seconds), _ = nnls(np.stack([one, mb], axis=1), cpu)
    (idle, node, held), _ = nnls(np.stack([one, nodes, nodes * mb], axis=1), memory)
    return Link(*map(float, (message_seconds, mb_seconds, idle, node, held)))


def bytes_up(sizes: tuple[int, ...], network: Network, station_rounds: int = 1) -> list[float]:
    """Return the bytes that every tier sends up in a round, the outermost stations first.

    A client sends its model in every station round and its Grams in the last one; a station sends
    one model and one set of Grams, and a station of stations the sums of products, too.
    """
    tiers = []
    nodes = 1
    for level, size in enumerate(sizes):
        nodes *= size
        clients = level == len(sizes) - 1
        times = station_rounds if clients else 1
        more = network.products if level < len(sizes) - 2 else 0.0
        tiers.append(nodes * (times * network.model + network.grams + more))
    return tiers


def byte_cost(
    sizes: tuple[int, ...], network: Network, station_rounds: int = 1
) -> dict[str, object]:
    """Return what one round of a tree sends up: to each link, and in all."""
    up = bytes_up(sizes, network, station_rounds)
    return {
        "tree": "x".join(map(str, sizes)),
        "clients": math.prod(sizes),
        "MB to a link": [
            round(b / math.prod(sizes[:level]) / 1e6, 1) for level, b in enumerate(up)
        ],
        "GB in all": round(sum(up) / 1e9, 2),
    }


def round_cost(
    sizes: tuple[int, ...],
    network: Network,
    link: Link,
    station_rounds: int = 1,
    train: float = 0.0,
) -> dict[str, object]:
    """Return what one round of a tree costs; links of one tier work at the same time."""
    one = network.model + network.grams
    seconds = [
        (station_rounds if level == len(sizes) - 1 else 1) * link.seconds(size, one / 1e6)
        for level, size in enumerate(sizes)
    ]
    return {
        **byte_cost(sizes, network, station_rounds),
        "seconds per tier": [round(s, 1) for s in seconds],
        "seconds": round(sum(seconds) + station_rounds * train, 1),
        "MB of a link": [round(link.memory(size, one / 1e6)) for size in sizes],
    }


TREES = ((20, 50), (10, 10, 10), (10, 100, 100), (40, 50, 50), (10, 100, 100, 100))


def main() -> None:
    """Print the table, or how well the constants predict a load that they were not fitted to."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--measured", type=Path, default=RESULTS)
    parser.add_argument("--check", action="store_true", help="predict the loads marked 'unseen'")
    asked = parser.parse_args()
    if not asked.measured.exists():
        print(f"{asked.measured} is not there: no seconds and no memory; see superlink_load.py")
        for sizes in TREES:
            print(json.dumps(byte_cost(sizes, LENET5)))
        return
    measured = json.loads(asked.measured.read_text())
    link = fit([m for m in measured if not m.get("unseen")])
    print(link)
    if asked.check:
        for load in (m for m in measured if m.get("unseen")):
            mb = load["kilobytes"] / 1000
            answered = sum(r["answered"] for r in load["rounds"])
            said = link.seconds(1, mb) * answered
            seen = load["link CPU seconds per message"] * answered
            memory = link.memory(load["nodes"], mb)
            print(
                f"{load['nodes']} nodes of {mb:g} MB: CPU seconds {said:.0f} predicted, {seen:.0f} "
                f"measured; MB {memory:.0f} predicted, {load['link memory MB']['most']} measured"
            )
        return
    for sizes in TREES:
        print(json.dumps(round_cost(sizes, LENET5, link, station_rounds=1)))


if __name__ == "__main__":
    main()
