"""Which updates point where the others do.

The agreement of two updates is the cosine between the ways they move a weight, as a mean over the
weight matrices and filters (a bias of a few numbers points anywhere: two numbers of a binary
classifier have cosine 1 or −1); that of one update is what at least half of the others reach with
it,

    C_kj = mean_t ⟨u_kt, u_jt⟩ / (‖u_kt‖ ‖u_jt‖),        a_k = upper median_{j ≠ k} C_kj .

Honest updates that start from one model agree (0.3 to 0.6 while there is something to learn, also
between domains); noise agrees with nobody and a flipped update less than that. An update is left
out if ``a_k < least · med a``; of three or four only if it opposes the others,
``a_k < −med a / 2``, because there two whose domains are alike make a third, honest one look odd.
Where the updates hardly agree at all, as at the end of training, nobody can be told from the
others, and nobody is left out.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hfedatm_core.tensors import State

PEERS = 32
"""Updates that every update is compared with: the cost grows with their number, not its square."""

MANY = 5
"""Updates from which on little agreement is reason enough."""

CONSENSUS = 0.1
"""Agreement below which updates tell nothing about each other."""


def telling(start: State) -> list[str]:
    """Return the tensors whose direction tells something: matrices and filters, if there are any.

    Counters tell nothing.
    """
    floating = {name: value.ndim for name, value in start.items() if value.is_floating_point()}
    return [name for name, axes in floating.items() if axes > 1] or list(floating)


def peers(count: int) -> list[int]:
    """Return the places of the updates that all are compared with, evenly over the arrivals."""
    step = max(1.0, count / PEERS)
    return sorted({int(number * step) for number in range(min(count, PEERS))})


def agreements(cosines: Tensor, compared: list[int]) -> Tensor:
    """Return ``a_k`` from ``C``, whose column ``j`` belongs to update ``compared[j]``."""
    found = []
    for number, row in enumerate(cosines):
        others = torch.tensor([place != number for place in compared])
        ordered = row[others].sort(descending=True).values
        found.append(float(ordered[(len(ordered) - 1) // 2]))
    return torch.tensor(found, dtype=torch.float64)


def outsiders(agreements: Tensor, least: float) -> list[int]:
    """Return the places of the updates to leave out: a minority, those that agree least."""
    count = len(agreements)
    if count < 3 or not least:
        return []
    usual = float(agreements.median())
    if usual < CONSENSUS:
        return []
    bar = (least if count >= MANY else -0.5) * usual
    order = agreements.argsort().tolist()
    return [k for k in order[: (count - 1) // 2] if float(agreements[k]) < bar]
