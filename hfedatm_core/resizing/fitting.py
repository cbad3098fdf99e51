"""Bring one network into the shape of another network of its family, and back."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy

import torch
from torch import Tensor

from hfedatm_core.grams.gram import Gram
from hfedatm_core.grams.grouped import GroupedGram
from hfedatm_core.resizing.along import Piece, along
from hfedatm_core.resizing.architecture import Architecture
from hfedatm_core.resizing.depth import blocks
from hfedatm_core.resizing.grams import resized_gram
from hfedatm_core.resizing.identity import NoIdentity, identity_blocks
from hfedatm_core.resizing.pairing import NoFit, Pairing, Stretch, refusal
from hfedatm_core.resizing.plans import Plan, even_plan
from hfedatm_core.tensors import State


class Fit:
    """The way from a station's architecture to the target's and back.

    Attributes
    ----------
    pairs
        Tensor of the target -> tensor of the station.
    axes
        Tensor of the target and axis -> the channels on it.
    sizes
        Channel group of the target -> its number of channels in the target and in the station.
    plans
        Channel group of the target -> transport plan of its channels.
    absent
        Tensors of the target that the station does not have: it has no vote on them.
    extra
        Tensors of the station that have no place in the target: the merge leaves them out.

    Raises
    ------
    NoFit
        The architectures cannot be matched.
    """

    def __init__(
        self,
        target: Architecture,
        station: Architecture,
        plans: Mapping[str, Plan] | None = None,
        uneven: bool = False,
    ) -> None:
        self.target, self.station = target, station
        found = Pairing(target, station)
        self.pairs, self.absent, self.extra = found.pairs, found.absent, found.extra
        self.axes, self.sizes, self._theirs = found.axes, found.sizes, found.theirs
        wanted = {
            group: even_plan(*sizes, uneven=uneven and sizes[0] < sizes[1])
            for group, sizes in self.sizes.items()
        }
        self.plans: dict[str, Plan] = {**wanted, **(plans or {})}
        self._check_plans()

    def __str__(self) -> str:
        """Name both architectures."""
        return refusal(self.target, self.station)

    @property
    def is_same(self) -> bool:
        """Whether both have one shape, and all channels stay where they are."""
        return self.is_same_shape and all(plan.is_identity for plan in self.plans.values())

    @property
    def is_same_shape(self) -> bool:
        """Whether both architectures have the same tensors of the same shapes."""
        return self.target.shapes == self.station.shapes

    @property
    def is_exact(self) -> bool:
        """Whether the target can compute everything that the station's network computes."""
        return not self.extra and all(ours >= theirs for ours, theirs in self.sizes.values())

    @property
    def lacks(self) -> list[str]:
        """Blocks of the target that the station does not have."""
        return blocks(self.absent, set(self.target.shapes))

    def with_plans(self, plans: Mapping[str, Plan]) -> Fit:
        """Return the same way with other plans."""
        other = copy(self)
        other.plans = {**self.plans, **plans}
        other._check_plans()
        return other

    # --- states

    def up(self, state: State) -> dict[str, Tensor]:
        """Return a station's network in the target's shape.

        If ``is_exact``, both compute the same function in evaluation mode.
        """
        moved = {name: self._up(name, state[own]) for name, own in self.pairs.items()}
        moved |= self.identities()
        return {name: moved[name] for name in self.target.shapes}

    def down(self, state: State) -> dict[str, Tensor]:
        """Return a network of the target's shape in the station's shape."""
        moved = {own: self._down(name, state[name]) for name, own in self.pairs.items()}
        moved |= self._identities(self.station, self.extra, upwards=False)
        return {name: moved[name] for name in self.station.shapes}

    def lift(self, state: State, sent: State, previous: State) -> dict[str, Tensor]:
        """Return ``previous``, of the target's shape, after the station's training.

        The station trained from ``sent = down(previous)`` to ``state``. Its move is brought up, not
        its network: channels of the target that the station saw joined stay different. A variance
        is multiplied instead, so that it stays positive. A block that the station lacks stays.
        """
        lifted = dict(previous)
        for name, own in self.pairs.items():
            value, start = state[own], sent[own]
            if not value.is_floating_point() or self._stays(name):
                lifted[name] = value
            elif own.endswith("running_var"):
                lifted[name] = previous[name] * self._up(name, _ratio(value, start))
            else:
                lifted[name] = previous[name] + self._up(name, value - start)
        return lifted

    def identities(self) -> dict[str, Tensor]:
        """Return tensors with which the blocks that the station lacks change nothing."""
        return self._identities(self.target, self.absent, upwards=True)

    def up_grams(self, grams: Mapping[str, Gram]) -> dict[str, Gram]:
        """Return a station's Grams as those of the target's layers: ``G' = A G Aᵀ``.

        A Gram that cannot be brought up is left out.
        """
        return self._grams(grams, upwards=True)

    def down_grams(self, grams: Mapping[str, Gram]) -> dict[str, Gram]:
        """Return Grams of the target's layers as those of the station's: ``G = Bᵀ G' B``.

        Grams that were brought up come back unchanged if ``is_exact``.
        """
        return self._grams(grams, upwards=False)

    def _grams(self, grams: Mapping[str, Gram], upwards: bool) -> dict[str, Gram]:
        done: dict[tuple[object, ...], Gram | None] = {}
        found: dict[str, Gram] = {}
        for name, own in self.pairs.items():
            layer, of = (n.rpartition(".")[0] for n in ((name, own) if upwards else (own, name)))
            gram = grams.get(of) if name.endswith(".weight") else None
            if gram is None or len(self.target.shapes[name]) < 2:
                continue
            stretches = self.axes.get((name, 1), ())
            if all(self.plans[s.group].is_identity for s in stretches):
                if self._stays(name) or not isinstance(gram, GroupedGram):
                    found[layer] = gram
                continue
            key = (id(gram), tuple((s.group, s.ours.shape) for s in stretches))
            if key not in done:
                ours, theirs = self.target.shapes[name][1], self.station.shapes[own][1]
                patch = torch.Size(self.station.shapes[own][2:]).numel()
                pieces = [self._piece(s, upwards, reads=False) for s in stretches]
                channels = (ours, theirs) if upwards else (theirs, ours)
                done[key] = resized_gram(gram, pieces, channels, patch)
            if (resized := done[key]) is not None:
                found[layer] = resized
        return found

    def along(self, name: str, tensor: Tensor, axis: int, upwards: bool = True) -> Tensor:
        """Bring one axis of a tensor, by its name in the target, up to the target or down."""
        pieces = [self._piece(s, upwards, s.reads) for s in self.axes.get((name, axis), ())]
        shapes = self.target.shapes[name] if upwards else self.station.shapes[self.pairs[name]]
        return along(tensor, axis, shapes[axis], pieces)

    def join(self, name: str, tensor: Tensor, axis: int) -> Tensor:
        """Return means over the target's channels on an axis, one for each of the station's."""
        pieces = [self._piece(s, False, reads=False) for s in self.axes.get((name, axis), ())]
        return along(tensor, axis, self.station.shapes[self.pairs[name]][axis], pieces)

    # --- the axes

    def _check_plans(self) -> None:
        for group, sizes in self.sizes.items():
            if self.plans[group].sizes != sizes:
                raise ValueError(f"the plan of {group} must have the sizes {sizes}")

    def _piece(self, stretch: Stretch, upwards: bool, reads: bool) -> Piece:
        plan = self.plans[stretch.group]
        matrix = None
        if not plan.is_identity:
            rows, columns = plan.rows, plan.columns
            if upwards:
                matrix = columns.T if reads else rows
            else:
                matrix = rows.T if reads else columns
        ours, theirs = stretch.ours, stretch.theirs
        return Piece(matrix, ours, theirs) if upwards else Piece(matrix, theirs, ours)

    def _up(self, name: str, tensor: Tensor) -> Tensor:
        for axis in range(tensor.dim()):
            tensor = self.along(name, tensor, axis)
        return tensor

    def _down(self, name: str, tensor: Tensor) -> Tensor:
        for axis in range(tensor.dim()):
            tensor = self.along(name, tensor, axis, upwards=False)
        return tensor

    def _stays(self, name: str) -> bool:
        """Tell whether a tensor has one shape and one order in both networks."""
        return all(
            self.plans[stretch.group].is_identity
            for axis in range(len(self.target.shapes[name]))
            for stretch in self.axes.get((name, axis), ())
        )

    def _identities(
        self, arch: Architecture, names: tuple[str, ...], upwards: bool
    ) -> dict[str, Tensor]:
        if not names:
            return {}
        plans = self.plans
        if upwards:
            passing = {g: (p.rows, p.columns) for g, p in plans.items()}
        else:
            passing = {own: (plans[g].columns, plans[g].rows) for own, g in self._theirs.items()}
        try:
            return identity_blocks(arch, names, passing)
        except NoIdentity as error:
            raise NoFit(f"{self}: only one of them has {error}") from None


def _ratio(value: Tensor, start: Tensor) -> Tensor:
    return torch.where(start > 0, value / torch.where(start > 0, start, 1.0), 1.0)
