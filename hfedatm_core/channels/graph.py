"""The axes of tensors that share one channel space of a network.

A permutation ``p`` of the channels of a group keeps the network's function when every axis that
lives in that channel space is permuted with it: the filters that write the channels, their biases
and BatchNorm vectors, and the inputs of all layers that read them. A :class:`ChannelGraph` lists
those axes; :mod:`hfedatm_core.fot.alignment` decides on the permutations.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from hfedatm_core.channels.groups import OUTPUT, ChannelGroup, Member
from hfedatm_core.channels.norms import Norm
from hfedatm_core.channels.tracing import trace
from hfedatm_core.tensors import take


@dataclass(frozen=True)
class ChannelGraph:
    """The channel groups of a network in the order of the forward pass.

    Attributes
    ----------
    groups
        The groups that may be permuted; the inputs of a group's first producer come from earlier
        groups.
    frozen
        Module name -> the reason why the channels it writes (or, for an operation that is not
        understood, reads) must stay in their order.
    kernels
        Weights of convolutions, whose spatial size may differ between two models.
    norms
        Every BatchNorm that is part of the layer before it, in the order of the forward pass.
    lone_norms
        The name of every other BatchNorm -> the reason why it belongs to no layer.
    """

    groups: tuple[ChannelGroup, ...] = ()
    frozen: dict[str, str] = field(default_factory=dict)
    kernels: frozenset[str] = frozenset()
    norms: tuple[Norm, ...] = ()
    lone_norms: dict[str, str] = field(default_factory=dict)

    @classmethod
    def trace(
        cls, model: nn.Module, inputs: Tensor | Sequence[Any] | Mapping[str, Any]
    ) -> ChannelGraph:
        """Derive the groups of ``model`` from one example input.

        Nothing is computed: the tracer follows the model's operations on tensors without values,
        once in evaluation and once in training mode. A model that cannot be followed (because its
        control flow depends on values) gives a graph without groups, with the reason in
        :attr:`frozen`.

        Parameters
        ----------
        model
            Any module; it is not modified.
        inputs
            A tensor, or the positional (a tuple) or keyword (a mapping) arguments of
            ``model.forward``.

        Examples
        --------
        >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 2))
        >>> [group] = ChannelGraph.trace(net, (torch.zeros(1, 3, 8, 8),)).groups
        >>> group.name, group.size, [(m.tensor, m.axis, m.block) for m in group.members]
        ('0', 8, [('0.weight', 0, 1), ('0.bias', 0, 1), ('3.weight', 1, 36)])
        """
        return cls(*trace(model, inputs))

    def without(self, hidden: Collection[str]) -> ChannelGraph:
        """Return the graph for states that lack the hidden tensors: what they touch stays in order.

        The tracer follows only what is in the state, so it has other words for these modules.
        """
        if not hidden:
            return self
        modules = {name.rpartition(".")[0] for name in hidden}
        fixed = [g for g in self.groups if any(m.tensor in hidden for m in g.members)]
        reasons = dict.fromkeys(modules | {g.name for g in fixed}, "its weights are frozen")
        return replace(
            self,
            groups=tuple(group for group in self.groups if group not in fixed),
            frozen={**self.frozen, **reasons},
        )

    def permute(
        self, state: Mapping[str, Tensor], permutations: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Reorder channels on every axis that carries them; the network computes the same function.

        Parameters
        ----------
        state
            A ``state_dict`` or any other values per parameter (say, a momentum).
        permutations
            Group name -> permutation ``p``: channel ``i`` becomes the old channel ``p[i]``. A group
            that is not named stays as it is.
        """
        permuted = {}
        for name, tensor in state.items():
            for axis in range(tensor.dim()):
                tensor = self.permute_axis(name, tensor, axis, permutations)
            permuted[name] = tensor
        return permuted

    def permute_axis(
        self, name: str, tensor: Tensor, axis: int, permutations: Mapping[str, Tensor]
    ) -> Tensor:
        """Reorder one axis of the named tensor; return the tensor itself if nothing moves."""
        index = self.index(name, axis, tensor.shape[axis], permutations)
        return tensor if index is None else take(tensor, index, axis)

    def index(
        self, tensor: str, axis: int, length: int, permutations: Mapping[str, Tensor]
    ) -> Tensor | None:
        """Positions that permute one tensor axis, ``new = old.index_select(axis, index)``.

        Parameters
        ----------
        length
            Size of the axis.
        permutations
            As in :meth:`permute`.

        Returns
        -------
        Tensor or None
            ``None`` when nothing moves on this axis.
        """
        index: Tensor | None = None
        for group, member in self._by_axis.get((tensor, axis), ()):
            permutation = permutations.get(group.name)
            if permutation is None:
                continue
            if permutation.numel() == length and member.places is None:
                return permutation  # the usual case: nothing else on this axis
            places = member.positions(group.size)
            before = torch.arange(length) if index is None else index
            index = before.clone()
            index[places.flatten()] = before[places[permutation].flatten()]
        return index

    def groups_at(self, tensor: str, axis: int) -> tuple[str, ...]:
        """Names of the groups that one tensor axis belongs to."""
        return tuple(group.name for group, _ in self._by_axis.get((tensor, axis), ()))

    def partners(self, group: ChannelGroup, member: Member) -> tuple[str, ...]:
        """Names of other groups that may order the same positions as one member of a group.

        The groups of a grouped convolution as wholes and the channels within each of them are
        two channel groups on one axis: before filters are compared for one, they must be in the
        order of the other.
        """
        if member.places is None and member.block == 1:
            return ()
        names = self.groups_at(member.tensor, member.axis)
        return tuple(name for name in names if name != group.name)

    @property
    def unaligned(self) -> dict[str, str]:
        """Module name -> the reason why its channels are merged in the order they have.

        Empty when all is aligned. Outputs of the network are not listed: their order has a meaning.
        """
        return {name: reason for name, reason in self.frozen.items() if reason != OUTPUT}

    @cached_property
    def _by_axis(self) -> dict[tuple[str, int], list[tuple[ChannelGroup, Member]]]:
        table: dict[tuple[str, int], list[tuple[ChannelGroup, Member]]] = {}
        for group in self.groups:
            for member in group.members:
                table.setdefault((member.tensor, member.axis), []).append((group, member))
        return table
