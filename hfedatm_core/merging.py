"""Merge station models: align channels (FOT), merge layers by RegMean, average other tensors.

Every sum is additive, so a tree of any depth gives the merge of all its stations. With one fixed
reference ``P``, a station ``e`` contributes to

    Σ n_e,   Σ n_e W̃_e,   Σ γ_e,   Σ γ_e G̃_e,   Σ γ_e (W̃_e − P) G̃_e ,

and nothing else enters the merge. An inner station of a tree sends its sums upwards as means
(:func:`hfedatm_core.tiers.combine`), and the next level multiplies them by their weights again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

import torch
from torch import Tensor

from hfedatm_core.averaging import MeanAccumulator, check_finite
from hfedatm_core.batch_norm import to_second_moments, to_variances
from hfedatm_core.channels.graph import ChannelGraph
from hfedatm_core.fot.alignment import Aligner, Alignment, GroupReport
from hfedatm_core.fot.options import DEFAULT, AlignmentOptions
from hfedatm_core.merge_report import Merged, MergeReport
from hfedatm_core.regmean.closed_form import RidgeScale
from hfedatm_core.regmean.layers import LayerMerger, LayerReport, check_grams, weight_layers
from hfedatm_core.tensors import State
from hfedatm_core.update import Update

Reference = Literal["first", "previous", "medoid"]
Coefficients = Literal["clients", "examples"]


PRODUCTS = "products/"
"""Beginning of a product's name in the state of an update that stands for several stations."""
BELOW = "stations below"
"""Group under which a report counts the channels that were moved further down in the tree."""


def split_products(state: State) -> tuple[State, State]:
    """Return the weights and the products of a state."""
    products = {n.removeprefix(PRODUCTS): v for n, v in state.items() if n.startswith(PRODUCTS)}
    if not products:
        return state, {}
    return {n: v for n, v in state.items() if not n.startswith(PRODUCTS)}, products


@dataclass
class StationSum:
    """The sums over the stations added so far.

    Parameters
    ----------
    aligner
        Aligns a station to the reference; None leaves every station as it is.
    layers
        Sums for RegMean; None without RegMean.
    by_clients
        Whether ``γ_e`` is the number of clients; otherwise it is that of examples.
    pool_variances
        Whether BatchNorm's variances are summed as second moments.
    """

    aligner: Aligner | None
    layers: LayerMerger | None
    by_clients: bool = True
    pool_variances: bool = False
    mean: MeanAccumulator = field(default_factory=MeanAccumulator)
    reports: dict[str, dict[str, GroupReport]] = field(default_factory=dict)
    permutations: dict[str, dict[str, Tensor]] = field(default_factory=dict)

    def add(self, who: str, update: Update) -> None:
        """Add one station, or the sums of many."""
        if who in self.reports:
            raise ValueError(f"two updates are named '{who}'; give every station its own name")
        weights, products = split_products(update.state)
        aligned = align(self.aligner, update, who) if not products else unaligned(weights, update)
        state = to_second_moments(aligned.state) if self.pool_variances else aligned.state
        # The aligner has compared the station with the reference.
        compared = self.aligner is not None and not products
        self.mean.add(
            state,
            update.num_examples * update.share,
            who,
            checked=compared,
            absent=update.absent,
        )
        if self.layers is not None:
            if not compared:  # an aligner checks the Grams itself
                check_grams(update.grams, weights, who)
            gamma = update.num_clients if self.by_clients else update.num_examples
            weight = gamma * update.share
            self.layers.add(
                who,
                aligned.state,
                aligned.grams,
                weight,
                update.absent,
                products=products,
                examples=update.num_examples * update.share,
            )
        self.reports[who] = group_reports(aligned)
        if update.moved:
            self.reports[who][BELOW] = GroupReport(update.moved, 0.0, 0.0)
        self.permutations[who] = aligned.permutations


def align(aligner: Aligner | None, update: Update, who: str) -> Alignment:
    """Return the update in the reference's channel order, or unchanged without an aligner."""
    if aligner is None:
        return unaligned(update.state, update)
    try:
        aligned = aligner(update.state, update.grams)
    except ValueError as error:
        raise ValueError(f"{who}: {error}") from error
    if update.reach is None or not any(aligned.moved.values()):
        return aligned
    moved = {n: v for n, v in aligned.state.items() if v is not update.state[n]}
    return aligned if update.reach.holds(moved) else _in_place(aligned, update)


def unaligned(weights: State, update: Update) -> Alignment:
    """Return the update as it is."""
    return Alignment(dict(weights), dict(update.grams), {}, {}, {}, {})


def _in_place(aligned: Alignment, update: Update) -> Alignment:
    """Return the alignment with the identity in place of every permutation."""
    same = {group: torch.arange(len(index)) for group, index in aligned.permutations.items()}
    unmoved, cost = dict.fromkeys(aligned.moved, 0), aligned.identity_cost
    return Alignment(dict(update.state), dict(update.grams), same, unmoved, cost, cost)


def group_reports(alignment: Alignment) -> dict[str, GroupReport]:
    """Return the report of every channel group of one station."""
    return {
        group: GroupReport(
            int(moved), float(alignment.cost[group]), float(alignment.identity_cost[group])
        )
        for group, moved in alignment.moved.items()
    }


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

    total: StationSum | None = None
    target: State | None = previous if reference == "previous" else None
    target_name: str = reference
    if reference == "medoid" and fot:
        target_name, target = _medoid(updates, aligner_to)
    for who, update in named_updates(updates):
        if total is None:
            _, products = split_products(update.state)
            if products and target is None:
                raise ValueError(
                    f"{who} stands for several stations: pass reference='previous' and the model "
                    "to which they were aligned"
                )
            if target is None or not (fot or products):  # without FOT any reference will do
                check_finite(update.state, who)
                target_name, target = who, update.state
            total = StationSum(
                aligner_to(target),
                LayerMerger(target) if regmean else None,
                coefficients == "clients",
                pool_variances,
            )
        total.add(who, update)
        del update  # frees it before the next is read
    if total is None:
        raise ValueError("cannot merge: the list of updates is empty")
    merged = total.mean.result()
    if pool_variances:
        merged = to_variances(merged)
    average = dict(merged)
    if total.layers is None:
        report = dict.fromkeys(weight_layers(merged), LayerReport("averaged", "RegMean is off"))
    else:
        report = total.layers.finish(merged, ridge, ridge_scale)
    unaligned = graph.unaligned if fot and graph is not None else {}
    done = MergeReport(target_name, total.reports, report, unaligned)
    return Merged(merged, done, total.permutations, average, graph or ChannelGraph())


def named_updates(
    updates: Iterable[Update] | Callable[[], Iterable[Update]],
) -> Iterator[tuple[str, Update]]:
    """Yield every update with its name, without keeping a reference to it."""
    number = 0
    for update in updates() if callable(updates) else updates:
        yield update.name or f"station-{number}", update
        del update
        number += 1  # enumerate() would keep an update until the next has arrived


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
            sum(align(aligner, replace(update, grams={}), who).cost.values())
            for who, update in named_updates(updates)
            if who != name
        )
        if total < best[0]:
            best = (total, name, candidate.state)
    return best[1:]
