"""The cost of merging ResNet-18 stations that were trained apart: bytes, time and memory.

The uplink is the Grams of all layers, which such a merge needs once, relative to the weights. The
time is that of the server's merge of ten unrelated stations and, for stations that shared a start,
of the merge that such rounds use and of the other one, relative to reading the weights once. The
memory is the peak of merging ten stations relative to three, when each is made as it is read.
All stations have the same Grams, which the time of a merge does not depend on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial

import torch
from measure import Figure, details, options, paired, peak_bytes, publish
from torch import nn

from hfedatm.base.records import grams_to_record, state_to_record
from hfedatm_core import (
    ChannelGraph,
    Gram,
    Update,
    collect_grams,
    merge,
    merge_apart,
    weighted_mean,
)
from hfedatm_core.data import DataSpec
from hfedatm_core.models import lenet5, resnet18

STATIONS = 10
SPEC = DataSpec("image", 1000, (3, 64, 64))
READ = "weighted_mean of the same ten, which reads the weights once"
FORMS = {"dense": 10**6, "factors above 4,096 inputs": 4096}


def network(small: bool) -> nn.Module:
    return lenet5.build(SPEC, batch_norm=True) if small else resnet18.build(SPEC)


@cache
def grams(small: bool, max_dim: int = 4096) -> dict[str, Gram]:
    """Return the Grams of all layers on noise; only their sizes and ranks matter here."""
    torch.manual_seed(0)
    # 64 images have the 256 rows in the last layer that its factor may have.
    images = [(torch.rand(16, *SPEC.input_shape), None) for _ in range(4)]
    return collect_grams(network(small), images, max_dim=max_dim, full=True, groups=False)


def stations(small: bool, related: bool, count: int) -> Iterator[Update]:
    """Make stations that look trained: each 10 % away from one model, or each unrelated."""
    torch.manual_seed(0)
    start = network(small).state_dict()
    for number in range(count):
        torch.manual_seed(number + 1)
        state = start if related else network(small).state_dict()
        moved = {
            name: value + 0.1 * value.std(correction=0) * torch.randn(value.shape)
            if value.is_floating_point()
            else value
            for name, value in state.items()
        }
        yield Update(moved, grams(small), name=f"station {number}")


def linear_only(update: Update) -> Update:
    """Return the update with the Gram that a round with a shared start sends: shrunk, no bias."""
    head = [name for name in update.grams if name.startswith("fc")]
    found = {n: update.grams[n].leading(update.grams[n].dim - 1).shrink(0.75) for n in head}
    return Update(update.state, found, name=update.name)


def traced(small: bool) -> ChannelGraph:
    return ChannelGraph.trace(network(small), (SPEC.example(),))


def uplink(small: bool) -> list[Figure]:
    weights = state_to_record(network(small).state_dict()).count_bytes()
    figures = []
    for form, max_dim in FORMS.items():
        added = grams_to_record(grams(small, max_dim), "float16").count_bytes()
        figures.append(
            Figure(
                f"bytes of the Grams of all layers, ResNet-18, {form}",
                added / weights,
                3.0,
                "its weights",
                details={"grams": added, "weights": weights},
            )
        )
    return figures


def seconds(small: bool) -> list[Figure]:
    graph, count = traced(small), 2 if small else STATIONS
    figures = []
    for name, related, apart, limit in (
        ("unrelated", False, True, 40.0),
        ("related", True, False, 5.0),
        ("related", True, True, 5.0),
    ):
        updates = list(stations(small, related, count))
        if not apart:
            updates = [linear_only(update) for update in updates]
        states, ones = [u.state for u in updates], [1.0] * len(updates)
        pair = paired(
            partial(merge_apart if apart else merge, updates, graph),
            partial(weighted_mean, states, ones),
            repeats=1 if small or apart else 3,  # one such merge takes long, and so varies little
        )
        how = "merge_apart" if apart else "merge"
        figures.append(
            Figure(
                f"{how} of 10 {name} ResNet-18 stations",
                pair["ratio"],
                limit,
                READ,
                details=details(pair),
            )
        )
    return figures


def merging(small: bool, count: int) -> Callable[[], object]:
    """Return a job that merges stations, each made when it is read."""
    graph = traced(small)
    grams(small)
    return lambda: merge_apart(stations(small, False, count), graph)


def memory(small: bool) -> Figure:
    few, many = (2, 3) if small else (3, STATIONS)
    peaks = [peak_bytes(merging, small, count) for count in (few, many)]
    return Figure(
        "peak memory of merge_apart with 10 ResNet-18 stations",
        peaks[1] / peaks[0],
        1.1,
        "the same with 3 stations",
        details={"GB": [round(peak / 1e9, 3) for peak in peaks]},
    )


def main(given: Sequence[str] | None = None) -> None:
    chosen = options(__doc__, given)
    small = chosen.smoke
    publish(__file__, [*uplink(small), *seconds(small), memory(small)], chosen)


if __name__ == "__main__":
    main()
