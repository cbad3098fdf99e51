"""Put the tensors and channels of two networks side by side, or say by name what does not fit."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from hfedatm_core.channels.groups import ChannelGroup, Member
from hfedatm_core.resizing.architecture import Architecture
from hfedatm_core.resizing.depth import match_layers


class NoFit(ValueError):
    """A network cannot be brought into the shape of another; the message names what differs."""


@dataclass(frozen=True)
class Stretch:
    """Channels of one group on one axis of a tensor, in both networks."""

    group: str
    reads: bool
    ours: Tensor
    theirs: Tensor


def refusal(target: Architecture, station: Architecture) -> str:
    """Return the beginning of a message about two architectures."""
    return f"{station.name} does not fit into {target.name}"


class Pairing:
    """The tensors and channels that two networks have in common.

    Attributes
    ----------
    pairs, absent, extra
        See :class:`hfedatm_core.resizing.depth.Layers`.
    axes
        Tensor of the target and axis -> the channels on it.
    sizes
        Channel group of the target -> its number of channels in the target and in the station.
    theirs
        Channel group of the station -> channel group of the target.
    """

    def __init__(self, target: Architecture, station: Architecture) -> None:
        self._target, self._station = target, station
        layers = match_layers(target, station)
        self.pairs, self.absent, self.extra = layers.pairs, layers.absent, layers.extra
        self.axes: dict[tuple[str, int], tuple[Stretch, ...]] = {}
        self.sizes: dict[str, tuple[int, int]] = {}
        self.theirs: dict[str, str] = {}
        if not self.pairs:
            raise self._refused("they have no layer in common")
        self._require_layers_of_norms()
        for name, own in self.pairs.items():
            self._pair(name, own)

    def _refused(self, why: str) -> NoFit:
        return NoFit(f"{refusal(self._target, self._station)}: {why}")

    def _require_layers_of_norms(self) -> None:
        """Refuse a norm without its layer: it is no block, and nothing else does its work."""
        for arch, names in ((self._target, set(self.absent)), (self._station, set(self.extra))):
            for norm in arch.graph.norms:
                if f"{norm.name}.running_mean" in names and f"{norm.layer}.weight" not in names:
                    raise self._refused(f"only {arch.name} has the norm {norm.name}")

    def _pair(self, name: str, own: str) -> None:
        ours, theirs = self._target.shapes[name], self._station.shapes[own]
        if len(ours) != len(theirs):
            raise self._refused(f"{name} has shape {ours}, {own} has {theirs}")
        for axis, (size, other) in enumerate(zip(ours, theirs, strict=True)):
            mine = _entries(self._target, name, axis)
            its = _entries(self._station, own, axis)
            if size == other and len(mine) != len(its):
                continue  # frozen in one of them: the order stays
            stretches = []
            rest, remainder = size, other
            for (group, member), (its_group, its_member) in zip(mine, its, strict=False):
                places = member.places is not None or its_member.places is not None
                if places and group.size == its_group.size:
                    continue
                if places or member.block != its_member.block:
                    raise self._refused(
                        f"the channels of {name} lie in groups, {_differ(ours, theirs)}"
                    )
                self._agree(group, its_group, name)
                rest -= group.size * member.block
                remainder -= its_group.size * its_member.block
                stretches.append(
                    Stretch(
                        group.name,
                        member.role == "input",
                        member.positions(group.size),
                        its_member.positions(its_group.size),
                    )
                )
            if rest != remainder or (len(mine) != len(its)):
                why = self._why_frozen(name, axis)
                raise self._refused(f"{name} has {_differ(ours, theirs)}{why}")
            if stretches:
                self.axes[name, axis] = tuple(stretches)

    def _agree(self, group: ChannelGroup, other: ChannelGroup, name: str) -> None:
        sizes = (group.size, other.size)
        if self.sizes.setdefault(group.name, sizes) != sizes:
            raise self._refused(
                f"{name} has {other.size} channels of {group.name}, other layers "
                f"{self.sizes[group.name][1]}"
            )
        self.theirs.setdefault(other.name, group.name)

    def _why_frozen(self, name: str, axis: int) -> str:
        layer = name.rpartition(".")[0]
        for arch in (self._target, self._station):
            if reason := arch.graph.frozen.get(layer):
                return f": {reason}"
        return "" if axis else ": these channels cannot be split or joined"


def _entries(arch: Architecture, name: str, axis: int) -> list[tuple[ChannelGroup, Member]]:
    found = [
        (group, member)
        for group in arch.graph.groups
        for member in group.members
        if member.tensor == name and member.axis == axis
    ]
    return sorted(found, key=lambda entry: entry[1].offset)


def _differ(ours: tuple[int, ...], theirs: tuple[int, ...]) -> str:
    return f"shape {theirs}, not {ours}"
