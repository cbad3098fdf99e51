"""RegMean of the Linear layers of 10 RoBERTa-base stations, against the straightforward way.

The reference keeps every station's weights and one dense Gram per layer in memory (one each for
query, key and value, which see the same input) and multiplies with ``torch.inverse`` of their sum.
Weights and Grams are random and arrive one station after the other. The twelve blocks of the
network are equal and the time of both sides grows linearly with them, so a few blocks suffice for
the ratio.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from measure import Figure, details, options, paired, peak_bytes, publish
from torch import Tensor

from hfedatm_core import Gram, Update, merge

STATIONS = 10
COMPARED = "dense Gram per layer, all stations in memory, torch.inverse"
Station = tuple[dict[str, Tensor], dict[str, Any]]


def layers(hidden: int, blocks: int) -> dict[str, tuple[int, int, str]]:
    """Return for each Linear layer its outputs, its inputs, and a name for its input tensor."""
    shapes: dict[str, tuple[int, int, str]] = {}
    for block in range(blocks):
        for part in ("query", "key", "value"):
            shapes[f"{block}.{part}"] = (hidden, hidden, f"{block}.input")
        shapes[f"{block}.dense"] = (hidden, hidden, f"{block}.attended")
        shapes[f"{block}.intermediate"] = (4 * hidden, hidden, f"{block}.normed")
        shapes[f"{block}.output"] = (hidden, 4 * hidden, f"{block}.hidden")
    return shapes


def station(
    hidden: int, blocks: int, number: int, form: Callable[[Tensor], Any] = lambda gram: gram
) -> Station:
    """Make the weights of one station and the Gram of every distinct input, in the given form."""
    generator = torch.Generator().manual_seed(number)
    weights, grams = {}, {}
    for name, (outputs, inputs, source) in layers(hidden, blocks).items():
        weights[name] = torch.randn(outputs, inputs, generator=generator)
        if source not in grams:
            rows = torch.randn(64, inputs, generator=generator)
            gram = (rows.T @ rows).div_(64)
            gram.diagonal().add_(0.1)
            grams[source] = form(gram)
    return weights, grams


def reference(stations: Iterator[Station], hidden: int, blocks: int) -> dict[str, Tensor]:
    """Merge the straightforward way: collect everything, then layer by layer."""
    weights: list[dict[str, Tensor]] = []
    grams: list[dict[str, Tensor]] = []
    shapes = layers(hidden, blocks)
    for its_weights, its_grams in stations:
        weights.append(its_weights)
        grams.append({name: its_grams[source].clone() for name, (_, _, source) in shapes.items()})
    merged = {}
    for name in shapes:
        total = torch.stack([gram[name] for gram in grams]).sum(0)
        product = torch.zeros_like(weights[0][name].T)
        for gram, weight in zip(grams, weights, strict=True):
            product += gram[name] @ weight[name].T
        merged[name] = (torch.inverse(total) @ product).T
    return merged


def ours(stations: Iterator[Update]) -> dict[str, Tensor]:
    """Merge stations as they arrive, with one station in memory at a time."""
    merged = merge(stations, fot=False)
    if any(layer.how != "regmean" for layer in merged.report.layers.values()):
        raise RuntimeError(f"not all layers were merged: {merged.report.layers}")
    return {name.removesuffix(".weight"): value for name, value in merged.state.items()}


def update(hidden: int, blocks: int, number: int) -> Update:
    """Make a station as it arrives on our side: with packed Grams, shared by equal inputs."""
    weights, packed = station(hidden, blocks, number, Gram.from_dense)
    grams = {name: packed[source] for name, (_, _, source) in layers(hidden, blocks).items()}
    return Update({f"{name}.weight": weight for name, weight in weights.items()}, grams)


def arriving(hidden: int, blocks: int, side: str) -> Callable[[], object]:
    """Return one side's job with stations that are made as they arrive, to measure memory."""
    if side == "reference":
        made = partial(station, hidden, blocks)
        return lambda: reference(map(made, range(STATIONS)), hidden, blocks)
    return lambda: ours(map(partial(update, hidden, blocks), range(STATIONS)))


def in_time(hidden: int, blocks: int, repeats: int) -> tuple[dict[str, float], float]:
    """Compare the time of both sides on stations already in memory, and compare their results."""
    made = [station(hidden, blocks, number) for number in range(STATIONS)]
    updates = [update(hidden, blocks, number) for number in range(STATIONS)]
    expected, found = reference(iter(made), hidden, blocks), ours(iter(updates))
    difference = max(float((found[n] - expected[n]).abs().max()) for n in expected)
    if difference > 0.05:
        raise RuntimeError(f"the two sides differ by {difference}")
    pair = paired(
        lambda: ours(iter(updates)), lambda: reference(iter(made), hidden, blocks), repeats
    )
    return pair, difference


def main(given: Sequence[str] | None = None) -> None:
    chosen = options(__doc__, given)
    hidden, blocks = (48, 1) if chosen.smoke else (768, 1)
    pair, difference = in_time(hidden, blocks, repeats=2 if chosen.smoke else 3)
    memory_blocks = 1 if chosen.smoke else 4
    peaks = {
        side: peak_bytes(arriving, hidden, memory_blocks, side) for side in ("ours", "reference")
    }
    figures = [
        Figure(
            "RegMean of 10 RoBERTa-base stations, time",
            pair["ratio"],
            0.6,
            COMPARED,
            details={"blocks": blocks, "largest difference": difference, **details(pair)},
        ),
        Figure(
            "RegMean of 10 RoBERTa-base stations, peak memory",
            peaks["ours"] / peaks["reference"],
            0.25,
            COMPARED,
            details={
                "blocks": memory_blocks,
                **{side: f"{peak / 1e9:.2f} GB" for side, peak in peaks.items()},
            },
        ),
    ]
    publish(__file__, figures, chosen)


if __name__ == "__main__":
    main()
