"""Channel spaces while a network is being traced: where they lie and which of them are one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hfedatm_core.channels.groups import Role


@dataclass(frozen=True)
class Segment:
    """``size`` channels of a space, each ``block`` positions wide."""

    space: int
    size: int
    block: int = 1

    @property
    def length(self) -> int:
        """Positions that the segment covers."""
        return self.size * self.block


@dataclass(frozen=True)
class ChannelLayout:
    """The axis of an activation that carries channels, and the spaces along it."""

    axis: int
    segments: tuple[Segment, ...]

    @property
    def length(self) -> int:
        """Size of the axis."""
        return sum(segment.length for segment in self.segments)

    def moved(self, axis: int) -> ChannelLayout:
        """Return the same channels on another axis."""
        return ChannelLayout(axis, self.segments)

    def stretched(self, factor: int) -> ChannelLayout:
        """Return the layout after every position became ``factor`` neighbouring positions."""
        segments = (Segment(s.space, s.size, s.block * factor) for s in self.segments)
        return ChannelLayout(self.axis, tuple(segments))


@dataclass(frozen=True)
class Binding:
    """What lies along one tensor axis; ``None`` when its order is fixed."""

    segments: tuple[Segment, ...] | None
    role: Role


class Spaces:
    """Channel spaces as a union-find, and the tensor axes bound to them."""

    def __init__(self) -> None:
        self.bindings: dict[tuple[str, int], Binding] = {}
        self._parent: list[int] = []
        self._reasons: dict[int, str] = {}

    def open(self, size: int) -> Segment:
        """Return a new space of ``size`` channels."""
        self._parent.append(len(self._parent))
        return Segment(self._parent[-1], size)

    def find(self, space: int) -> int:
        """Return the representative of a space: the first one opened among those united."""
        while self._parent[space] != space:
            space = self._parent[space]
        return space

    def reason(self, space: int) -> str | None:
        """Return why a space is frozen, ``None`` when it is free."""
        return self._reasons.get(self.find(space))

    def freeze(self, segments: Iterable[Segment], reason: str) -> bool:
        """Fix the order of channels; true when any of them was free (and has an order) before."""
        fresh = False
        for segment in segments:
            root = self.find(segment.space)
            fresh |= segment.size > 1 and root not in self._reasons
            self._reasons.setdefault(root, reason)
        return fresh

    def unite(self, one: Sequence[Segment], other: Sequence[Segment], reason: str) -> bool:
        """Make two runs of segments one; when they do not fit, freeze both for ``reason``."""
        if [(s.size, s.block) for s in one] != [(s.size, s.block) for s in other]:
            self.freeze((*one, *other), reason)
            return False
        for a, b in zip(one, other, strict=True):
            first, second = sorted((self.find(a.space), self.find(b.space)))
            if first == second:
                continue
            self._parent[second] = first
            if second in self._reasons:
                self._reasons.setdefault(first, self._reasons[second])
        return True

    def bind(
        self, tensor: str, axis: int, segments: tuple[Segment, ...] | None, role: Role
    ) -> None:
        """Say what lies along a tensor axis; a tensor used twice must agree with itself."""
        known = self.bindings.setdefault((tensor, axis), Binding(segments, role))
        reason = f"{tensor} is used in two places whose channels cannot be matched"
        if known.segments is not None and segments is not None:
            self.unite(known.segments, segments, reason)
        elif known.segments != segments:
            self.freeze((*(known.segments or ()), *(segments or ())), reason)
            self.bindings[tensor, axis] = Binding(None, role)
