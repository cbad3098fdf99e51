"""Index maps: where an alignment moved the channels, axis by axis, and how other tensors follow.

An alignment gives a station's channels the places that the reference's channels have. Whoever kept
values per channel in the station's order (a correction per weight, a table per unit) must give them
the new places as well. An :class:`IndexMap` needs no channel graph for that: it lists the order of
every moved axis of the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hfedatm_core.channels.graph import ChannelGraph
from hfedatm_core.tensors import State, take

Place = tuple[str, int]
"""One axis of one tensor of the model: its name and the axis."""
Follows = Mapping[str, Mapping[int, Place]]
"""Name of a kept tensor -> which of its axes are in the order of which axis of the model."""


@dataclass(frozen=True)
class IndexMap:
    """The orders of a model's moved axes.

    Attributes
    ----------
    orders
        Tensor and axis -> ``p``: position ``i`` of the new axis is position ``p[i]`` of the old.
        An axis that is not listed has not moved.
    """

    orders: Mapping[Place, Tensor] = field(default_factory=dict)

    @classmethod
    def of(
        cls, graph: ChannelGraph, permutations: Mapping[str, Tensor], model: Mapping[str, Tensor]
    ) -> IndexMap:
        """Return the map of permutations of channel groups; empty if they move nothing."""
        moving = {
            name: order
            for name, order in permutations.items()
            if not torch.equal(order, torch.arange(order.numel()))
        }
        orders = {}
        for name, tensor in model.items() if moving else ():
            for axis, length in enumerate(tensor.shape):
                order = graph.index(name, axis, length, moving)
                if order is not None:
                    orders[name, axis] = order
        return cls(orders)

    def __bool__(self) -> bool:
        """Tell whether anything moved."""
        return bool(self.orders)

    def moved(self, kept: State, model: Mapping[str, Tensor], follows: Follows) -> State:
        """Return kept tensors with their channels at the new places.

        A tensor follows the tensor of the model that it is named after, ``conv1.weight`` or with
        any prefix ``momentum.conv1.weight``, if it has the same shape.

        Parameters
        ----------
        kept
            Tensors in the old order.
        model
            The model, for its names and shapes.
        follows
            Axes of kept tensors that have other names or shapes.
        """
        return {name: self._one(name, value, model, follows) for name, value in kept.items()}

    def _one(
        self, name: str, value: Tensor, model: Mapping[str, Tensor], follows: Follows
    ) -> Tensor:
        if name in follows:
            axes = follows[name]
        else:
            like = _named_after(name, model)
            if like is None or model[like].shape != value.shape:
                return value
            axes = {axis: (like, axis) for axis in range(value.dim())}
        for axis, place in axes.items():
            order = self.orders.get(place)
            if order is None:
                continue
            if value.dim() <= axis or value.shape[axis] != len(order):
                raise ValueError(
                    f"{name} of shape {tuple(value.shape)} cannot follow axis {place[1]} of "
                    f"{place[0]}, which has {len(order)} positions"
                )
            value = take(value, order, axis)
        return value


def _named_after(name: str, model: Mapping[str, Tensor]) -> str | None:
    """Return the tensor of the model whose name is the longest end of ``name``."""
    while name and name not in model:
        name = name.partition(".")[2]
    return name or None
