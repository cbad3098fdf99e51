"""Find the channels that may change places: those that all tensors treat alike."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hfedatm_core.channels.atoms import Atoms
from hfedatm_core.channels.groups import Role
from hfedatm_core.channels.layouts import ChannelLayout, Column, active

_Hash = NDArray[np.uint64]


@dataclass(frozen=True)
class Axis:
    """The atoms along one axis of a stored tensor, as rows ``(positions, atoms)``."""

    tensor: str
    axis: int
    role: Role
    rows: Column


@dataclass(frozen=True)
class Stretch:
    """The positions of a cell's channels along an axis, ``places[channel]`` for each channel."""

    axis: Axis
    places: Column


class Cells:
    """Sets of channels that can be exchanged with each other without changing the network.

    Two channels can be exchanged when they stand at the same places of all axes, next to the same
    other atoms: then exchanging them maps every axis onto itself. Such exchanges generate all
    permutations within a cell, whatever happens in the other cells.

    Attributes
    ----------
    of
        Atom -> its cell, -1 for an atom that must keep its place.
    sizes
        Channels of each cell.
    """

    def __init__(self, atoms: Atoms, axes: Sequence[Axis], kept: Sequence[Column]) -> None:
        for axis in axes:
            _freeze_repetitions(atoms, axis)
        alike = np.zeros(atoms.count, np.uint64)
        for number, rows in enumerate((*(axis.rows for axis in axes), *kept)):
            for place, context in enumerate(_contexts(rows, number)):
                np.add.at(alike, rows[:, place], context)
        self._axes = axes
        used = np.unique(np.concatenate([np.zeros(0, np.int64), *(a.rows.ravel() for a in axes)]))
        used = used[atoms.is_free(used)]
        _, first, cell = np.unique(alike[used], return_index=True, return_inverse=True)
        order = np.argsort(np.argsort(first))  # cells in the order of their first atom
        cell = order[cell]
        self.of = np.full(atoms.count, -1)
        self.of[used] = cell
        self._rank = np.zeros(atoms.count, np.int64)
        self.sizes = np.bincount(cell, minlength=1)
        starts = np.concatenate([[0], np.cumsum(self.sizes)])
        by_cell = np.argsort(cell, kind="stable")
        self._rank[used[by_cell]] = np.arange(len(used)) - starts[cell[by_cell]]

    def stretches(self) -> Mapping[int, list[Stretch]]:
        """Return the stretches of each cell that has more than one channel."""
        found: dict[int, list[Stretch]] = {}
        for number, axis in enumerate(self._axes):
            for place, context in enumerate(_contexts(axis.rows, number)):
                for cell, places in self._places(axis.rows[:, place], context):
                    found.setdefault(cell, []).append(Stretch(axis, places))
        return found

    def _places(self, column: Column, context: _Hash) -> Iterator[tuple[int, Column]]:
        cells = self.of[column]
        for cell in np.unique(cells[cells >= 0]):
            size = int(self.sizes[cell])
            if size < 2:
                continue
            positions = np.flatnonzero(cells == cell)
            ranks = self._rank[column[positions]]
            by_place = positions[np.lexsort((positions, ranks))].reshape(size, -1)
            if (context[by_place] != context[by_place[:1]]).any():
                by_place = positions[np.lexsort((context[positions], ranks))].reshape(size, -1)
            yield int(cell), by_place


def rows_of(layout: ChannelLayout, dim: int) -> Column | None:
    """Return the atoms along a dimension as rows; ``None`` if a column depends on others, too."""
    columns = [column for column in layout if column.shape[dim] > 1]
    if not columns or any(len(active(column)) > 1 for column in columns):
        return None
    return np.stack([column.ravel() for column in columns], -1)


def _freeze_repetitions(atoms: Atoms, axis: Axis) -> None:
    """Freeze channels at several positions of an axis that no other atom distinguishes."""
    _, first, count = np.unique(axis.rows, axis=0, return_inverse=True, return_counts=True)
    twice = axis.rows[count[first.ravel()] > 1]
    if len(twice):
        reason = f"{axis.tensor} is used in two places whose channels cannot be matched"
        atoms.freeze(tuple(twice.T), reason)


def _contexts(rows: Column, number: int) -> Iterator[_Hash]:
    """Yield for each atom of the rows a hash of its context: the axis and the other atoms."""
    width = rows.shape[1]
    hashes = [_mix(rows[:, place] * 8 + place + 1) for place in range(width)]
    total = sum(hashes, np.zeros(len(rows), np.uint64))
    for place in range(width):
        salt = _mix(np.array([number * 8 + place], np.int64))
        yield _mix(_mix(total - hashes[place]) + salt)


def _mix(values: NDArray[np.int64] | _Hash) -> _Hash:
    """Spread values over 64 bits (splitmix64), so that different sets have different sums."""
    mixed = values.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))
