"""Aligning one layer of 512 filters of 3x3x512: cost, Sinkhorn, assignment.

FOT is compared with the one matrix product that any cost of all pairs needs, and with POT's
Sinkhorn with the same cost, number of iterations and assignment. In the first case the station's
filters are the reference's in another order, plus noise; in the second, the two sets of filters
have nothing in common.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import ot
import torch
from measure import Figure, details, options, paired, publish
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from hfedatm_core.fot.assignment import assign
from hfedatm_core.fot.filters import Filters
from hfedatm_core.fot.options import AlignmentOptions

REG, ITERATIONS = 0.05, 25


def ours(reference: Tensor, station: Tensor) -> Tensor:
    size = len(reference)
    cost = Filters(reference, 0, size, 1).cost(Filters(station, 0, size, 1))
    return assign(cost, AlignmentOptions("sinkhorn", reg=REG, iterations=ITERATIONS))


def product(reference: Tensor, station: Tensor) -> Tensor:
    return reference.flatten(1) @ station.flatten(1).T


def with_pot(reference: Tensor, station: Tensor) -> Tensor:
    size = len(reference)
    cost = Filters(reference, 0, size, 1).cost(Filters(station, 0, size, 1)).numpy()
    mass = np.full(size, 1 / size, dtype=cost.dtype)
    plan = ot.sinkhorn(mass, mass, cost, REG, numItermax=ITERATIONS, stopThr=0.0, warn=False)
    return torch.from_numpy(linear_sum_assignment(-plan)[1])


def main(given: Sequence[str] | None = None) -> None:
    chosen = options(__doc__, given)
    size = 16 if chosen.smoke else 512
    generator = torch.Generator().manual_seed(0)
    reference, other, noise = torch.randn(3, size, size, 3, 3, generator=generator)
    order = torch.randperm(size, generator=generator)
    figures = []
    for kind, station in (("reordered", reference[order] + 0.3 * noise), ("unrelated", other)):
        found = ours(reference, station)
        if kind == "reordered" and not torch.equal(found, torch.argsort(order)):
            raise RuntimeError("the order was not found")
        repeats = 3 if chosen.smoke else 41
        jobs = [lambda f=f, s=station: f(reference, s) for f in (ours, product, with_pot)]
        to_product = paired(jobs[0], jobs[1], repeats)
        to_pot = paired(jobs[0], jobs[2], repeats)
        figures += [
            Figure(
                f"FOT of a layer of 512 {kind} filters",
                to_product["ratio"],
                2.0,
                "one matrix product of the two sets of filters",
                details=details(to_product),
            ),
            Figure(
                f"FOT of a layer of 512 {kind} filters, against POT",
                to_pot["ratio"],
                1.0,
                "ot.sinkhorn on the same cost + the same assignment",
                details=details(to_pot),
            ),
        ]
    publish(__file__, figures, chosen)


if __name__ == "__main__":
    main()
