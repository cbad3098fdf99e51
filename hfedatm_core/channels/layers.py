"""Rules of the operations that mix positions: products, convolutions, norms, pooling, sums."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from hfedatm_core.channels import moves
from hfedatm_core.channels.layouts import ChannelLayout, active, within
from hfedatm_core.channels.rules import Call, rule

# --- products ------------------------------------------------------------------------------------


@rule("mm addmm bmm baddbmm mv addmv")
def _product(call: Call) -> ChannelLayout:
    """Sum over the last dimension of the first factor and the last but one of the second."""
    names = [name for name in call.arguments if name in ("mat1", "batch1", "vec", "mat2", "batch2")]
    left, right = ("self", names[0]) if len(names) == 1 else (names[0], names[1])
    if "mat" in call.arguments:  # addmv
        left, right = "mat", "vec"
    a, b = call[left], call[right]
    batch, vector = list(range(a.ndim - 2)), b.ndim == 1
    row, column = a.ndim - 2, b.ndim - 1
    ours = call.separate(call.layout(left), batch, [row], [row + 1])
    theirs = call.separate(call.layout(right), batch, [len(batch)], [column])
    summed = a.shape[-1:]
    call.unite(call.axis(ours, row + 1), call.axis(theirs, len(batch)), summed)
    ndim = a.ndim - vector
    found = call.axis(ours, row, row, ndim)
    if not vector:
        found += call.axis(theirs, column, column, ndim)
        call.wrote(b, within(theirs, [column]), "linear")
    call.wrote(a, within(ours, [row]), "linear")
    if batch:
        one, other = call.axis(ours, 0, 0, ndim), call.axis(theirs, 0, 0, ndim)
        found += call.unite(one, other, [a.shape[0]] + [1] * (ndim - 1))
    if "beta" in call.arguments:
        shape = call.results[0].shape
        found = call.unite(found, moves.lifted(call.layout("self"), ndim), shape)
    return found


@rule("dot vdot")
def _dot(call: Call) -> ChannelLayout:
    names = [name for name, value in call.arguments.items() if isinstance(value, Tensor)]
    call.unite(call.layout(names[0]), call.layout(names[1]), call[names[0]].shape)
    return ()


@rule("_weight_norm_interface")
def _weight_norm(call: Call) -> list[ChannelLayout]:
    """Scale each slice of a dimension to its length ``g``."""
    v, dim = call["v"], call["dim"] % call["v"].ndim
    layout = call.unite(call.separate(call.layout("v"), [dim]), call.layout("g"), v.shape)
    return [layout, within(layout, [dim])]


@rule("convolution _convolution mkldnn_convolution")
def _convolution(call: Call) -> ChannelLayout | None:
    x, weight, groups = call["input"], call["weight"], call["groups"]
    ndim = weight.ndim
    if call.arguments.get("transposed") or x.ndim != ndim:
        return None
    places = list(range(2, ndim))
    inputs = call.separate(call.layout("input"), [0], [1], places)
    kernel = call.separate(call.layout("weight"), [0], [1], places)
    call.freeze((*within(inputs, places), *within(kernel, places)))
    read, filters, depth = call.axis(inputs, 1), call.axis(kernel, 0), call.axis(kernel, 1)
    if groups == 1:
        call.unite(read, depth, [x.shape[1]])
    else:
        # Channels are read in groups. Whole groups may only move on both sides together, and
        # channels within a group only in all groups alike.
        read = _grouped(call, read, groups, x.shape[1])
        filters = _grouped(call, filters, groups, weight.shape[0])
        call.unite(within(read, [0]), within(filters, [0]), [groups, 1])
        call.unite(call.axis(read, 1), depth, [weight.shape[1]])
        split = [groups, weight.shape[0] // groups]
        filters = moves.reshaped(call.atoms, filters, split, [weight.shape[0]])
    call.wrote(weight, within(call.atoms.resolve(kernel), [0]), "conv")
    bias = call.layout("bias")
    written = call.unite(filters, bias, [weight.shape[0]])
    fixed = call.atoms.fixed([1, 1, *call.results[0].shape[2:]])
    return (*call.axis(inputs, 0, 0, ndim), *call.axis(written, 0, 1, ndim), *fixed)


def _grouped(call: Call, layout: ChannelLayout, groups: int, size: int) -> ChannelLayout:
    """Return the layout of an axis in two dimensions: groups, and members of a group."""
    split = moves.reshaped(call.atoms, layout, [size], [groups, size // groups])
    return call.separate(split, [0])


# --- norms ---------------------------------------------------------------------------------------


@rule(
    "native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_no_training "
    "cudnn_batch_norm batch_norm miopen_batch_norm _batch_norm_with_update _batch_norm_no_update "
    "native_batch_norm_legit_functional"
)
def _batch_norm(call: Call) -> list[ChannelLayout]:
    x = call["input"]
    layout = call.separate(call.layout("input"), [1])
    channels = call.axis(layout, 1)
    for name in ("weight", "bias", "running_mean", "running_var"):
        if name in call.arguments:
            channels = call.unite(channels, call.layout(name), [x.shape[1]])
    rest = tuple(column for column in call.atoms.resolve(layout) if column.shape[1] == 1)
    normed = (*rest, *call.axis(channels, 0, 1, x.ndim))
    saved = [channels if r.ndim == 1 and r.numel() == x.shape[1] else () for r in call.results[1:]]
    return [normed, *saved]


@rule("native_layer_norm _fused_rms_norm")
def _layer_norm(call: Call) -> list[ChannelLayout]:
    x = call["input"]
    count = len(call["normalized_shape"])
    ahead = list(range(x.ndim - count))
    layout = call.separate(call.layout("input"), ahead)
    for name in ("weight", "bias"):
        if name in call.arguments:
            layout = call.unite(layout, moves.lifted(call.layout(name), x.ndim), x.shape)
    kept = tuple(c for c in layout if not set(active(c)) - set(ahead))
    return [layout, *[kept] * (len(call.results) - 1)]


@rule("native_group_norm")
def _group_norm(call: Call) -> list[ChannelLayout]:
    x, groups = call["input"], call["group"]
    layout = call.separate(call.layout("input"), [1])
    channels = call.axis(layout, 1)
    if 1 < groups < x.shape[1]:
        split = _grouped(call, channels, groups, x.shape[1])
        shape = [groups, x.shape[1] // groups]
        channels = moves.reshaped(call.atoms, split, shape, [x.shape[1]])
    for name in ("weight", "bias"):
        channels = call.unite(channels, call.layout(name), [x.shape[1]])
    rest = tuple(column for column in call.atoms.resolve(layout) if column.shape[1] == 1)
    normed = (*rest, *call.axis(channels, 0, 1, x.ndim))
    return [normed, *(call.atoms.fixed(r.shape) for r in call.results[1:])]


# --- sums over dimensions ------------------------------------------------------------------------


@rule("mean sum amax amin var var_mean std std_mean prod norm linalg_vector_norm logsumexp any all")
def _reduce(call: Call) -> list[ChannelLayout]:
    """Sum over dimensions; the order of the terms does not matter."""
    x = next(value for value in call.arguments.values() if isinstance(value, Tensor))
    dims = call.dims(call.arguments.get("dim"), x.ndim)
    layout = call.separate(call.layout_of(x), dims)
    kept = tuple(column for column in layout if not set(active(column)) & set(dims))
    if call.results[0].ndim < x.ndim:
        kept = moves.without(kept, dims)
    return [kept] * len(call.results)


@rule("_softmax _log_softmax softmax log_softmax _safe_softmax")
def _softmax(call: Call) -> ChannelLayout:
    return call.separate(call.layout("self"), [call["dim"] % call["self"].ndim])


# --- neighbourhoods ------------------------------------------------------------------------------


def _spatial(call: Call, count: int) -> list[ChannelLayout]:
    """Act on neighbourhoods in the last ``count`` dimensions; the others stay unchanged."""
    x = next(value for value in call.arguments.values() if isinstance(value, Tensor))
    places = range(x.ndim - count, x.ndim)
    layout = call.separate(call.layout_of(x), places)
    call.freeze(within(layout, places))
    kept = tuple(column for column in layout if not set(active(column)) & set(places))
    shape = call.results[0].shape
    fixed = call.atoms.fixed([n if d in places else 1 for d, n in enumerate(shape)])
    return [(*kept, *fixed)] * len(call.results)


def _register_spatial(names: Sequence[str]) -> None:
    for name in names:
        for count in (1, 2, 3):

            def function(call: Call, count: int = count) -> list[ChannelLayout]:
                return _spatial(call, count)

            rule(name.format(count))(function)


_register_spatial(
    """max_pool{}d max_pool{}d_with_indices avg_pool{}d adaptive_avg_pool{}d _adaptive_avg_pool{}d
    adaptive_max_pool{}d reflection_pad{}d replication_pad{}d upsample_nearest{}d
    _upsample_nearest_exact{}d""".split()
)
for _name, _count in {
    "upsample_linear1d": 1,
    **dict.fromkeys(("upsample_bilinear2d", "upsample_bicubic2d", "_upsample_bilinear2d_aa"), 2),
    "_upsample_bicubic2d_aa": 2,
    "upsample_trilinear3d": 3,
}.items():

    def _resize(call: Call, count: int = _count) -> list[ChannelLayout]:
        return _spatial(call, count)

    rule(_name)(_resize)
