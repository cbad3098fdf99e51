"""Columns and layouts, the tracer's description of the positions of a tensor.

A **column** is an array of atoms that can be broadcast to its tensor's shape; a **layout** is a
tuple of columns, outer before inner. See :mod:`hfedatm_core.channels.atoms`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

Column = NDArray[np.int64]
ChannelLayout = tuple[Column, ...]


def along(ndim: int, dim: int) -> tuple[int, ...]:
    """Return the shape of a column that depends on one dimension."""
    return tuple(-1 if d == dim else 1 for d in range(ndim))


def active(column: Column) -> tuple[int, ...]:
    """Return the dimensions that a column depends on."""
    return tuple(dim for dim, size in enumerate(column.shape) if size > 1)


def within(layout: ChannelLayout, dims: Iterable[int]) -> ChannelLayout:
    """Return the columns that depend on any of these dimensions."""
    wanted = set(dims)
    return tuple(column for column in layout if wanted & set(active(column)))


def components(layout: ChannelLayout) -> list[set[int]]:
    """Return the sets of dimensions that are connected by columns which depend on several."""
    found: list[set[int]] = []
    for column in layout:
        dims = set(active(column))
        tied = [other for other in found if other & dims]
        found = [other for other in found if not other & dims]
        if dims:
            found.append(dims.union(*tied))
    return found


def across(layout: ChannelLayout, part: set[int]) -> Column | None:
    """Return a column that depends on dimensions inside and outside of a part."""
    for column in layout:
        dims = set(active(column))
        if dims & part and dims - part:
            return column
    return None


def more_telling(one: ChannelLayout, other: ChannelLayout) -> ChannelLayout:
    """Return the layout that covers the other's dimensions (in a tie, the longer), or both."""
    ours, theirs = ({dim for c in layout for dim in active(c)} for layout in (one, other))
    if ours >= theirs and (ours > theirs or len(one) >= len(other)):
        return one
    return other if theirs >= ours else (*one, *other)


def rows(layout: ChannelLayout, sizes: Sequence[int]) -> Column:
    """Return the atoms of each position of a tensor of this shape as ``(positions, atoms)``."""
    return np.stack([np.broadcast_to(column, sizes).ravel() for column in layout], -1)
