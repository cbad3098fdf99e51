r"""Find the plan of every channel group by what the channels compute.

The costs are those of :mod:`hfedatm_core.fot.costs.gram`, between different numbers of channels. A
layer of the station is compared in the target's space, one of the reference also in the station's:
with :math:`W_s' = W_s B^\top` and :math:`W_r' = W_r A` the covariance of two outputs is

.. math:: \tfrac12 \big( w_r C_r\, {w_s'}^\top + w_r' C_s\, w_s^\top \big),

so that no Gram is transported before all plans are known.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from hfedatm_core.apart.folding import fold
from hfedatm_core.fot.assignment import assign, rounding
from hfedatm_core.fot.costs.base import dissimilarity, summed_blocks
from hfedatm_core.fot.costs.gram import GramSide
from hfedatm_core.fot.options import AlignmentOptions
from hfedatm_core.grams.gram import Gram
from hfedatm_core.resizing.fitting import Fit
from hfedatm_core.resizing.pairing import Stretch
from hfedatm_core.resizing.plans import Plan, transport_plan
from hfedatm_core.tensors import State

SWEEPS = 6
"""Largest number of sweeps over the groups."""
_EXACT = AlignmentOptions(solver="exact", scope="all")
_Use = tuple[str, int, Stretch]  # a weight, its axis and the channels on it


def match_plans(
    fit: Fit,
    reference: State,
    state: State,
    grams: Mapping[str, Gram] | None = None,
    own_grams: Mapping[str, Gram] | None = None,
    *,
    leave: float = float("inf"),
) -> dict[str, Plan]:
    """Return a plan for every group: which channels of a station match those of the reference.

    Parameters
    ----------
    fit
        The way from the station's architecture to the target's.
    reference, state
        A network of the target's shape, and the station's.
    grams, own_grams
        Grams of all layers of the reference and of the station, with the constant input; without
        them channels are compared by their weights alone.
    leave
        The mean dissimilarity (1 less the correlation) at which a channel of the larger network
        stays without a partner rather than become another copy; by default none stays alone.
    """
    ours = GramSide(fold(reference, fit.target.graph), grams or {})
    theirs = GramSide(fold(state, fit.station.graph), own_grams or {})
    uses: dict[str, list[_Use]] = {group: [] for group in fit.sizes}
    for (name, axis), stretches in fit.axes.items():
        if axis < 2 and name in ours.products and fit.pairs[name] in theirs.products:
            for stretch in stretches:
                uses[stretch.group].append((name, axis, stretch))
    order = [g.name for g in fit.target.graph.groups if g.name in fit.sizes]
    unplaced = set(order)
    generator = torch.Generator().manual_seed(0)
    for number in range(SWEEPS):
        if number:
            order = [order[i] for i in torch.randperm(len(order), generator=generator).tolist()]
        changed = False
        for group in order:
            ready = [u for u in uses[group] if not unplaced & _others(fit, u)] or uses[group]
            unplaced.discard(group)
            if not ready:
                continue
            cost = sum(_cost(fit, ours, theirs, use) for use in ready)
            assert isinstance(cost, Tensor)
            plan = _chosen(cost, fit.plans[group], leave * len(ready))
            if not torch.equal(plan.mass, fit.plans[group].mass):
                fit = fit.with_plans({group: plan})
                changed = True
        if number and not changed:
            break
    return fit.plans


def _others(fit: Fit, use: _Use) -> set[str]:
    name, axis, _ = use
    return {stretch.group for stretch in fit.axes.get((name, 1 - axis), ())}


def _chosen(cost: Tensor, before: Plan, leave: float) -> Plan:
    """Return the cheapest plan; the plan before if that is as cheap."""
    tie = rounding(cost) * max(cost.shape)
    if cost.shape[0] == cost.shape[1]:
        order = assign(cost, _EXACT)
        best = Plan(torch.eye(len(cost), dtype=torch.float64)[order])
    else:
        best = transport_plan(cost, leave)

    def price(plan: Plan) -> float:
        alone = plan.mass.sum(1 if cost.shape[0] >= cost.shape[1] else 0) == 0
        paid = float((plan.mass.sign() * cost.double()).sum())
        return paid + (leave * float(alone.sum()) if bool(alone.any()) else 0.0)

    return before if price(before) <= price(best) + tie else best


def _cost(fit: Fit, ours: GramSide, theirs: GramSide, use: _Use) -> Tensor:
    name, _, stretch = use
    own = fit.pairs[name]
    if stretch.reads:
        one = _slices(_work(ours.state[name]), ours.energies[name], stretch.ours)
        lifted = fit.along(name, _work(theirs.state[own]), 0)
        other = _slices(lifted, theirs.energies[own], stretch.theirs)
        return dissimilarity(one @ other.T, one.square().sum(1), other.square().sum(1))
    mine, its = stretch.ours.flatten(), stretch.theirs.flatten()
    lifted = fit.along(name, _work(theirs.state[own]), 1).flatten(1)
    lowered = fit.along(name, _work(ours.state[name]), 1, upwards=False).flatten(1)
    both = ours.products[name].flatten(1)[mine] @ lifted[its].T
    both += lowered[mine] @ theirs.products[own].flatten(1)[its].T
    block = stretch.ours.shape[1]
    if block > 1:
        both = _diagonals(both, len(stretch.ours), len(stretch.theirs), block)
    return dissimilarity(
        both / 2,
        ours.variances[name][mine].view(-1, block).sum(1),
        theirs.variances[own][its].view(-1, block).sum(1),
    )


def _diagonals(matrix: Tensor, rows: int, columns: int, block: int) -> Tensor:
    if rows == columns:
        return summed_blocks(matrix, rows, block)
    return torch.diagonal(matrix.view(rows, block, columns, block), dim1=1, dim2=3).sum(-1)


def _slices(weight: Tensor, energy: Tensor, places: Tensor) -> Tensor:
    """Return, per channel, the weights that read it, times the root of the input's energy."""
    inputs = weight.shape[1]
    scaled = weight.reshape(len(weight), inputs, -1) * energy.view(1, inputs, -1)
    taken = scaled[:, places.flatten()].reshape(len(weight), len(places), -1)
    return taken.transpose(0, 1).flatten(1)


def _work(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", torch.promote_types(tensor.dtype, torch.float32))


def empty_from(fit: Fit, state: State, reference: State) -> dict[str, Tensor]:
    """Return a lifted state in which channels without a partner are the reference's.

    So they agree with the reference and do not pull the mean towards zero.
    """
    filled = dict(state)
    for name, tensor in state.items():
        mask = torch.zeros(tensor.shape, dtype=torch.bool)
        for axis in range(tensor.dim()):
            for stretch in fit.axes.get((name, axis), ()):
                alone = stretch.ours[fit.plans[stretch.group].empty].flatten()
                mask.index_fill_(axis, alone, True)
        if bool(mask.any()):
            filled[name] = torch.where(mask, reference[name].to(tensor.dtype), tensor)
    return filled
