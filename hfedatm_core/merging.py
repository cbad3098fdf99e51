"""Merge station models: align channels (FOT), merge layers by RegMean, average other tensors."""

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
from hfedatm_core.fot.options import DEFAULT, AlignmentOptions
from hfedatm_core.regmean.closed_form import RidgeScale
from hfedatm_core.regmean.layers import LayerMerger, LayerReport, check_grams, weight_layers
from hfedatm_core.tensors import State
from hfedatm_core.update import Update

Reference = Literal["first", "previous", "medoid"]
Coefficients = Literal["clients", "examples"]


@dataclass(frozen=True)
class GroupReport:
    """The alignment of one channel group of one station."""

    moved: int
    cost: float
    identity_cost: float


@dataclass(frozen=True)
class LayerQuality:
    """The quality of one merged layer of networks that were trained apart.

    Attributes
    ----------
    correlation_before, correlation_after
        Mean correlation of the outputs of matched channels, before and after the alignment;
        ``None`` if no channels were matched.
    variance_before, variance_after
        Variance of the merged layer's outputs, before and after the repair, as a share of the
        variance of the stations' own outputs.
    """

    correlation_before: float | None = None
    correlation_after: float | None = None
    variance_before: float = 1.0
    variance_after: float = 1.0


@dataclass(frozen=True)
class MergeReport:
    """The report of a merge, per station and channel group, and per layer.

    ``unaligned`` gives, for every module whose channels could not be aligned, the reason why they
    were merged in the order they have. For networks that were trained apart, ``quality`` describes
    how well their layers match, and ``lone_norms`` gives, for every BatchNorm that is no part of a
    layer, the reason: its statistics are pooled and fit no network.
    """

    reference: str = ""
    stations: dict[str, dict[str, GroupReport]] = field(default_factory=dict)
    layers: dict[str, LayerReport] = field(default_factory=dict)
    unaligned: dict[str, str] = field(default_factory=dict)
    quality: dict[str, LayerQuality] = field(default_factory=dict)
    lone_norms: dict[str, str] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Merged:
    """The merged state, the report, and every station's permutation per channel group.

    For a rule that aligns nothing, only the state is set.

    Channel ``i`` of the merged model is channel ``permutations[station][group][i]`` of the station.
    ``average`` is the weighted mean of the aligned stations, before RegMean. ``graph`` is the given
    channel graph, from which :func:`layer_rows` describes layers.
    """

    state: dict[str, Tensor]
    report: MergeReport = field(default_factory=MergeReport)
    permutations: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    average: dict[str, Tensor] = field(default_factory=dict)
    graph: ChannelGraph = field(default_factory=ChannelGraph)

    @property
    def moved(self) -> int:
        """Number of channels that the alignment moved, over all stations and groups."""
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
    ridge_scale: RidgeScale = "mean",
    alignment: AlignmentOptions = DEFAULT,
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
        Switch the two parts on or off; with both off the result is the weighted mean.
    reference
        ``"first"``: the first update; ``"previous"``: the state given as ``previous``;
        ``"medoid"``: the update with the smallest summed cost of aligning all others to it.
    coefficients
        ``γ_e``: the station's number of clients or of examples.
    ridge, ridge_scale
        Relative ridge of RegMean and the scale it refers to, see :func:`regmean`.
    alignment
        Options of the alignment, see :func:`align`.
    pool_variances
        Merge BatchNorm's running variances into the variance of the united data of all stations,
        which includes the distance between their running means, instead of averaging them.
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
        return Aligner(target, graph, alignment)

    aligner: Aligner | None = None
    layers: LayerMerger | None = None
    target: State | None = previous if reference == "previous" else None
    target_name: str = reference
    if reference == "medoid" and fot:
        target_name, target = _medoid(updates, aligner_to)
    mean = MeanAccumulator()
    stations: dict[str, dict[str, GroupReport]] = {}
    permutations: dict[str, dict[str, Tensor]] = {}
    for who, update in named_updates(updates):
        if who in stations:
            raise ValueError(f"two updates are named '{who}'; give every station its own name")
        if not stations:
            if target is None or not fot:  # without FOT any reference will do
                check_finite(update.state, who)
                target_name, target = who, update.state
            aligner = aligner_to(target)
            layers = LayerMerger(target) if regmean else None
        aligned = _align(aligner, update, who)
        state = to_second_moments(aligned.state) if pool_variances else aligned.state
        # The aligner has compared the station with the reference.
        mean.add(state, update.num_examples * update.share, who, checked=aligner is not None)
        if layers is not None:
            if aligner is None:  # an aligner checks the Grams itself
                check_grams(update.grams, update.state, who)
            gamma = update.num_clients if coefficients == "clients" else update.num_examples
            layers.add(who, aligned.state, aligned.grams, gamma * update.share)
        stations[who] = _group_reports(aligned)
        permutations[who] = aligned.permutations
        del update, aligned, state  # frees them before the next is read
    if not stations:
        raise ValueError("cannot merge: the list of updates is empty")
    merged = mean.result()
    if pool_variances:
        merged = to_variances(merged)
    average = dict(merged)
    if layers is None:
        report = dict.fromkeys(weight_layers(merged), LayerReport("averaged", "RegMean is off"))
    else:
        report = layers.finish(merged, ridge, ridge_scale)
    unaligned = graph.unaligned if fot and graph is not None else {}
    done = MergeReport(target_name, stations, report, unaligned)
    return Merged(merged, done, permutations, average, graph or ChannelGraph())


def _align(aligner: Aligner | None, update: Update, who: str) -> Alignment:
    """Return the update in the reference's channel order, or unchanged without an aligner."""
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
    """Return the alignment with the identity in place of every permutation."""
    same = {group: torch.arange(len(index)) for group, index in aligned.permutations.items()}
    unmoved, cost = dict.fromkeys(aligned.moved, 0), aligned.identity_cost
    return Alignment(dict(update.state), dict(update.grams), same, unmoved, cost, cost)


def named_updates(
    updates: Iterable[Update] | Callable[[], Iterable[Update]],
) -> Iterator[tuple[str, Update]]:
    """Yield every update with its name, without keeping a reference to it."""
    number = 0
    for update in updates() if callable(updates) else updates:
        yield update.name or f"station-{number}", update
        del update
        number += 1  # enumerate() would keep an update until the next has arrived


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
    for name, candidate in named_updates(updates):
        check_finite(candidate.state, name)
        aligner = aligner_to(candidate.state)
        total = sum(
            sum(_align(aligner, replace(update, grams={}), who).cost.values())
            for who, update in named_updates(updates)
            if who != name
        )
        if total < best[0]:
            best = (total, name, candidate.state)
    return best[1:]
