r"""Compare channels by their outputs on the networks' data, which follow from the Grams.

Two channels with the same outputs need not have similar filters: filters that differ only where the
input has no energy compute the same. With the covariance :math:`C` of a layer's input, pooled over
both networks, the outputs of the rows :math:`w_a` and :math:`w_b` correlate by

.. math:: \frac{w_a^\top C w_b}{\sqrt{w_a^\top C_a w_a \; w_b^\top C_b w_b}}, \qquad
    C = \tfrac12 (C_a + C_b).

Layers that read the channels are compared by their weights: by the cosine of the slices of the
reader's weight, each entry times the root of the energy of the input it is multiplied by.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from hfedatm_core.channels.graph import ChannelGraph
from hfedatm_core.channels.groups import ChannelGroup, Member
from hfedatm_core.fot.costs.base import Orders, dissimilarity, summed_blocks
from hfedatm_core.grams.gram import Gram
from hfedatm_core.grams.layer_moments import centred, covariance_product
from hfedatm_core.tensors import State, times_transposed

# A variance below this share of the layer's mean variance is rounding: the unit is constant.
_CONSTANT = 1e-10


class GramSide:
    """One network as the cost needs it: its weights, and products with its Grams.

    Parameters
    ----------
    state
        The folded network, see :func:`hfedatm_core.apart.folding.fold`.
    grams
        Grams of all layers, with the constant input. A layer without a Gram is compared as if its
        inputs had unit variance and no correlation.
    outputs
        Products ``[W b] G`` of layers, by name of the layer, if they are known.
    """

    def __init__(
        self,
        state: State,
        grams: Mapping[str, Gram],
        outputs: Mapping[str, Tensor] | None = None,
    ) -> None:
        known = outputs or {}
        self.state = state
        self.products: dict[str, Tensor] = {}
        self.variances: dict[str, Tensor] = {}
        self.energies: dict[str, Tensor] = {}
        for name, layer, weight in _layers(state):
            rows = _work(weight).flatten(1)
            gram = grams.get(layer)
            if gram is None:
                product, energy = rows, torch.ones(rows.shape[1], dtype=rows.dtype)
            else:
                product = (
                    centred(known[layer], gram)
                    if layer in known and gram.dim > rows.shape[1]
                    else covariance_product(rows, gram)
                )
                energy = gram.diagonal()[..., : rows.shape[1]]
            self._keep(name, weight, product, energy)

    @classmethod
    def of_means(
        cls, state: State, products: Mapping[str, Tensor], energies: Mapping[str, Tensor]
    ) -> GramSide:
        """Return the mean of several networks; products and energies are means by layer."""
        side = cls({}, {})
        side.state = state
        for name, layer, weight in _layers(state):
            rows = _work(weight).flatten(1)
            energy = energies.get(layer, torch.ones(rows.shape[1]))
            side._keep(name, weight, products.get(layer, rows), energy)
        return side

    def _keep(self, name: str, weight: Tensor, product: Tensor, energy: Tensor) -> None:
        rows = _work(weight).flatten(1)
        product = product.to(rows.dtype)
        variance = (product * rows).sum(1).clamp(min=0.0)
        floor = _CONSTANT * float(variance.mean()) if variance.numel() else 0.0
        self.products[name] = product.view(weight.shape)
        self.variances[name] = torch.where(variance > floor, variance, 0.0)
        self.energies[name] = energy.to(rows.dtype).clamp(min=0.0).sqrt()


class GramCost:
    """Compares writers by the correlation of their outputs, readers by the cosine of weights."""

    def __init__(self, reference: GramSide, station: GramSide, graph: ChannelGraph) -> None:
        self._ours, self._theirs, self._graph = reference, station, graph

    def members(self, group: ChannelGroup) -> Sequence[Member]:
        """Return all weights that write or read the group."""
        return [m for m in group.members if m.tensor in self._ours.products]

    def between(self, group: ChannelGroup, member: Member, orders: Orders) -> Tensor:
        """Return one minus the correlation for a writer, one minus the cosine for a reader."""
        if member.role == "filter":
            return self._writers(group, member, orders)
        return self._readers(group, member, orders)

    def paired(self, group: ChannelGroup, member: Member, orders: Orders) -> float:
        """Return the mean correlation of the matched channels that one tensor writes.

        Channels that are dead in either network do not count.
        """
        name, rows = member.tensor, _rows(group, member)

        def ordered(tensor: Tensor) -> Tensor:
            for axis in range(min(2, tensor.dim())):
                tensor = self._graph.permute_axis(name, tensor, axis, orders)
            return tensor.reshape(len(tensor), -1)[rows]

        ours, theirs = self._ours, self._theirs
        weights, products = _work(ours.state[name]).flatten(1), ours.products[name].flatten(1)
        both = (products[rows] * ordered(_work(theirs.state[name]))).sum(1)
        both += (weights[rows] * ordered(theirs.products[name])).sum(1)
        energy = ours.variances[name][rows] * ordered(theirs.variances[name])[:, 0]
        alive = energy > 0
        if not bool(alive.any()):
            return 0.0
        return float((both[alive] / 2 * energy[alive].rsqrt()).clamp(-1.0, 1.0).mean())

    def _writers(self, group: ChannelGroup, member: Member, orders: Orders) -> Tensor:
        name, rows = member.tensor, _rows(group, member)
        ours, theirs = self._ours, self._theirs
        rest = self._of_partners(group, member, orders)

        def ordered(tensor: Tensor) -> Tensor:
            tensor = self._graph.permute_axis(name, tensor, 1, orders)
            return self._graph.permute_axis(name, tensor, 0, rest).flatten(1)[rows]

        weights, products = _work(ours.state[name]).flatten(1), ours.products[name].flatten(1)
        both = times_transposed(products[rows], ordered(_work(theirs.state[name])))
        both += times_transposed(weights[rows], ordered(theirs.products[name]))
        shape = (group.size, member.block)
        return dissimilarity(
            summed_blocks(both / 2, *shape),
            ours.variances[name][rows].view(shape).sum(1),
            self._graph.permute_axis(name, theirs.variances[name], 0, rest)[rows]
            .view(shape)
            .sum(1),
        )

    def _readers(self, group: ChannelGroup, member: Member, orders: Orders) -> Tensor:
        name = member.tensor
        theirs = _work(self._theirs.state[name])
        theirs = self._graph.permute_axis(name, theirs, 0, orders)
        one = _slices(_work(self._ours.state[name]), self._ours.energies[name], group, member)
        energy = self._theirs.energies[name].view(1, theirs.shape[1], -1)
        rest = self._of_partners(group, member, orders)
        theirs, energy = (self._graph.permute_axis(name, t, 1, rest) for t in (theirs, energy))
        other = _slices(theirs, energy, group, member)
        return dissimilarity(
            times_transposed(one, other), one.square().sum(1), other.square().sum(1)
        )

    def _of_partners(self, group: ChannelGroup, member: Member, orders: Orders) -> Orders:
        partners = self._graph.partners(group, member)
        return {name: orders[name] for name in partners if name in orders}


def _layers(state: State) -> Iterator[tuple[str, str, Tensor]]:
    """Yield the tensors to compare with their names, and the names of their layers."""
    for name, weight in state.items():
        if name.endswith("weight") and weight.dim() >= 2:  # also `in_proj_weight`
            yield name, name.removesuffix(".weight"), weight


def _rows(group: ChannelGroup, member: Member) -> slice | Tensor:
    if member.places is not None:
        return member.positions(group.size).flatten()
    return slice(member.offset, member.offset + group.size * member.block)


def _slices(weight: Tensor, energy: Tensor, group: ChannelGroup, member: Member) -> Tensor:
    """Return, per channel, the reader's weights of it, times the root of the input's energy."""
    inputs = weight.shape[1]
    scaled = weight.reshape(len(weight), inputs, -1) * energy.view(1, inputs, -1)
    taken = scaled[:, _rows(group, member)].reshape(len(weight), group.size, -1)
    return taken.transpose(0, 1).flatten(1)


def _work(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", torch.promote_types(tensor.dtype, torch.float32))
