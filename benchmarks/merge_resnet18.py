"""The server's merge (align + RegMean) of 10 ResNet-18 stations, against reading them once.

Two cases are measured. Stations in federated training start from one model and stay near it, so for
most filters the identity is provably the best match. Stations that have nothing in common, as if
each had been initialised by itself, are the opposite case: every layer needs its cost matrix, twice
behind residual additions, and an assignment.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from measure import Figure, details, options, paired, publish

from hfedatm_core import ChannelGraph, Gram, Update, merge, weighted_mean
from hfedatm_core.data import DataSpec
from hfedatm_core.models import resnet18

STATIONS = 10
SPEC = DataSpec("image", 7, (3, 64, 64))
COMPARED = "weighted_mean of the same ten, which reads the weights once"


def stations(related: bool, count: int) -> list[Update]:
    """Make stations that look trained: each 10 % away from one model, or each unrelated."""
    torch.manual_seed(0)
    start = resnet18.build(SPEC).state_dict()
    updates = []
    for number in range(count):
        torch.manual_seed(number + 1)
        state = start if related else resnet18.build(SPEC).state_dict()
        state = {
            name: value + 0.1 * value.std(correction=0) * torch.randn(value.shape)
            if value.is_floating_point()
            else value
            for name, value in state.items()
        }
        rows = torch.rand(2000, 512)
        updates.append(Update(state, {"fc": Gram.from_dense(rows.T @ rows / 2000)}))
    return updates


def main(given: Sequence[str] | None = None) -> None:
    chosen = options(__doc__, given)
    graph = ChannelGraph.trace(resnet18.build(SPEC), (SPEC.example(),))
    figures = []
    for related in (True, False):
        updates = stations(related, 2 if chosen.smoke else STATIONS)
        pair = paired(
            lambda updates=updates: merge(updates, graph),
            lambda updates=updates: weighted_mean([u.state for u in updates], [1.0] * len(updates)),
            repeats=1 if chosen.smoke else 9 if related else 5,
        )
        moved = sum(
            group.moved
            for groups in merge(updates, graph).report.stations.values()
            for group in groups.values()
        )
        figures.append(
            Figure(
                f"merge of 10 {'related' if related else 'unrelated'} ResNet-18 stations",
                pair["ratio"],
                15.0,
                COMPARED,
                details={"channels moved": moved, **details(pair)},
            )
        )
    publish(__file__, figures, chosen)


if __name__ == "__main__":
    main()
