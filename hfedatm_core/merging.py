"""Merge station models: align their channels (FOT), then RegMean, and the mean for the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from hfedatm_core.averaging import MeanAccumulator, check_finite
from hfedatm_core.batch_norm import to_second_moments, to_variances
from hfedatm_core.channels.graph import ChannelGraph
from hfedatm_core.fot.alignment import Aligner, Alignment
from hfedatm_core.fot.assignment import Solver
from hfedatm_core.fot.matching import Scope
from hfedatm_core.regmean.layers import LayerMerger, LayerReport, check_grams, weight_layers
from hfedatm_core.tensors import State
from hfedatm_core.update import Update

Reference = Literal["first", "previous", "medoid"]
Coefficients = Literal["clients", "examples"]


@dataclass(frozen=True)
class GroupReport:
    """How one channel group of one station was aligned."""

    moved: int
    cost: float
    identity_cost: float


@dataclass(frozen=True)
class MergeReport:
    """What a merge did: per station and channel group, and per layer."""

    reference: str
    stations: dict[str, dict[str, GroupReport]]
    layers: dict[str, LayerReport]

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Merged:
    """The merged state, the report, and every station's permutation per channel group.

    Channel ``i`` of the merged model is channel ``permutations[station][group][i]`` of the station.
    ``average`` is the weighted mean of the aligned stations, before RegMean.
    """

    state: dict[str, Tensor]
    report: MergeReport
    permutations: dict[str, dict[str, Tensor]]
    average: dict[str, Tensor] = field(default_factory=dict)

    @property
    def moved(self) -> int:
        """Number of channels that alignment put elsewhere, over all stations and groups."""
        stations = self.report.stations.values()
        return sum(group.moved for groups in stations for group in groups.values())


def merge(
    updates: Iterable[Update] | Callable[[], Iterable[Update]],
    graph: ChannelGraph | None = None,
    *,
    fot: bool = True,
    regmean: bool = True,
    reference: Reference = "first",
    previous: State | None = None,
    coefficients: Coefficients = "clients",
    ridge: float = 1e-6,
    solver: Solver = "sinkhorn",
    scope: Scope = "conv",
    reg: float = 0.05,
    iterations: int = 25,
    margin: float = 0.0,
    pool_variances: bool = False,
) -> Merged:
    """Merge station models into one, reading one update at a time.

    Every station is aligned to the reference, ``W̃_e = Π_e(W_e)`` and ``G̃_e = Π_e G_e Π_eᵀ``. Layers
    for which every station sent a Gram are merged by RegMean,

        (Σ γ_e G̃_e + λ I) Wᵀ = Σ γ_e G̃_e W̃_eᵀ + λ W̄ᵀ,

    all other tensors by the mean ``W̄`` weighted by the number of examples. A Gram collected with
    the constant input of the bias (``in_features + 1``) merges the bias along with the weight.

    Parameters
    ----------
    updates
        The stations; an iterator is read once. ``reference="medoid"`` needs several passes, hence a
        sequence or a function that returns a new iterator.
    graph
        The network's channel groups; needed when ``fot``.
    fot, regmean
        Switch the two parts; with both off this is the weighted mean.
    reference
        ``"first"``: the first update; ``"previous"``: the state given as ``previous``;
        ``"medoid"``: the update with the smallest summed cost of aligning all others to it.
    coefficients
        ``γ_e``: the station's number of clients or of examples.
    ridge
        Relative ridge of RegMean, see :func:`regmean`.
    solver, scope, reg, iterations, margin
        Passed to :func:`align`.
    pool_variances
        Merge BatchNorm's running variances as those of one data set made of the stations', which
        adds how far their running means lie apart, instead of taking the mean.
    """
    if fot and graph is None:
        raise ValueError("fot needs the channel graph: pass ChannelGraph.trace(model, (inputs,))")
    if coefficients not in get_args(Coefficients) or reference not in get_args(Reference):
        raise ValueError(f"unknown coefficients={coefficients!r} or reference={reference!r}")
    if reference == "previous" and previous is None:
        raise ValueError("reference='previous' needs the last global model as previous=state")

    def aligner_to(target: State) -> Aligner | None:
        if not fot or graph is None:
            return None
        return Aligner(target, graph, solver, scope, reg, iterations, margin)

    aligner: Aligner | None = None
    layers: LayerMerger | None = None
    target: State | None = previous if reference == "previous" else None
    target_name: str = reference
    if reference == "medoid" and fot:
        target_name, target = _medoid(updates, aligner_to)
    mean = MeanAccumulator()
    stations: dict[str, dict[str, GroupReport]] = {}
    permutations: dict[str, dict[str, Tensor]] = {}
    for who, update in _named(updates):
        if who in stations:
            raise ValueError(f"two updates are named '{who}'; give every station its own name")
        if not stations:
            if target is None or not fot:  # without alignment there is nothing to refer to
                check_finite(update.state, who)
                target_name, target = who, update.state
            aligner = aligner_to(target)
            layers = LayerMerger(target) if regmean else None
        aligned = _align(aligner, update, who)
        state = to_second_moments(aligned.state) if pool_variances else aligned.state
        # The aligner has compared the station with the reference.
        mean.add(state, update.num_examples * update.share, who, checked=aligner is not None)
        if layers is not None:
            if aligner is None:  # which checks its Grams itself
                check_grams(update.grams, update.state, who)
            gamma = update.num_clients if coefficients == "clients" else update.num_examples
            layers.add(who, aligned.state, aligned.grams, gamma * update.share)
        stations[who] = _group_reports(aligned)
        permutations[who] = aligned.permutations
        del update, aligned, state  # so that two updates never meet in memory
    if not stations:
        raise ValueError("cannot merge: the list of updates is empty")
    merged = mean.result()
    if pool_variances:
        merged = to_variances(merged)
    average = dict(merged)
    if layers is None:
        report = dict.fromkeys(weight_layers(merged), LayerReport("averaged", "RegMean is off"))
    else:
        report = layers.finish(merged, ridge)
    return Merged(merged, MergeReport(target_name, stations, report), permutations, average)


def _align(aligner: Aligner | None, update: Update, who: str) -> Alignment:
    """Return the update in the reference's channel order, or as it is without an aligner."""
    if aligner is None:
        return Alignment(dict(update.state), dict(update.grams), {}, {}, {}, {})
    try:
        aligned = aligner(update.state, update.grams)
    except ValueError as error:
        raise ValueError(f"{who}: {error}") from error
    if update.reach is None or not any(aligned.moved.values()):
        return aligned
    moved = {n: v for n, v in aligned.state.items() if v is not update.state[n]}
    return aligned if update.reach.holds(moved) else _in_place(aligned, update)


def _in_place(aligned: Alignment, update: Update) -> Alignment:
    """Return what the alignment would be without any permutation."""
    same = {group: torch.arange(len(index)) for group, index in aligned.permutations.items()}
    unmoved, cost = dict.fromkeys(aligned.moved, 0), aligned.identity_cost
    return Alignment(dict(update.state), dict(update.grams), same, unmoved, cost, cost)


def _named(
    updates: Iterable[Update] | Callable[[], Iterable[Update]],
) -> Iterator[tuple[str, Update]]:
    source = updates() if callable(updates) else updates
    for number, update in enumerate(source):
        yield update.name or f"station-{number}", update
        del update


def _group_reports(alignment: Alignment) -> dict[str, GroupReport]:
    return {
        group: GroupReport(
            int(moved), float(alignment.cost[group]), float(alignment.identity_cost[group])
        )
        for group, moved in alignment.moved.items()
    }


def _medoid(
    updates: Iterable[Update] | Callable[[], Iterable[Update]],
    aligner_to: Callable[[State], Aligner | None],
) -> tuple[str, State | None]:
    """Return the state to which the others are aligned at the smallest summed cost."""
    if not callable(updates) and not isinstance(updates, Sequence):
        raise ValueError(
            "reference='medoid' reads the updates several times: pass a sequence, or a function "
            "that returns a new iterator, instead of an iterator"
        )
    best: tuple[float, str, State | None] = (float("inf"), "", None)
    for name, candidate in _named(updates):
        check_finite(candidate.state, name)
        aligner = aligner_to(candidate.state)
        total = sum(
            sum(_align(aligner, replace(update, grams={}), who).cost.values())
            for who, update in _named(updates)
            if who != name
        )
        if total < best[0]:
            best = (total, name, candidate.state)
    return best[1:]
