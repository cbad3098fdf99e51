"""Find the updates that move the model in the same direction as the others.

The agreement of two updates is the cosine between their moves of a tensor, averaged over the weight
matrices and filters. (The direction of a bias of a few numbers says little: the two numbers of a
binary classifier have cosine 1 or −1.) The agreement of one update is the cosine that at least half
of the other updates reach with it,

    C_kj = mean_t ⟨u_kt, u_jt⟩ / (‖u_kt‖ ‖u_jt‖),        a_k = upper median_{j ≠ k} C_kj .

The usual agreement ``m`` is the median of ``C`` over all pairs. Honest updates that start from one
model agree (0.3 to 0.6 while there is something to learn, also between domains); noise agrees with
no update, and a flipped update opposes the others. At the end of training honest updates hardly
agree either: then domains pull in different directions, and a flipped update looks like one of
them. So a step with a higher ``m`` has more weight as evidence, and every node has a record over
all steps,

    e_k ← e_k + m (a_k − b m)        if m ≥ 0.1,

which grows for a node whose agreement is at least ``b`` times the usual one. An update is excluded
once ``e_k`` is below −0.02, for which one clear step is enough; or, among five or more, if it
opposes the others (``a_k < −m / 2``) in a step with ``m ≥ 0.3``, whatever its record. ``b`` is
``least``; among three or four updates it is −1 / 2 and the record alone decides, because two
updates with similar domains make a third, honest one look odd in any single step.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hfedatm_core.tensors import State

PEERS = 32
"""Each update is compared with at most this many, so the cost is not quadratic in the updates."""

MANY = 5
"""With at least this many updates, low agreement alone is a reason to exclude an update."""

CONSENSUS = 0.1
"""If the usual agreement is below this value, a step is no evidence."""

CLEAR = 0.3
"""From this usual agreement on, one step is enough to exclude an opposing update of many."""

OPPOSED = -0.5
"""An update below this multiple of the usual agreement works against the others."""

DOUBT = 0.02
"""An update is excluded if its record is below minus this value."""


def telling(start: State) -> list[str]:
    """Return the names of the tensors to compare: the matrices and filters, if there are any.

    Otherwise all floating-point tensors are compared; the direction of a counter means nothing.
    """
    floating = {name: value.ndim for name, value in start.items() if value.is_floating_point()}
    return [name for name, axes in floating.items() if axes > 1] or list(floating)


def peers(count: int) -> list[int]:
    """Return the places of the updates to compare all with, evenly spaced in order of arrival."""
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


def usual_agreement(cosines: Tensor, compared: list[int]) -> float:
    """Return ``m``; for three updates that of the best pair, as a liar is in both other pairs."""
    others = torch.ones_like(cosines, dtype=torch.bool)
    others[compared, range(len(compared))] = False
    ordered = cosines[others].sort(descending=True).values
    # Each pair occurs twice, once in each order.
    return float(ordered[max(0, len(ordered) // 2 - 2)])


def evidence(agreements: Tensor, usual: float, least: float) -> Tensor:
    """Return the amount that a step adds to every record."""
    if usual < CONSENSUS:
        return torch.zeros_like(agreements)
    bar = least if len(agreements) >= MANY else OPPOSED
    return usual * (agreements - bar * usual)


def outsiders(agreements: Tensor, usual: float, records: Tensor) -> list[int]:
    """Return the places of the updates to exclude: those with the worst records, a minority."""
    against = records < -DOUBT
    if usual >= CLEAR and len(records) >= MANY:
        against |= agreements < OPPOSED * usual
    worst = [k for k in records.argsort().tolist() if against[k]]
    return worst[: (len(records) - 1) // 2]
