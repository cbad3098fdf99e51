"""Match all channel groups of two networks by any cost, repeatedly while this helps."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hfedatm_core.channels.graph import ChannelGraph
from hfedatm_core.channels.groups import ChannelGroup, Member
from hfedatm_core.fot.assignment import assign, rounding
from hfedatm_core.fot.costs.base import Cost
from hfedatm_core.fot.matching import Match
from hfedatm_core.fot.options import AlignmentOptions

SWEEPS = 12
"""Largest number of sweeps."""
GAIN = 0.01
"""A sweep that lowers the sum of all costs by a smaller share than this is the last."""


def sweep(
    graph: ChannelGraph,
    cost: Cost,
    options: AlignmentOptions,
    start: dict[str, Tensor] | None = None,
) -> dict[str, Match]:
    """Return the match of every group in scope.

    A group's cost depends on the order of its neighbouring groups, which are matched in the same
    way. The first sweep goes from the input to the output and compares a group only by tensors
    whose other channels are matched already; later sweeps go in a random order and use all tensors.
    Groups of trained networks that depend on each other seldom settle: they change from sweep to
    sweep while the costs stay as they are, and so do the merged networks' accuracies.

    Parameters
    ----------
    cost
        Compares two networks, channel by channel.
    start
        Orders to start from; by default the first sweep finds them.
    """
    groups = [g for g in graph.groups if options.scope == "all" or g.kind == "conv"]
    identity = {g.name: torch.arange(g.size) for g in groups}
    orders = {**identity, **(start or {})}
    known: dict[tuple[str, Member], tuple[tuple[int, ...], Tensor]] = {}
    changes = dict.fromkeys(identity, 0)
    matches: dict[str, Match] = {}
    unplaced = set() if start else set(identity)
    generator = torch.Generator().manual_seed(0)

    def neighbours(member: Member) -> tuple[str, ...]:
        return graph.groups_at(member.tensor, 1 - member.axis)

    def between(group: ChannelGroup, member: Member) -> Tensor:
        around = (*neighbours(member), *graph.partners(group, member))
        seen = tuple(changes.get(name, 0) for name in around)
        key = (group.name, member)
        if key not in known or known[key][0] != seen:
            known[key] = seen, cost.between(group, member, orders)
        return known[key][1]

    def rematch(group: ChannelGroup, members: Sequence[Member]) -> bool:
        if not members:
            matches[group.name] = Match(orders[group.name], 0.0, 0.0)
            return False
        total = sum(between(group, member) for member in members)
        assert isinstance(total, Tensor)
        match = _choose(total, orders[group.name], options)
        moved = not torch.equal(match.permutation, orders[group.name])
        if moved:
            orders[group.name] = match.permutation
            changes[group.name] += 1
        matches[group.name] = match
        return moved

    before = float("inf")
    for _ in range(SWEEPS):
        whole = not unplaced
        order = list(range(len(groups)))
        if not unplaced:
            order = torch.randperm(len(groups), generator=generator).tolist()
        moved = False
        for place in order:
            group = groups[place]
            members = list(cost.members(group))
            ready = [m for m in members if not unplaced.intersection(neighbours(m))]
            moved |= rematch(group, ready or members)
            unplaced.discard(group.name)
        total = sum(match.cost for match in matches.values())
        if whole and (not moved or total >= (1.0 - GAIN) * before):
            break
        before = total if whole else before
    return matches


def _choose(total: Tensor, before: Tensor, options: AlignmentOptions) -> Match:
    """Solve the assignment; keep the previous order unless the new one costs less."""
    rows = torch.arange(len(total))
    tie = rounding(total) * len(total)

    def price(permutation: Tensor) -> float:
        return float(total[rows, permutation].sum(dtype=torch.float64))

    best = assign(total, options)
    if price(before) <= price(best) + tie:
        best = before
    identity = price(rows)
    if not price(best) < identity - max(tie, options.margin * identity):
        best = rows
    return Match(best, price(best), identity)
