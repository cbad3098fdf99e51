"""Trees of stations: an inner station combines its children into one update for the level above."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hfedatm_core.batch_norm import to_variances
from hfedatm_core.channels.graph import ChannelGraph
from hfedatm_core.fot.alignment import Aligner, GroupReport
from hfedatm_core.fot.options import DEFAULT, AlignmentOptions
from hfedatm_core.grams.gram import Gram
from hfedatm_core.merging import PRODUCTS, Coefficients, StationSum, named_updates
from hfedatm_core.regmean.layers import LayerMerger
from hfedatm_core.tensors import State
from hfedatm_core.update import Update


@dataclass(frozen=True)
class Combined:
    """The update of an inner station, with its children's alignment.

    ``stations`` and ``permutations`` are those of :class:`hfedatm_core.Merged`.
    """

    update: Update
    stations: dict[str, dict[str, GroupReport]] = field(default_factory=dict)
    permutations: dict[str, dict[str, Tensor]] = field(default_factory=dict)


def combine(
    updates: Iterable[Update] | Callable[[], Iterable[Update]],
    reference: State,
    graph: ChannelGraph | None = None,
    *,
    fot: bool = False,
    regmean: bool = False,
    coefficients: Coefficients = "clients",
    alignment: AlignmentOptions = DEFAULT,
    pool_variances: bool = False,
    name: str = "",
) -> Combined:
    """Sum the updates of an inner station's children, reading one at a time.

    The result is an update again: its state is the mean of the aligned children by examples, its
    Grams are ``Ḡ = Σ γ_e G̃_e / Σ γ_e``, and with ``regmean`` its state also holds, per layer with a
    Gram, the product ``Σ γ_e (W̃_e − P) G̃_e / Σ γ_e``. No equation is solved: only the merge at the
    top does that. So :func:`hfedatm_core.merge` of combined updates, with ``reference="previous"``
    and ``previous=P``, is the merge of all stations of the tree.

    Parameters
    ----------
    updates
        The children: stations, or (without ``fot``) combined updates themselves.
    reference
        ``P``, the same at every level: the order of the channels, and the pivot of the products.
    graph
        The network's channel groups; needed when ``fot``.
    fot
        Align the children to the reference; combined updates have been aligned already.
    regmean
        Keep what RegMean needs; otherwise Grams are dropped.
    coefficients, alignment, pool_variances
        As in :func:`hfedatm_core.merge`.
    name
        Name of the combined update.
    """
    if fot and graph is None:
        raise ValueError("fot needs the channel graph: pass ChannelGraph.trace(model, (inputs,))")
    aligner = Aligner(reference, graph, alignment) if fot and graph is not None else None
    layers = LayerMerger(reference) if regmean else None
    total = StationSum(aligner, layers, coefficients == "clients", pool_variances)
    examples = clients = 0.0
    for who, update in named_updates(updates):
        examples += update.num_examples * update.share
        clients += update.num_clients * update.share
        total.add(who, update)
        del update
    state = total.mean.result()
    if pool_variances:
        state = to_variances(state)
    grams: dict[str, Gram] = {}
    if layers is not None:
        grams, products = layers.means()
        state |= {PRODUCTS + layer: product for layer, product in products.items()}
    moved = sum(group.moved for groups in total.reports.values() for group in groups.values())
    update = Update(
        state,
        grams,
        num_examples=max(1, round(examples)),
        num_clients=max(1, round(clients)),
        name=name,
        moved=moved,
    )
    return Combined(update, total.reports, total.permutations)


def no_products(state: State, layers: Mapping[str, int]) -> dict[str, Tensor]:
    """Return products of zeros for layers with Grams of these widths, under their names."""
    return {
        PRODUCTS + name: torch.zeros(len(state[f"{name}.weight"]), width)
        for name, width in layers.items()
    }
