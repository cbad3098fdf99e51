"""Channels while a network is being traced: which are identical, and which must keep their place.

Every position along every axis of every tensor is described by *atoms*. A convolution's filters get
one atom each; a layer that reads them later refers to the same atoms. A **column** is an array of
atoms that can be broadcast to its tensor's shape, and a **layout** is a tuple of columns, outer
before inner: together the columns describe each position. Behind a flatten, position ``c * 49 + i``
has the atoms ``(channel c, position i)``. Along a dimension that no column depends on, all
positions are alike.

Atom 0 means no atom; it fills up positions that need fewer atoms than their neighbours.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from hfedatm_core.channels.layouts import (
    ChannelLayout,
    Column,
    across,
    active,
    along,
    components,
    more_telling,
    rows,
    within,
)

POSITION = "it has an order of its own"
_WIDTH = 4  # the largest number of atoms that one atom may consist of


class Atoms:
    """A union-find of atoms; an atom may later become a tuple of atoms, or be frozen."""

    def __init__(self) -> None:
        self._count = 0
        self._parent = np.zeros(1024, np.int64)
        self._why = np.zeros(1024, np.int64)  # 0 means free, else the reason's index
        self._parts = np.zeros((1024, _WIDTH), np.int64)
        self._reasons = ["", POSITION]
        self._positions = self._new(1, 1)

    @property
    def count(self) -> int:
        """Number of atoms."""
        return self._count

    def new(self, count: int) -> Column:
        """Return new free atoms that are not united with any other."""
        return self._new(count, 0)

    def positions(self, count: int) -> Column:
        """Return the frozen atoms of positions whose order is fixed."""
        missing = count + 1 - len(self._positions)
        if missing > 0:
            self._positions = np.concatenate([self._positions, self._new(missing, 1)])
        return self._positions[1 : count + 1]

    def fixed(self, shape: Sequence[int]) -> ChannelLayout:
        """Return the layout of a tensor whose every dimension has a fixed order."""
        return tuple(
            self.positions(size).reshape(along(len(shape), dim))
            for dim, size in enumerate(shape)
            if size > 1
        )

    def fresh(self, shape: Sequence[int]) -> ChannelLayout:
        """Return the layout of a tensor about which nothing is known yet."""
        return tuple(
            self.new(size).reshape(along(len(shape), dim))
            for dim, size in enumerate(shape)
            if size > 1
        )

    def find(self, column: Column) -> Column:
        """Return the representative of each atom: the smallest atom it is united with."""
        root = self._parent[column]
        while not np.array_equal(up := self._parent[root], root):
            root = up
        self._parent[column] = root
        return root

    def resolve(self, layout: ChannelLayout) -> ChannelLayout:
        """Return the layout with each atom replaced by its representative, or by its tuple."""
        return self.shrunk(tuple(part for column in layout for part in self._consists_of(column)))

    def _consists_of(self, column: Column) -> list[Column]:
        roots = self.find(column)
        split = self._parts[roots, 0] > 0
        if not split.any():
            return [roots]
        found: list[Column] = []
        for place in range(_WIDTH):
            part = np.where(split, self._parts[roots, place], 0 if place else roots)
            if part.any():
                found.extend(self._consists_of(part))
        return found

    def shrunk(self, layout: ChannelLayout) -> ChannelLayout:
        """Reduce every column to the dimensions along which its atoms really differ."""
        found, lost = [], set()
        for column in layout:
            dims = active(column)
            if len(dims) > 1:
                for dim in dims:
                    first = column.take([0], dim)
                    if (column == first).all():
                        column = first
                        lost.add(dim)
            if active(column) or not dims:
                found.append(column)
        for dim in lost - {dim for column in found for dim in active(column)}:
            size = max(column.shape[dim] for column in layout)
            found.append(self.positions(size).reshape(along(layout[0].ndim, dim)))
        return tuple(found)

    def is_free(self, column: Column) -> NDArray[np.bool_]:
        """Return a mask of the resolved atoms that may still move."""
        free: NDArray[np.bool_] = self._why[column] == 0
        return free

    def reason(self, atom: int) -> str:
        """Return the reason why a resolved atom is frozen; empty when it is free."""
        return self._reasons[int(self._why[atom])]

    def freeze(self, layout: ChannelLayout, reason: str) -> bool:
        """Fix the order of all atoms; return whether any of them was free before."""
        fresh = False
        for column in self.resolve(layout):
            free = np.unique(column[self.is_free(column)])
            if len(free):
                self._why[free] = self._number(reason)
                fresh = True
        return fresh

    def unite(
        self, one: ChannelLayout, other: ChannelLayout, shape: Sequence[int], reason: str
    ) -> ChannelLayout:
        """Unite two tensors of one shape position by position; freeze atoms that cannot be united.

        Returns
        -------
        ChannelLayout
            The layout of both. If only one of the two depends on a dimension, its columns are used.
        """
        one, other = self.resolve(one), self.resolve(other)
        found: list[Column] = []
        for dims in components((*one, *other)):
            ours, theirs = within(one, dims), within(other, dims)
            if ours and theirs:
                sizes = [shape[dim] if dim in dims else 1 for dim in range(len(shape))]
                self._unite(rows(ours, sizes), rows(theirs, sizes), reason)
            found.extend(more_telling(ours, theirs))
        return self.resolve(tuple(found))

    def separate(
        self, layout: ChannelLayout, parts: Iterable[Iterable[int]], reason: str
    ) -> ChannelLayout:
        """Return a layout in which each column depends on the dimensions of one part only.

        Channels that were spread over dimensions of several parts (attention heads and their
        units) become pairs of atoms, one for each part. Channels that cannot be split are frozen.
        """
        layout = self.resolve(layout)
        for part in map(set, parts):
            while (mixed := across(layout, part)) is not None:
                if not self._factor(mixed, sorted(part & set(active(mixed)))):
                    self.freeze((mixed,), reason)
                    layout = tuple(column for column in layout if column is not mixed)
                    layout += self.fixed(mixed.shape)
                layout = self.resolve(layout)
        return layout

    def tell_apart(self, layout: ChannelLayout) -> None:
        """Mark the atoms of a stretch that was cut out of a dimension as belonging to the stretch.

        Two stretches (the queries and keys in one weight) then stay distinct, even when the same
        tensor is united with both.
        """
        layout = self.resolve(layout)
        if len(layout) == 1:
            atoms = layout[0].reshape(-1, 1)
            mark = np.broadcast_to(self._new(1, 1), atoms.shape)
            self._bind(atoms, np.concatenate([self.new(len(atoms))[:, None], mark], 1))

    # --- private -------------------------------------------------------------------------------

    def _new(self, count: int, why: int) -> Column:
        start, self._count = self._count, self._count + count
        while self._count > len(self._parent):
            self._parent = np.concatenate([self._parent, np.zeros_like(self._parent)])
            self._why = np.concatenate([self._why, np.zeros_like(self._why)])
            self._parts = np.concatenate([self._parts, np.zeros_like(self._parts)])
        atoms = np.arange(start, self._count)
        self._parent[atoms], self._why[atoms] = atoms, why
        return atoms

    def _number(self, reason: str) -> int:
        if self._reasons[-1] != reason:
            self._reasons.append(reason)
        return len(self._reasons) - 1

    def _unite(self, one: Column, other: Column, reason: str) -> None:
        """Unite rows of atoms, ``(positions, atoms)``."""
        if one.shape == other.shape:
            for a, b in zip(one.T, other.T, strict=True):
                self._unite_atoms(a, b, reason)
        elif self._bind(one, other) or self._bind(other, one):
            return
        else:
            # One table is constant where the other has positions: compare only free channels.
            ours, theirs = (
                [column for column in table.T if self.is_free(column).any()]
                for table in (one, other)
            )
            if len(ours) == len(theirs):
                for a, b in zip(ours, theirs, strict=True):
                    self._unite_atoms(a, b, reason)
            elif not self._indifferent(one, other) and not self._indifferent(other, one):
                self.freeze((*ours, *theirs), reason)

    def _indifferent(self, one: Column, other: Column) -> bool:
        """Tell whether the second holds only positions that the fixed atoms of the first imply."""
        if (self._why[other] != 1).any():
            return False
        still = one[:, ~self.is_free(one).any(0)]
        both = np.concatenate([still, other], 1)
        return len(np.unique(still, axis=0)) == len(np.unique(both, axis=0))

    def _unite_atoms(self, one: Column, other: Column, reason: str) -> None:
        one, other = self.find(one), self.find(other)
        ours, theirs = self.is_free(one), self.is_free(other)
        for stuck, held, free in ((one, ~ours & theirs, other), (other, ours & ~theirs, one)):
            if held.any():
                why = self._why[stuck[held]]
                self._why[free[held]] = np.where(why == 1, self._number(reason), why)
        one, other = one[ours & theirs], other[ours & theirs]
        while True:
            one, other = self.find(one), self.find(other)
            low, high = np.minimum(one, other), np.maximum(one, other)
            if np.array_equal(low, high):
                return
            why = np.maximum(self._why[low], self._why[high])
            self._why[low], self._why[high] = why, why
            np.minimum.at(self._parent, high, low)

    def _bind(self, one: Column, tuples: Column) -> bool:
        """Define single atoms as tuples; return False unless all are distinct, free and whole."""
        if one.shape[1] != 1 or tuples.shape[1] > _WIDTH:
            return False
        atoms = one[:, 0]
        distinct = len(np.unique(atoms)) == len(atoms)
        if not distinct or not self.is_free(atoms).all() or np.isin(atoms, tuples).any():
            return False
        if (self._parts[atoms, 0] > 0).any():
            return False
        self._parts[atoms, : tuples.shape[1]] = tuples
        return True

    def _factor(self, column: Column, dims: list[int]) -> bool:
        """Split a column's atoms into pairs: one atom for ``dims`` and one for all other dims."""
        table = np.moveaxis(column, dims, range(len(dims)))
        table = table.reshape(int(np.prod(table.shape[: len(dims)])), -1)
        table = np.unique(np.unique(table, axis=0), axis=1)  # without repeated rows or columns
        outer, inner = self.new(table.shape[0]), self.new(table.shape[1])
        if dims[0] > min(set(active(column)) - set(dims)):
            pairs = np.stack(np.broadcast_arrays(inner[None, :], outer[:, None]), -1)
        else:
            pairs = np.stack(np.broadcast_arrays(outer[:, None], inner[None, :]), -1)
        return self._bind(table.reshape(-1, 1), pairs.reshape(-1, 2))
