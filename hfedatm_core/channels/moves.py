"""Layouts after operations that only move data: reshape, permute, slice, concatenate."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hfedatm_core.channels.atoms import Atoms
from hfedatm_core.channels.layouts import ChannelLayout, Column, active, along, components, within


def lifted(layout: ChannelLayout, ndim: int) -> ChannelLayout:
    """Return the layout of a tensor to which dimensions were added in front."""
    return tuple(column.reshape((1,) * (ndim - column.ndim) + column.shape) for column in layout)


def reshaped(
    atoms: Atoms, layout: ChannelLayout, old: Sequence[int], new: Sequence[int]
) -> ChannelLayout:
    """Return the layout after a row-major reshape."""
    runs = _runs(old, new)
    found = []
    for column in atoms.resolve(layout):
        dims = set(active(column))
        touched = [run for run in runs if dims & set(run[0])]
        wide, final = [1] * len(old), [1] * len(new)
        for before, after in touched:
            for dim in before:
                wide[dim] = old[dim]
            for dim in after:
                final[dim] = new[dim]
        found.append(np.broadcast_to(column, wide).reshape(final))
    return _tidied(atoms, atoms.shrunk(tuple(found)), new)


def _tidied(atoms: Atoms, layout: ChannelLayout, shape: Sequence[int]) -> ChannelLayout:
    """Describe dimensions without any free channel by their positions alone."""
    found: list[Column] = []
    for dims in components(layout):
        columns = within(layout, dims)
        if any(atoms.is_free(column).any() for column in columns):
            found.extend(columns)
        else:
            found.extend(atoms.fixed([n if d in dims else 1 for d, n in enumerate(shape)]))
    return tuple(found)


def _runs(old: Sequence[int], new: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """Pair the smallest runs of dimensions with the same number of elements before and after."""
    runs: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(old) or j < len(new):
        before: list[int] = []
        after: list[int] = []
        left = right = 1
        while not (before or after) or left != right:
            if i < len(old) and (left <= right or j >= len(new)):
                before.append(i)
                left *= old[i]
                i += 1
            elif j < len(new):
                after.append(j)
                right *= new[j]
                j += 1
            else:
                break
        if left == right == 1 and runs:  # dimensions of size one belong to any run
            runs[-1][0].extend(before)
            runs[-1][1].extend(after)
        else:
            runs.append((before, after))
    return runs


def transposed(layout: ChannelLayout, order: Sequence[int]) -> ChannelLayout:
    """Return the layout after a permutation: the new dimension ``i`` is the old ``order[i]``."""
    return tuple(column.transpose(order) for column in layout)


def taken(layout: ChannelLayout, dim: int, wanted: slice) -> ChannelLayout:
    """Return the layout of a stretch of one dimension."""
    places = [slice(None)] * dim + [wanted]
    return tuple(c[tuple(places)] if c.shape[dim] > 1 else c for c in layout)


def without(layout: ChannelLayout, dims: Sequence[int]) -> ChannelLayout:
    """Return the layout after dimensions of size one were removed."""
    return tuple(column.squeeze(tuple(dims)) for column in layout)


def joined(
    atoms: Atoms, parts: Sequence[tuple[ChannelLayout, Sequence[int]]], dim: int, reason: str
) -> ChannelLayout:
    """Return the layout of a concatenation of tensors, each given by its layout and shape."""
    others: ChannelLayout = ()
    along_dim: list[list[Column]] = []
    for layout, shape in parts:
        layout = atoms.resolve(layout)
        columns = list(within(layout, (dim,)))
        if shape[dim] == 1 or not columns:
            columns.append(atoms.positions(shape[dim]).reshape(along(len(shape), dim)))
        along_dim.append(columns)
        rest = tuple(column for column in layout if column.shape[dim] == 1)
        others = atoms.unite(others, rest, [*shape[:dim], 1, *shape[dim + 1 :]], reason)
    found = []
    for place in range(max(map(len, along_dim))):
        pieces = []
        for columns, (_, shape) in zip(along_dim, parts, strict=True):
            nothing = np.zeros([1] * len(shape), np.int64)
            piece = columns[place] if place < len(columns) else nothing
            sizes = [shape[d] if d == dim else piece.shape[d] for d in range(len(shape))]
            pieces.append(np.broadcast_to(piece, sizes))
        full = [max(piece.shape[d] for piece in pieces) for d in range(pieces[0].ndim)]
        pieces = [
            np.broadcast_to(p, [p.shape[d] if d == dim else full[d] for d in range(p.ndim)])
            for p in pieces
        ]
        found.append(np.concatenate(pieces, dim))
    if all(active(column) == (dim,) for column in found):
        rows = np.stack([column.ravel() for column in found], -1)
        if len(np.unique(rows, axis=0)) < len(rows):  # the same channels occur several times
            part = np.repeat(np.arange(len(parts)), [shape[dim] for _, shape in parts])
            which = atoms.positions(len(parts))[part]
            found.insert(0, which.reshape(along(len(parts[0][1]), dim)))
    return (*others, *found)


def flat(layout: ChannelLayout, shape: Sequence[int]) -> ChannelLayout:
    """Return the layout of the flattened tensor: every column has one entry per element."""
    return tuple(np.broadcast_to(column, shape).ravel() for column in layout)
