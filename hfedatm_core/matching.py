"""Which channel of a station corresponds to which channel of the reference."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from hfedatm_core.assignment import SOLVERS, Solver, assign, rounding
from hfedatm_core.channels import ChannelGraph, ChannelGroup, Member
from hfedatm_core.filters import Filters

Scope = Literal["conv", "all"]

# A group behind a residual addition is also written by tensors whose own inputs are matched only
# after it. They would be noise in the first sweep; the second one sees all tensors.
_SWEEPS = 2


@dataclass(frozen=True)
class Match:
    """One group's permutation, with ⟨Π, D⟩ and ⟨I, D⟩ as they stood when it was chosen."""

    permutation: Tensor
    cost: float
    identity_cost: float

    @property
    def moved(self) -> int:
        """Number of channels that change their place."""
        return int((self.permutation != torch.arange(self.permutation.numel())).sum())


class Matcher:
    """Matches stations to one reference; the parameters are those of ``align``."""

    def __init__(
        self,
        reference: Mapping[str, Tensor],
        graph: ChannelGraph,
        solver: Solver,
        scope: Scope,
        reg: float,
        iterations: int,
        margin: float,
    ) -> None:
        if solver not in SOLVERS:
            raise ValueError(f"solver must be one of {', '.join(SOLVERS)}, not {solver!r}")
        if scope not in get_args(Scope):
            raise ValueError(f"scope must be one of {', '.join(get_args(Scope))}, not {scope!r}")
        if not (reg > 0 and iterations >= 1 and 0 <= margin < 1):
            raise ValueError(
                "reg must be positive, iterations at least 1 and margin in [0, 1), "
                f"not {reg}, {iterations} and {margin}"
            )
        self._graph = graph
        self._groups = [g for g in graph.groups if scope == "all" or g.kind == "conv"]
        self._solver, self._reg, self._iterations = solver, reg, iterations
        self._margin = margin
        self._filters = {
            (group.name, member): _filters(reference, group, member)
            for group in self._groups
            for member in group.producers
        }

    def match(self, station: Mapping[str, Tensor]) -> dict[str, Match]:
        """Match the groups in the order of the forward pass, each on the inputs matched so far."""
        matches: dict[str, Match] = {}
        view = _StationView(station, self._graph)
        in_scope = {group.name for group in self._groups}
        basis: dict[str, list[tuple[Member, tuple[int, ...]]]] = {}
        costs: dict[tuple[Member, tuple[int, ...]], Tensor] = {}
        for sweep in range(_SWEEPS):
            for group in self._groups:
                members = [
                    member
                    for member in group.producers
                    if sweep > 0 or in_scope.intersection(view.inputs(member)) <= matches.keys()
                ]
                versions = [(member, view.version(member)) for member in members]
                if basis.get(group.name) == versions:
                    continue
                basis[group.name] = versions
                before = matches.get(group.name)
                pairs = [
                    (self._filters[group.name, member], view.filters(group, member))
                    for member in members
                ]
                match = self._certain(group, pairs)
                if match is None:
                    for key, (ours, theirs) in zip(versions, pairs, strict=True):
                        if key not in costs:
                            costs[key] = ours.cost(theirs)
                    match = self._choose([costs[key] for key in versions], before)
                matches[group.name] = match
                view.move(group.name, match.permutation)
        return matches

    def _certain(
        self, group: ChannelGroup, pairs: Sequence[tuple[Filters, Filters]]
    ) -> Match | None:
        """Return the identity where it is optimal for every tensor without computing the costs."""
        if not all(ours.identity_is_optimal(theirs) for ours, theirs in pairs):
            return None
        cost = sum(ours.diagonal_cost(theirs) for ours, theirs in pairs)
        return Match(torch.arange(group.size), cost, cost)

    def _choose(self, costs: Sequence[Tensor], before: Match | None) -> Match:
        """Solve the assignment; keep the identity unless the guard's margin is reached."""
        total = torch.stack(list(costs)).sum(0) if len(costs) > 1 else costs[0]
        total = total.cpu()
        rows = torch.arange(total.shape[0])
        tie = rounding(total) * total.shape[0]

        def price(permutation: Tensor) -> float:
            return float(total[rows, permutation].sum(dtype=torch.float64))

        best = assign(total, self._solver, self._reg, self._iterations)
        if before is not None and price(before.permutation) <= price(best) + tie:
            best = before.permutation
        identity_cost = price(rows)
        if not price(best) < identity_cost - max(tie, self._margin * identity_cost):
            best = rows
        return Match(best, price(best), identity_cost)


class _StationView:
    """A station's filters with their inputs in the order that was found so far."""

    def __init__(self, tensors: Mapping[str, Tensor], graph: ChannelGraph) -> None:
        self._tensors, self._graph = tensors, graph
        self._moving: dict[str, Tensor] = {}
        self._changes: Counter[str] = Counter()

    def inputs(self, member: Member) -> tuple[str, ...]:
        """Return the groups that a producer reads."""
        return self._graph.groups_at(member.tensor, 1)

    def version(self, member: Member) -> tuple[int, ...]:
        """Return what changes whenever a producer's filters change."""
        return tuple(self._changes[name] for name in self.inputs(member))

    def move(self, group: str, permutation: Tensor) -> None:
        """Order a group's channels, from the station's own order, by a permutation."""
        identity = torch.arange(permutation.numel())
        if not torch.equal(self._moving.get(group, identity), permutation):
            self._moving[group] = permutation
            self._changes[group] += 1

    def filters(self, group: ChannelGroup, member: Member) -> Filters:
        """Return a producer's filters in the station's own order, their inputs reordered."""
        weight = self._tensors[member.tensor]
        if weight.dim() > 1:
            index = self._graph.index(member.tensor, 1, weight.shape[1], self._moving)
            if index is not None:
                weight = weight.index_select(1, index.to(weight.device))
        return Filters(weight, member.offset, group.size, member.block)


def _filters(state: Mapping[str, Tensor], group: ChannelGroup, member: Member) -> Filters:
    if member.tensor not in state:
        raise ValueError(
            f"{member.tensor} of channel group {group.name} ({group.size} channels) is not in the "
            "reference: the channel graph was traced from another architecture"
        )
    weight, end = state[member.tensor], member.offset + group.size * member.block
    if weight.shape[0] < end:
        raise ValueError(
            f"{member.tensor} has shape {tuple(weight.shape)} in the reference, but the channel "
            f"graph expects {end} filters: it was traced from another architecture"
        )
    return Filters(weight, member.offset, group.size, member.block)
