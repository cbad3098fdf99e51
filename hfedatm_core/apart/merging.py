r"""Merge networks that were trained apart, from their weights and Grams alone.

1. *Fold* every BatchNorm into the layer before it (:mod:`hfedatm_core.apart.folding`).
2. *Match* the channels of each network to the mean of the networks before it, by the outputs of
   the channels (:mod:`hfedatm_core.fot.costs.gram`), and reorder them.
3. *RegMean* on all layers with their biases, on the augmented Grams.
4. *Repair* the spread of the units, which merging reduces (:mod:`hfedatm_core.apart.repairing`).
5. *Unfold*: restore the BatchNorms, with statistics that fit the merged network.

Networks that shared a start need none of these steps: see :func:`hfedatm_core.merging.merge`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import replace
from typing import get_args

import torch
from torch import Tensor

from hfedatm_core.apart.folding import Moments, fold, fold_graph, unfold
from hfedatm_core.apart.outputs import layer_outputs, permute_outputs, shrink_outputs
from hfedatm_core.apart.reference import Reference
from hfedatm_core.apart.repairing import OutputSums, layer_moments, repair_layer
from hfedatm_core.averaging import MeanAccumulator, check_finite, check_state
from hfedatm_core.batch_norm import to_second_moments, to_variances
from hfedatm_core.channels.graph import ChannelGraph
from hfedatm_core.channels.groups import OUTPUT
from hfedatm_core.fot.alignment import GroupReport, permute_grams
from hfedatm_core.fot.costs.base import Cost
from hfedatm_core.fot.costs.gram import GramCost, GramSide
from hfedatm_core.fot.costs.profile import ProfileCost
from hfedatm_core.fot.matching import Match
from hfedatm_core.fot.options import AlignmentOptions
from hfedatm_core.fot.sweeping import sweep
from hfedatm_core.grams.gram import Gram
from hfedatm_core.grams.layer_moments import is_augmented, layer_matrix, moments_of
from hfedatm_core.grams.sums import GramAccumulator
from hfedatm_core.merge_report import LayerQuality, Merged, MergeReport
from hfedatm_core.merging import Coefficients, named_updates
from hfedatm_core.profiles import Profiles
from hfedatm_core.regmean.layers import LayerMerger, check_grams
from hfedatm_core.tensors import State
from hfedatm_core.update import Update

APART = AlignmentOptions(solver="exact", scope="all")
"""The alignment of networks that were trained apart."""


def merge_apart(
    updates: Iterable[Update] | Callable[[], Iterable[Update]],
    graph: ChannelGraph,
    *,
    alpha: float | None = None,
    coefficients: Coefficients = "clients",
    ridge: float = 1e-6,
    alignment: AlignmentOptions = APART,
    repair: bool = True,
    keep_grams: bool = False,
) -> Merged:
    """Merge networks of one architecture that did not share a start, reading each once.

    Parameters
    ----------
    updates
        The networks, with the Grams that ``collect_grams(..., full=True)`` measures, *not* shrunk.
        A layer whose Gram is missing for any network is averaged, and not repaired. Networks with
        ``profiles`` (:func:`collect_profiles`) are also matched by them.
    graph
        The channel groups and norms of the architecture.
    alpha
        RegMean multiplies off-diagonal entries of Grams by it; matching and repair do not. By
        default ``n / (n + d)`` for a Gram of ``n`` rows and ``d`` features: few rows cause
        spurious correlations.
    coefficients, ridge
        As in :func:`merge`.
    alignment
        Options of the alignment; by default all units are aligned.
    repair
        Whether the spread of the units is restored.
    keep_grams
        Whether the result has the Grams of all networks together, in its order of the channels.

    Returns
    -------
    Merged
        Its channels are in the order of the first network; the report has, per layer, the
        correlation of matched channels and the variance, each before and after.
    """
    if coefficients not in get_args(Coefficients):
        raise ValueError(f"unknown coefficients={coefficients!r}")
    work = _Work(graph, alignment, alpha)
    for who, update in named_updates(updates):
        gamma = update.num_clients if coefficients == "clients" else update.num_examples
        work.add(who, update, gamma * update.share)
        del update  # frees it before the next one is read
    merged = work.finish(ridge, repair)
    return replace(merged, grams=work.grams) if keep_grams else merged


class _Work:
    """The state of a merge that reads one network at a time: sums, and the first network."""

    def __init__(
        self, graph: ChannelGraph, alignment: AlignmentOptions, alpha: float | None
    ) -> None:
        self._graph, self._folded = graph, fold_graph(graph)
        self._alignment, self._alpha = alignment, alpha
        self._first: State = {}
        self._name = ""
        self._mean = MeanAccumulator()
        self._pooled = GramAccumulator()
        self._reference = Reference()
        self._profiles: Profiles | None = None
        self._layers: LayerMerger | None = None
        self._sums: dict[str, OutputSums] = {}
        self._lacked: set[str] = set()  # layers that no network so far has
        self._correlations: dict[str, list[tuple[float, float]]] = {}
        self._stations: dict[str, dict[str, GroupReport]] = {}
        self._permutations: dict[str, dict[str, Tensor]] = {}

    def add(self, who: str, update: Update, gamma: float) -> None:
        """Align one network to the mean of the networks before it, and add it to the sums."""
        if who in self._stations:
            raise ValueError(f"two updates are named '{who}'; give every station its own name")
        if self._stations:
            check_state(update.state, self._first, who)
        else:
            check_finite(update.state, who)
            self._first, self._name = dict(update.state), who
        state = fold(update.state, self._graph)
        grams = {n: g for n, g in update.grams.items() if g.is_finite()}
        check_grams(grams, state, who, constant=True)
        outputs = layer_outputs(state, grams)
        matches = self._matched(state, grams, outputs, update.profiles)
        moving = {name: match.permutation for name, match in matches.items() if match.moved}
        grams = permute_grams(grams, state, self._folded, moving)
        outputs = permute_outputs(outputs, state, self._folded, moving)
        state = self._folded.permute(state, moving)
        if self._layers is None:
            # RegMean sums products of whole weights: its pivot is zero, and takes no memory.
            self._layers = LayerMerger({n: v.new_zeros(()).expand_as(v) for n, v in state.items()})
        weight = update.num_examples * update.share
        self._mean.add(to_second_moments(state), weight, who, checked=True, absent=update.absent)
        self._pooled.add(grams, gamma)
        self._reference.add(state, grams, outputs, gamma, update.absent)
        self._add_moments(state, grams, outputs, gamma, update.absent)
        shrunk, products = shrink_outputs(outputs, state, grams, self._alpha)
        self._layers.add(who, state, shrunk, gamma, update.absent, products)
        self._add_profiles(update.profiles, moving)
        self._stations[who] = {
            name: GroupReport(m.moved, m.cost, m.identity_cost) for name, m in matches.items()
        }
        self._permutations[who] = {name: m.permutation for name, m in matches.items()}

    @property
    def grams(self) -> dict[str, Gram]:
        """Return the Grams of all networks together."""
        return self._pooled.result() if self._sums else {}

    def finish(self, ridge: float, repair: bool) -> Merged:
        """Solve, repair and unfold."""
        if self._layers is None:
            raise ValueError("cannot merge: the list of updates is empty")
        pooled = self._pooled.result() if self._sums else {}
        folded = to_variances(self._mean.result())
        mixed = {
            norm.layer: layer_moments(folded, norm.layer, pooled[norm.layer])
            for norm in self._graph.norms
            if norm.layer in self._sums
        }
        average = unfold(folded, self._graph, self._first, mixed)
        report = self._layers.finish(folded, ridge)
        quality: dict[str, LayerQuality] = {}
        after: dict[str, Moments] = {}
        for layer, sums in self._sums.items():
            wanted = sums.moments()
            if repair and self._graph.frozen.get(layer) != OUTPUT:
                before, after[layer] = repair_layer(folded, layer, pooled[layer], wanted)
            else:
                before = after[layer] = layer_moments(folded, layer, pooled[layer])
            quality[layer] = self._quality(layer, wanted, before, after[layer])
        merged = MergeReport(
            self._name,
            self._stations,
            report,
            self._graph.unaligned,
            quality,
            dict(self._graph.lone_norms),
        )
        state = unfold(folded, self._graph, self._first, after)
        return Merged(state, merged, self._permutations, average, self._graph)

    def _matched(
        self,
        state: State,
        grams: Mapping[str, Gram],
        outputs: Mapping[str, Tensor],
        profiles: Profiles | None,
    ) -> dict[str, Match]:
        if not self._stations:
            groups = self._folded.groups
            return {g.name: Match(torch.arange(g.size), 0.0, 0.0) for g in groups}
        ours = self._reference.side(self._mean.current())
        cost = GramCost(ours, GramSide(state, grams, outputs), self._folded)
        chosen: Cost = cost
        if profiles is not None and self._profiles is not None:
            chosen = ProfileCost(cost, self._profiles, profiles)
        matches = sweep(self._folded, chosen, self._alignment)
        orders = {name: match.permutation for name, match in matches.items()}
        for group in self._folded.groups:
            for member in group.producers:
                if group.name in orders and member.tensor in ours.products:
                    pair = cost.paired(group, member, {}), cost.paired(group, member, orders)
                    layer = member.tensor.removesuffix(".weight")
                    self._correlations.setdefault(layer, []).append(pair)
        return matches

    def _add_moments(
        self,
        state: State,
        grams: Mapping[str, Gram],
        outputs: Mapping[str, Tensor],
        gamma: float,
        absent: Set[str],
    ) -> None:
        """Add the moments of the outputs of every layer of which all that have it have a Gram."""
        known = {n for n, g in grams.items() if is_augmented(g, state[f"{n}.weight"])}
        lacking = {n.removesuffix(".weight") for n in absent if n.endswith(".weight")}
        if self._stations:
            known &= self._sums.keys() | self._lacked
            known |= self._sums.keys() & lacking
        self._lacked = self._lacked & lacking if self._stations else lacking
        order = [*grams, *(name for name in self._sums if name not in grams)]
        self._sums = {name: self._sums.get(name, OutputSums()) for name in order if name in known}
        for layer, sums in self._sums.items():
            if layer in lacking:
                continue
            sums.add(*moments_of(outputs[layer], layer_matrix(state, layer)), gamma)

    def _add_profiles(self, profiles: Profiles | None, orders: Mapping[str, Tensor]) -> None:
        """Add the profiles to those of the networks before; one without any ends their use."""
        ordered = None if profiles is None else profiles.permute(orders)
        if self._stations:
            known = self._profiles
            ordered = None if known is None or ordered is None else known.pool(ordered)
        self._profiles = ordered

    def _quality(
        self, layer: str, wanted: Moments, before: Moments, after: Moments
    ) -> LayerQuality:
        pairs = self._correlations.get(layer, [])
        total = float(wanted.variance.sum())
        quality = LayerQuality(
            variance_before=float(before.variance.sum()) / total if total > 0 else 1.0,
            variance_after=float(after.variance.sum()) / total if total > 0 else 1.0,
        )
        if not pairs:
            return quality
        means = [sum(values) / len(pairs) for values in zip(*pairs, strict=True)]
        return replace(quality, correlation_before=means[0], correlation_after=means[1])
