"""Rules of the operations that only move data: reshape, permute, cut, join, look up."""

from __future__ import annotations

import numpy as np
import torch

from hfedatm_core.channels import moves
from hfedatm_core.channels.layouts import ChannelLayout, active, components, within
from hfedatm_core.channels.rules import Call, rule


@rule("view _unsafe_view reshape _reshape_alias")
def _reshape(call: Call) -> ChannelLayout:
    old, new = call["self"].shape, call.results[0].shape
    return moves.reshaped(call.atoms, call.layout("self"), old, new)


@rule("permute transpose t numpy_T movedim")
def _permute(call: Call) -> ChannelLayout:
    ndim = call["self"].ndim
    order = list(range(ndim))
    if "dims" in call.arguments:
        order = call.dims(call["dims"], ndim)
    elif ndim > 1:
        one, other = call.dims([call.arguments.get("dim0", 0), call.arguments.get("dim1", 1)], ndim)
        order[one], order[other] = other, one
    return moves.transposed(call.layout("self"), order)


@rule("unsqueeze squeeze squeeze_copy unsqueeze_copy")
def _ones(call: Call) -> ChannelLayout:
    shape, new = call["self"].shape, call.results[0].shape
    if "dim" in call.arguments and len(new) > len(shape):
        dim = call["dim"] % len(new)
        return tuple(c.reshape(*c.shape[:dim], 1, *c.shape[dim:]) for c in call.layout("self"))
    dims = call.dims(call.arguments.get("dim"), len(shape))
    return moves.without(call.layout("self"), [dim for dim in dims if shape[dim] == 1])


@rule("expand")
def _expand(call: Call) -> ChannelLayout:
    return moves.lifted(call.layout("self"), call.results[0].ndim)


@rule("slice select split split_with_sizes unsafe_split chunk unbind narrow")
def _stretches(call: Call) -> list[ChannelLayout]:
    """Cut one dimension into stretches; a channel of one stretch must stay in it."""
    source = call["self"]
    layout, dim = call.atoms.resolve(call.layout("self")), call["dim"] % source.ndim
    start, found = 0, []
    for result in call.results:
        single = result.ndim < source.ndim
        size, step = 1 if single else result.shape[dim], call.arguments.get("step", 1)
        if "index" in call.arguments:
            start = call["index"] % source.shape[dim]
        elif call.arguments.get("start") is not None:
            start = call["start"] if call["start"] >= 0 else call["start"] + source.shape[dim]
        part = moves.taken(layout, dim, slice(start, start + size * step, step))
        if size * step < source.shape[dim]:
            _keep(call, layout, dim, slice(start, start + size * step, step))
        found.append(moves.without(part, [dim]) if single else part)
        start += size
    return found


def _keep(call: Call, layout: ChannelLayout, dim: int, wanted: slice) -> None:
    """Register a stretch of one dimension, with all dimensions that are connected with it."""
    for dims in components(layout):
        if dim in dims:
            call.keep(moves.taken(within(layout, dims), dim, wanted))


@rule("flip roll")
def _turned(call: Call) -> ChannelLayout | None:
    if "shifts" in call.arguments and not call["dims"]:
        return None
    dims = call.dims(call["dims"], call["self"].ndim)
    found = []
    for column in call.layout("self"):
        for place, dim in enumerate(dims):
            if column.shape[dim] > 1:
                if "shifts" in call.arguments:
                    column = np.roll(column, call["shifts"][place], dim)
                else:
                    column = np.flip(column, dim)
        found.append(column)
    return tuple(found)


@rule("channel_shuffle native_channel_shuffle")
def _shuffle(call: Call) -> ChannelLayout:
    shape, groups = list(call["self"].shape), call["groups"]
    split = [shape[0], groups, shape[1] // groups, *shape[2:]]
    layout = moves.reshaped(call.atoms, call.layout("self"), shape, split)
    order = [0, 2, 1, *range(3, len(split))]
    turned = [split[dim] for dim in order]
    return moves.reshaped(call.atoms, moves.transposed(layout, order), turned, shape)


@rule("cat concat concatenate")
def _cat(call: Call) -> ChannelLayout:
    parts = [part for part in call["tensors"] if part.numel() or part.ndim > 1]
    dim = call["dim"] % parts[0].ndim
    described = [(call.layout_of(part), part.shape) for part in parts]
    return moves.joined(
        call.atoms, described, dim, f"its channels are joined with others in {call}"
    )


@rule("stack")
def _stack(call: Call) -> ChannelLayout:
    ndim = call.results[0].ndim
    dim = call["dim"] % ndim
    described = [
        (
            tuple(c.reshape(*c.shape[:dim], 1, *c.shape[dim:]) for c in call.layout_of(part)),
            [*part.shape[:dim], 1, *part.shape[dim:]],
        )
        for part in call["tensors"]
    ]
    return moves.joined(
        call.atoms, described, dim, f"its channels are joined with others in {call}"
    )


@rule("repeat")
def _repeat(call: Call) -> ChannelLayout:
    new = call.results[0].shape
    layout = moves.lifted(call.layout("self"), len(new))
    shape = [1] * (len(new) - call["self"].ndim) + list(call["self"].shape)
    for dim, times in enumerate(call["repeats"]):
        if times > 1 and shape[dim] > 1:
            layout = moves.joined(call.atoms, [(layout, shape)] * times, dim, str(call))
            shape[dim] *= times
    return layout


@rule("constant_pad_nd")
def _pad(call: Call) -> ChannelLayout:
    layout = call.layout("self")
    shape, pads = list(call["self"].shape), call["pad"]
    for place in range(len(pads) // 2):
        dim, before, after = len(shape) - 1 - place, pads[2 * place], pads[2 * place + 1]
        if before or after:
            start, stop = max(0, -before), shape[dim] - max(0, -after)
            if stop - start < shape[dim]:
                _keep(call, layout, dim, slice(start, stop))
                layout = moves.taken(layout, dim, slice(start, stop))
                shape[dim] = stop - start
            edges = [[*shape[:dim], max(0, n), *shape[dim + 1 :]] for n in (before, after)]
            pieces = [((), edges[0]), (layout, shape), ((), edges[1])]
            kept = [(part, sizes) for part, sizes in pieces if sizes[dim]]
            layout = moves.joined(call.atoms, kept, dim, str(call))
            shape[dim] = sum(sizes[dim] for _, sizes in kept)
    return layout


@rule("embedding")
def _embedding(call: Call) -> ChannelLayout:
    """Look up rows of a table, whose units keep their order as the channels of an input do."""
    layout = tuple(c.reshape(*c.shape, 1) for c in call.layout("indices"))
    reason = f"its channels are those of the table in {call}"
    call.atoms.freeze(call.layout("weight"), reason)
    indices = call["indices"].ndim
    units = call.axis(call.separate(call.layout("weight"), (0,)), 1, indices, indices + 1)
    return (*layout, *units)


@rule("index")
def _index(call: Call) -> ChannelLayout | None:
    """Pick positions of the first dimensions; the other dimensions stay unchanged."""
    indices = call["indices"]
    picked = [i for i, index in enumerate(indices) if index is not None]
    if picked != list(range(len(indices))) or indices[0].dtype == torch.bool:
        return None
    layout = call.separate(call.layout("self"), picked)
    call.freeze(within(layout, picked))
    new = call.results[0].shape
    ahead = len(new) - (call["self"].ndim - len(picked))
    kept = (column for column in layout if not set(active(column)) & set(picked))
    rest = tuple(column.reshape((1,) * ahead + column.shape[len(picked) :]) for column in kept)
    front = [size if dim < ahead else 1 for dim, size in enumerate(new)]
    return (*call.atoms.fixed(front), *rest)


@rule("index_select")
def _index_select(call: Call) -> ChannelLayout:
    dim, ndim = call["dim"] % call["self"].ndim, call["self"].ndim
    layout = call.separate(call.layout("self"), (dim,))
    call.freeze(within(layout, (dim,)))
    sizes = [size if d == dim else 1 for d, size in enumerate(call.results[0].shape)]
    kept = tuple(column for column in layout if column.shape[dim] == 1)
    return (*kept, *call.atoms.fixed(sizes)) if ndim else ()
