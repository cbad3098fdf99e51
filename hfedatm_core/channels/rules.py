"""The effect of operations on channels: one short rule for each kind of ATen operation.

An operation without a rule is not understood, and freezes the channels that it touches. A rule gets
the call and returns the layout of each result; see :mod:`hfedatm_core.channels.atoms`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from hfedatm_core.channels import moves
from hfedatm_core.channels.atoms import Atoms
from hfedatm_core.channels.groups import Kind
from hfedatm_core.channels.layouts import ChannelLayout, within

Rule = Callable[["Call"], "ChannelLayout | list[ChannelLayout] | None"]
RULES: dict[str, Rule] = {}


@dataclass
class Call:
    """One operation with its operands, and the tracer's knowledge about them.

    Attributes
    ----------
    arguments
        All arguments by name, defaults included.
    results
        The tensors that the operation returned.
    where
        The operation in words, with its module.
    layout_of
        Layout of a tensor.
    keep
        Registers a stretch cut out of a tensor: its positions must stay together.
    wrote
        Records that a tensor was the weight that writes the channels along a dimension.
    """

    atoms: Atoms
    arguments: dict[str, Any]
    results: Sequence[Tensor]
    where: str
    layout_of: Callable[[Tensor], ChannelLayout]
    keep: Callable[[ChannelLayout], None]
    wrote: Callable[[Tensor, ChannelLayout, Kind], None]

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    def layout(self, name: str) -> ChannelLayout:
        """Return the layout of an argument; empty for one that is not given."""
        value = self.arguments[name]
        return self.layout_of(value) if isinstance(value, Tensor) else ()

    def dims(self, value: Any, ndim: int) -> list[int]:
        """Return dimensions counted from the front; all of them when none are named."""
        listed = [value] if isinstance(value, int) else list(value or range(ndim))
        return [int(dim) % ndim if ndim else 0 for dim in listed]

    def unite(
        self, one: ChannelLayout, other: ChannelLayout, shape: Sequence[int]
    ) -> ChannelLayout:
        """See :meth:`Atoms.unite`."""
        return self.atoms.unite(one, other, shape, f"its channels are joined with others in {self}")

    def separate(self, layout: ChannelLayout, *parts: Sequence[int]) -> ChannelLayout:
        """See :meth:`Atoms.separate`."""
        return self.atoms.separate(
            layout, parts, f"its channels are mixed with positions in {self}"
        )

    def freeze(self, layout: ChannelLayout) -> None:
        """Freeze channels that the operation does not treat alike."""
        self.atoms.freeze(layout, f"its channels are treated as positions by {self}")

    def axis(self, layout: ChannelLayout, dim: int, new: int = 0, ndim: int = 1) -> ChannelLayout:
        """Return the columns of one dimension, as dimension ``new`` of a tensor with ``ndim``."""
        shape = [1] * ndim
        shape[new] = -1
        return tuple(column.reshape(shape) for column in within(layout, (dim,)))

    def __str__(self) -> str:
        return self.where


def rule(names: str) -> Callable[[Rule], Rule]:
    """Register a function for operations."""

    def register(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(names.split(), function))
        return function

    return register


# --- channel by channel --------------------------------------------------------------------------


def pointwise(call: Call) -> ChannelLayout:
    """Unite all operands position by position."""
    shape = call.results[0].shape
    layout: ChannelLayout = ()
    for value in call.arguments.values():
        for tensor in value if isinstance(value, list | tuple) else [value]:
            if isinstance(tensor, Tensor):
                operand = moves.lifted(call.layout_of(tensor), len(shape))
                layout = call.unite(layout, operand, shape)
    return layout


for _name in """clone detach alias _to_copy copy contiguous lift_fresh lift_fresh_copy dropout elu
    leaky_relu gelu silu mish hardtanh hardswish hardsigmoid softplus hardshrink softshrink
    threshold celu selu log_sigmoid_forward prelu _prelu_kernel where masked_fill lerp
    addcmul addcdiv _conj nan_to_num clamp bitwise_not logical_not""".split():
    RULES[_name] = pointwise


@rule("native_dropout")
def _dropout(call: Call) -> list[ChannelLayout]:
    return [call.layout("input")] * 2


@rule(
    "bernoulli zeros zeros_like new_zeros ones ones_like new_ones full full_like new_full empty "
    "empty_like new_empty scalar_tensor fill zero"
)
def _alike(call: Call) -> ChannelLayout:
    """Return an empty layout: all positions hold one value, or are drawn alike."""
    return ()


@rule(
    "rand rand_like randn randn_like randint randperm normal uniform arange linspace eye "
    "tril_indices triu_indices"
)
def _ordered(call: Call) -> list[ChannelLayout]:
    return [call.atoms.fixed(result.shape) for result in call.results]
