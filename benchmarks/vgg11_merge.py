"""Merging 4 VGG-11 stations of 133 million parameters, whose widest layer has 25,088 inputs.

A Gram matrix of that layer alone would take 2.5 GB per station. The figure is the memory of the
merging process beyond the weights of two stations (the reference and the current one). Stations
arrive one by one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

import torch
from measure import Figure, options, peak_bytes, publish
from torch import nn

from hfedatm_core import ChannelGraph, FactorGram, Gram, Update, merge
from hfedatm_core.data import DataSpec
from hfedatm_core.models import vgg11

STATIONS = 4


def network(small: bool) -> tuple[nn.Module, DataSpec]:
    """Return VGG-11 or, for a smoke test, a small network with one wide layer behind filters."""
    if not small:
        spec = DataSpec("image", 1000, (3, 224, 224))
        return vgg11.build(spec), spec
    layers = [nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 30 * 30, 16)]
    return nn.Sequential(*layers, nn.ReLU(), nn.Linear(16, 10)), DataSpec("image", 10, (3, 32, 32))


def arriving(small: bool) -> Callable[[], object]:
    """Return the merge of stations that are made as they arrive."""
    model, spec = network(small)
    graph = ChannelGraph.trace(model, (spec.example(1),))
    shapes = {name: value.shape for name, value in model.state_dict().items()}
    widths = {n: m.in_features for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    del model

    def gram(width: int, generator: torch.Generator) -> Gram:
        rows = torch.randn(256, width, generator=generator)
        if width > 4096:
            return FactorGram(rows / 16, rank=256)
        return Gram.from_dense(rows.T @ rows / 256)

    def updates() -> Iterator[Update]:
        for number in range(STATIONS):
            generator = torch.Generator().manual_seed(number)
            yield Update(
                {name: 0.02 * torch.randn(s, generator=generator) for name, s in shapes.items()},
                {name: gram(width, generator) for name, width in widths.items()},
            )

    def job() -> None:
        report = merge(updates(), graph).report
        if any(report.layers[name].how != "regmean" for name in widths):
            raise RuntimeError(f"not merged by RegMean: {report.layers}")

    return job


def main(given: Sequence[str] | None = None) -> None:
    chosen = options(__doc__, given)
    model, _ = network(chosen.smoke)
    weights = sum(value.nbytes for value in model.state_dict().values())
    parameters = sum(value.numel() for value in model.parameters())
    del model
    started = time.perf_counter()
    peak = peak_bytes(arriving, chosen.smoke)
    figure = Figure(
        "merge of 4 VGG-11 stations, memory beyond two stations",
        (peak - 2 * weights) / 1e9,
        6.0,
        f"the weights of two stations, {2 * weights / 1e9:.2f} GB",
        unit="GB",
        details={
            "parameters": parameters,
            "peak": f"{peak / 1e9:.2f} GB",
            "wall seconds with making the stations": round(time.perf_counter() - started, 1),
        },
    )
    publish(__file__, [figure], chosen)


if __name__ == "__main__":
    main()
