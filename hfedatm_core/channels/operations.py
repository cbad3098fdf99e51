"""What an operation does to channels, by its type: the vocabulary of the tracer.

Whatever is not listed here is not understood, and freezes the channels that it touches.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import torch
from torch import nn
from torch.nn import functional

from hfedatm_core.channels.spaces import ChannelLayout

Effect = Literal["pointwise", "spatial", "resize", "binary", "reshape", "permute", "reduce", "cat"]

_POINTWISE = """relu relu_ relu6 leaky_relu leaky_relu_ elu elu_ selu celu gelu silu mish
sigmoid tanh hardtanh hardswish hardsigmoid hardshrink softshrink tanhshrink softplus softsign
logsigmoid threshold sigmoid_ tanh_ dropout dropout1d dropout2d dropout3d alpha_dropout
feature_alpha_dropout contiguous clone detach float double half bfloat16 to abs neg exp log sqrt
rsqrt square clamp clip erf"""
_BINARY = """add sub mul div truediv iadd isub imul itruediv add_ sub_ mul_ div_ multiply subtract
divide true_divide maximum minimum"""
_RESHAPE = "flatten view reshape squeeze unsqueeze unflatten"
_SPATIAL = " ".join(
    f"{pool}{d}d"
    for pool in ("max_pool", "avg_pool", "adaptive_avg_pool", "adaptive_max_pool", "lp_pool")
    for d in (1, 2, 3)
)
_NAMES: dict[str, Effect] = {
    **dict.fromkeys(_POINTWISE.split(), "pointwise"),
    **dict.fromkeys(_BINARY.split(), "binary"),
    **dict.fromkeys(_RESHAPE.split(), "reshape"),
    **dict.fromkeys(_SPATIAL.split(), "spatial"),
    **dict.fromkeys(("permute", "transpose"), "permute"),
    **dict.fromkeys(("mean", "sum", "amax", "amin"), "reduce"),
    **dict.fromkeys(("cat", "concat", "concatenate"), "cat"),
    "interpolate": "resize",
}
# By object and not by name: a user's own function may be called `relu`, too.
_FUNCTIONS: dict[Callable[..., Any], str] = {
    getattr(namespace, name): name
    for namespace, names in (
        (torch, _NAMES),
        (functional, _NAMES),
        (operator, ("neg", "abs", *_BINARY.split())),  # not operator.concat: it adds
    )
    for name in names
    if hasattr(namespace, name)
}
_POINTWISE_MODULES = """Identity ReLU ReLU6 LeakyReLU ELU SELU CELU GELU SiLU Mish Sigmoid Tanh
Hardtanh Hardswish Hardsigmoid Hardshrink Softshrink Tanhshrink Softplus Softsign LogSigmoid
Threshold Dropout Dropout1d Dropout2d Dropout3d AlphaDropout FeatureAlphaDropout"""
_SPATIAL_MODULES = " ".join(
    f"{kind}{d}d"
    for kind in (
        *("MaxPool", "AvgPool", "AdaptiveAvgPool", "AdaptiveMaxPool", "LPPool"),
        *("ZeroPad", "ConstantPad", "ReflectionPad", "ReplicationPad", "CircularPad"),
    )
    for d in (1, 2, 3)
)
_MODULE_NAMES: dict[str, Effect] = {
    **dict.fromkeys(_POINTWISE_MODULES.split(), "pointwise"),
    **dict.fromkeys(_SPATIAL_MODULES.split(), "spatial"),
    **dict.fromkeys(("Flatten", "Unflatten"), "reshape"),
    "Upsample": "resize",
}
_MODULES: dict[type[nn.Module], Effect] = {
    getattr(nn, name): effect for name, effect in _MODULE_NAMES.items() if hasattr(nn, name)
}
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
CHANNEL_VECTORS = (
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm),
    *(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d, nn.PReLU),
)


def module_effect(module: nn.Module) -> tuple[str, Effect | None]:
    """Return name and effect of a module without channels of its own."""
    return type(module).__name__, _MODULES.get(type(module))


def function_effect(target: Callable[..., Any] | str) -> tuple[str, Effect | None]:
    """Return name and effect of a function, or of the tensor method of that name."""
    if isinstance(target, str):
        return target, _NAMES.get(target)
    name = _FUNCTIONS.get(target)
    if name is None:
        return getattr(target, "__name__", str(target)), None
    return name, _NAMES[name]


def after_spatial(name: str, layout: ChannelLayout, ndim: int) -> ChannelLayout | None:
    """Pooling and padding act on the last d axes, d being the digit in their name."""
    return layout if layout.axis < ndim - int(name[-2]) else None


def after_resize(layout: ChannelLayout) -> ChannelLayout | None:
    """Interpolation acts on all axes but the first two."""
    return layout if layout.axis <= 1 else None


def after_reshape(
    layout: ChannelLayout, old: Sequence[int], new: Sequence[int]
) -> ChannelLayout | None:
    """Find the channel axis again in a row-major reshape.

    The channel axis ``a`` of ``old`` is axis ``b`` of ``new`` when as many elements precede both,
    and it then holds blocks of ``new[b] / old[a]`` neighbours per old position.
    """
    before = _product(old[: layout.axis])
    for axis, size in enumerate(new):
        if _product(new[:axis]) == before and size >= layout.length:
            factor, rest = divmod(size, layout.length)
            return None if rest else layout.moved(axis).stretched(factor)
    return None


def after_permute(
    name: str, layout: ChannelLayout, ndim: int, dims: Sequence[Any]
) -> ChannelLayout | None:
    """``permute(d0, d1, ...)`` or ``transpose(a, b)``."""
    flat = dims[0] if len(dims) == 1 and isinstance(dims[0], list | tuple) else dims
    if not flat or not all(isinstance(dim, int) for dim in flat):
        return None
    wanted = [dim % ndim for dim in flat]
    if name == "transpose":
        order = list(range(ndim))
        order[wanted[0]], order[wanted[1]] = order[wanted[1]], order[wanted[0]]
        wanted = order
    return layout.moved(wanted.index(layout.axis))


def after_reduce(
    layout: ChannelLayout, ndim: int, dims: Any, new_ndim: int
) -> ChannelLayout | None:
    """Mean, sum or maximum over axes that must not carry the channels."""
    listed = [dims] if isinstance(dims, int) else dims
    if not isinstance(listed, list | tuple) or not all(isinstance(d, int) for d in listed):
        return None
    gone = {dim % ndim for dim in listed}
    if not gone or layout.axis in gone:
        return None
    kept = new_ndim == ndim
    return layout if kept else layout.moved(layout.axis - sum(d < layout.axis for d in gone))


def _product(sizes: Iterable[int]) -> int:
    product = 1
    for size in sizes:
        product *= int(size)
    return product
