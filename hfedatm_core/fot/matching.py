"""Match the channels of a station to the channels of the reference."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hfedatm_core.channels.graph import ChannelGraph
from hfedatm_core.channels.groups import ChannelGroup, Member
from hfedatm_core.fot.assignment import assign, rounding
from hfedatm_core.fot.filters import Filters
from hfedatm_core.fot.options import AlignmentOptions

_Producer = tuple[str, Member]  # a group's name and one of its filter tensors


@dataclass(frozen=True)
class Match:
    """One group's permutation, with ⟨Π, D⟩ and ⟨I, D⟩ at the time of the match."""

    permutation: Tensor
    cost: float
    identity_cost: float

    @property
    def moved(self) -> int:
        """Number of channels that change their place."""
        return int((self.permutation != torch.arange(self.permutation.numel())).sum())


class Matcher:
    """Matches stations to one reference."""

    def __init__(
        self,
        reference: Mapping[str, Tensor],
        graph: ChannelGraph,
        options: AlignmentOptions,
    ) -> None:
        self._graph, self._options = graph, options
        self._groups = [g for g in graph.groups if options.scope == "all" or g.kind == "conv"]
        self._first = _order(self._groups, graph)
        self._filters = {
            (group.name, member): _filters(reference, group, member)
            for group in self._groups
            for member in group.producers
        }

    def match(self, station: Mapping[str, Tensor]) -> tuple[dict[str, Match], dict[str, Tensor]]:
        """Return the match of every group, and the station with its channels in that order.

        Every group is matched first on the tensors whose inputs are already matched, then also on
        the others.

        A group behind residual additions is also written by tensors that read the group itself. In
        the first sweep these tensors would be noise; the second sweep uses them if they agree.
        """
        comparison = _Comparison(self._filters, station, self._graph)
        matches: dict[str, Match] = {}
        basis: dict[str, list[tuple[Member, tuple[int, ...]]]] = {}

        def rematch(group: ChannelGroup, members: Sequence[Member]) -> None:
            seen = [(member, comparison.version(group, member)) for member in members]
            if basis.get(group.name) == seen:
                return  # no tensor that this group was matched on has changed
            basis[group.name] = seen
            matches[group.name] = self._matched(comparison, group, members, matches)
            comparison.move(group.name, matches[group.name].permutation)

        for group, members in self._first:
            rematch(group, members)
        for group, members in self._first:
            order = matches[group.name].permutation
            rest = [m for m in group.producers if m not in members]
            agreeing = [m for m in rest if comparison.agree(group, m, order)]
            rematch(group, [*members, *agreeing])
        return matches, comparison.reordered()

    def _matched(
        self,
        comparison: _Comparison,
        group: ChannelGroup,
        members: Sequence[Member],
        matches: Mapping[str, Match],
    ) -> Match:
        certain = [comparison.certain_identity(group, member) for member in members]
        if None in certain:
            costs = [comparison.cost(group, member) for member in members]
            return self._choose(costs, matches.get(group.name))
        cost = sum(filter(None, certain))
        return Match(torch.arange(group.size), cost, cost)

    def _choose(self, costs: Sequence[Tensor], before: Match | None) -> Match:
        """Solve the assignment; keep the identity unless the gain exceeds the margin."""
        total = torch.stack(list(costs)).sum(0) if len(costs) > 1 else costs[0]
        total = total.cpu()
        rows = torch.arange(total.shape[0])
        tie = rounding(total) * total.shape[0]

        def price(permutation: Tensor) -> float:
            return float(total[rows, permutation].sum(dtype=torch.float64))

        best = assign(total, self._options)
        if before is not None and price(before.permutation) <= price(best) + tie:
            best = before.permutation
        identity_cost = price(rows)
        if not price(best) < identity_cost - max(tie, self._options.margin * identity_cost):
            best = rows
        return Match(best, price(best), identity_cost)


class _Comparison:
    """Compares a station's filters, inputs in the order found so far, with the reference's."""

    def __init__(
        self,
        reference: Mapping[_Producer, Filters],
        station: Mapping[str, Tensor],
        graph: ChannelGraph,
    ) -> None:
        self._reference, self._station, self._graph = reference, station, graph
        self._moving: dict[str, Tensor] = {}
        self._changes: Counter[str] = Counter()
        self._in_order: dict[str, tuple[tuple[int, ...], Tensor]] = {}
        self._certain: dict[tuple[_Producer, tuple[int, ...]], float | None] = {}
        self._costs: dict[tuple[_Producer, tuple[int, ...]], Tensor] = {}

    def version(self, group: ChannelGroup, member: Member) -> tuple[int, ...]:
        """Return a key that changes whenever the order of a tensor's inputs changes.

        The key also changes when another group reorders its filters: whole groups of a grouped
        convolution and the channels within each of them are two channel groups on one axis.
        """
        inputs = self._graph.groups_at(member.tensor, 1)
        return tuple(
            self._changes[name] for name in (*inputs, *self._graph.partners(group, member))
        )

    def move(self, group: str, permutation: Tensor) -> None:
        """Set the permutation of a group's channels, relative to the station's own order."""
        identity = torch.arange(permutation.numel())
        if not torch.equal(self._moving.get(group, identity), permutation):
            self._moving[group] = permutation
            self._changes[group] += 1

    def certain_identity(self, group: ChannelGroup, member: Member) -> float | None:
        """See :meth:`Filters.certain_identity`."""
        producer = (group.name, member)
        key = (producer, self.version(group, member))
        if key not in self._certain:
            ours, theirs = self._reference[producer], self._filters(group, member)
            certain = self._certain[key] = ours.certain_identity(theirs)
            if certain is None:
                self._costs[key] = ours.cost(theirs)
        return self._certain[key]

    def cost(self, group: ChannelGroup, member: Member) -> Tensor:
        """See :meth:`Filters.cost`."""
        producer = (group.name, member)
        key = (producer, self.version(group, member))
        if key not in self._costs:
            self._costs[key] = self._reference[producer].cost(self._filters(group, member))
        return self._costs[key]

    def agree(self, group: ChannelGroup, member: Member, order: Tensor) -> bool:
        """See :meth:`Filters.agree`."""
        return self._reference[group.name, member].agree(self._filters(group, member), order)

    def reordered(self) -> dict[str, Tensor]:
        """Return the station with all channels in the order found."""
        state = {}
        for name in self._station:
            tensor = self._with_inputs_in_order(name)
            self._in_order.pop(name, None)  # keep one copy of a tensor, not two
            for axis in range(tensor.dim()):
                if axis != 1:
                    tensor = self._graph.permute_axis(name, tensor, axis, self._moving)
            state[name] = tensor
        return state

    def _filters(self, group: ChannelGroup, member: Member) -> Filters:
        weight = self._with_inputs_in_order(member.tensor)
        others = {
            n: self._moving[n] for n in self._graph.partners(group, member) if n in self._moving
        }
        if others:
            weight = self._graph.permute_axis(member.tensor, weight, 0, others)
        return Filters(weight, member.offset, group.size, member.block, member.places)

    def _with_inputs_in_order(self, name: str) -> Tensor:
        """Return a tensor with axis 1 in the order found so far; the last result is cached."""
        tensor = self._station[name]
        if tensor.dim() < 2:
            return tensor
        version = tuple(self._changes[group] for group in self._graph.groups_at(name, 1))
        if name not in self._in_order or self._in_order[name][0] != version:
            ordered = self._graph.permute_axis(name, tensor, 1, self._moving)
            self._in_order[name] = (version, ordered)
        return self._in_order[name][1]


def _order(
    groups: Sequence[ChannelGroup], graph: ChannelGraph
) -> list[tuple[ChannelGroup, list[Member]]]:
    """Return the groups in the order of matching, each with the producers that are usable then.

    A group is next when the inputs of all its producers are matched. Groups behind residual
    additions wait for each other; then the first group with a usable producer is next.
    """
    waiting = list(groups)
    found: list[tuple[ChannelGroup, list[Member]]] = []
    while waiting:
        pending = {group.name for group in waiting}
        usable = [
            [m for m in g.producers if not pending & set(graph.groups_at(m.tensor, 1))]
            for g in waiting
        ]
        whole = [i for i, g in enumerate(waiting) if len(usable[i]) == len(g.producers)]
        part = [i for i, members in enumerate(usable) if members]
        turn = [*whole, *part, 0][0]
        group = waiting.pop(turn)
        found.append((group, usable[turn] or list(group.producers)))
    return found


def _filters(state: Mapping[str, Tensor], group: ChannelGroup, member: Member) -> Filters:
    if member.tensor not in state:
        raise ValueError(
            f"{member.tensor} of channel group {group.name} ({group.size} channels) is not in the "
            "reference: the channel graph was traced from another architecture"
        )
    weight, end = state[member.tensor], int(member.positions(group.size).max()) + 1
    if weight.shape[0] < end:
        raise ValueError(
            f"{member.tensor} has shape {tuple(weight.shape)} in the reference, but the channel "
            f"graph expects {end} filters: it was traced from another architecture"
        )
    return Filters(weight, member.offset, group.size, member.block, member.places)
