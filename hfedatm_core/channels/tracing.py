"""Find the channel groups of a module, with ``torch.fx``.

Convolutions and Linear layers read the channel spaces of their input and open a new one; norm
layers, activations and pooling pass them on; a flatten widens the blocks; additions unite spaces;
concatenations line them up. The network's inputs and outputs keep their order, and so does
everything that an operation touches which is not understood: never a wrong permutation.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import fx, nn

from hfedatm_core.channels import operations
from hfedatm_core.channels.groups import ChannelGroup, Kind, Member
from hfedatm_core.channels.recording import Recording, record
from hfedatm_core.channels.spaces import ChannelLayout, Segment, Spaces

_LOG = logging.getLogger(__name__)
_OUTPUT = "its channels are the network's output"


class Traced(NamedTuple):
    """What tracing finds: the fields of :class:`~hfedatm_core.channels.graph.ChannelGraph`."""

    groups: tuple[ChannelGroup, ...]
    frozen: dict[str, str]
    kernels: frozenset[str]


def trace(model: nn.Module, inputs: Sequence[Any] | Mapping[str, Any]) -> Traced:
    """See :meth:`hfedatm_core.channels.graph.ChannelGraph.trace`."""
    kernels = frozenset(
        f"{name}.weight" if name else "weight"
        for name, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, operations.CONVOLUTIONS)
    )
    try:
        recording = record(model, inputs)
    except Exception as error:  # whatever the user's forward raises under tracing
        reason = f"torch.fx cannot record this model: {type(error).__name__}: {error}"
        _LOG.warning("%s is merged without channel alignment: %s", type(model).__name__, reason)
        return Traced((), {type(model).__name__: reason}, kernels)
    walk = _Walk(recording)
    for node in recording.nodes:
        walk.visit(node)
    return walk.result(kernels)


class _Walk:
    """One pass over the recorded graph in the order of the forward pass."""

    def __init__(self, recording: Recording) -> None:
        model = recording.model
        self.modules = dict(model.named_modules(remove_duplicate=False))
        self.shapes = recording.shapes
        self.layouts: dict[fx.Node, ChannelLayout] = {}
        self.spaces = Spaces()
        self.writers: list[tuple[str, Segment, Kind]] = []
        self.frozen: dict[str, str] = {}
        named = (
            *model.named_parameters(remove_duplicate=False),
            *model.named_buffers(remove_duplicate=False),
        )
        self.aliases: dict[int, list[str]] = {}  # one tensor may be stored under several names
        for name, tensor in named:
            self.aliases.setdefault(id(tensor), []).append(name)
        self.tensors = dict(named)

    # --- one node ------------------------------------------------------------------------------

    def visit(self, node: fx.Node) -> None:
        layout: ChannelLayout | None = None
        if node.op == "output":
            for source in node.all_input_nodes:
                if source in self.layouts:
                    self.spaces.freeze(self.layouts[source].segments, _OUTPUT)
        elif node.op == "get_attr":
            self._fix_order_of(str(node.target))
        elif node.op == "call_module":
            layout = self._module(node, str(node.target), self.modules[str(node.target)])
        elif node.op in ("call_function", "call_method") and self.shapes[node] is not None:
            layout = self._operation(node, *operations.function_effect(node.target))
        if layout is not None:
            self.layouts[node] = layout

    def _module(self, node: fx.Node, name: str, module: nn.Module) -> ChannelLayout | None:
        hooked = module._forward_hooks or module._forward_pre_hooks
        single = len(node.all_input_nodes) == 1 and isinstance(self.shapes[node], tuple)
        if hooked or not single:
            return self._unknown(node, "it has hooks" if hooked else "several inputs or outputs")
        source = node.all_input_nodes[0]
        if type(module) in operations.CONVOLUTIONS:
            return self._convolution(node, source, name, module)
        if type(module) is nn.Linear:
            axis = len(self.shapes[source]) - 1
            return self._layer(node, source, axis, module.out_features, "linear")
        if type(module) in operations.CHANNEL_VECTORS:
            return self._vectors(node, source, name, module)
        return self._operation(node, *operations.module_effect(module))

    def _convolution(
        self, node: fx.Node, source: fx.Node, name: str, conv: Any
    ) -> ChannelLayout | None:
        axis = len(self.shapes[source]) - len(conv.kernel_size) - 1
        if conv.groups == 1:
            return self._layer(node, source, axis, conv.out_channels, "conv")
        layout = self.layouts.get(source)
        if conv.groups != conv.in_channels or layout is None or layout.axis != axis:
            return self._unknown(node, f"a convolution in {conv.groups} groups")
        # Depthwise: output channels follow the input channels, a multiplier widens the blocks.
        layout = layout.stretched(conv.out_channels // conv.in_channels)
        self._bind(f"{name}.weight", 0, layout.segments, "filter")
        self._bind(f"{name}.bias", 0, layout.segments, "vector")
        self.writers.extend((name, segment, "conv") for segment in layout.segments)
        return layout

    def _layer(
        self, node: fx.Node, source: fx.Node, axis: int, size: int, kind: Kind
    ) -> ChannelLayout:
        """Mix all channels on ``axis`` into ``size`` new ones."""
        name = str(node.target)
        layout = self.layouts.get(source)
        if layout is not None and layout.axis != axis:
            self._freeze(node, "it mixes positions and not channels")
            layout = None
        segment = self.spaces.open(size)
        self.writers.append((name, segment, kind))
        self._bind(f"{name}.weight", 0, (segment,), "filter")
        self._bind(f"{name}.bias", 0, (segment,), "vector")
        self._bind(f"{name}.weight", 1, layout.segments if layout else None, "input")
        return ChannelLayout(axis, (segment,))

    def _vectors(
        self, node: fx.Node, source: fx.Node, name: str, module: Any
    ) -> ChannelLayout | None:
        layout = self.layouts.get(source)
        shared_slope = isinstance(module, nn.PReLU) and module.num_parameters == 1
        if layout is not None and layout.axis != 1 and not shared_slope:
            return self._unknown(node, "it does not act on the channel axis")
        if not shared_slope:
            for vector in ("weight", "bias", "running_mean", "running_var"):
                self._bind(f"{name}.{vector}", 0, layout.segments if layout else None, "vector")
        return layout

    def _operation(
        self, node: fx.Node, name: str, effect: operations.Effect | None
    ) -> ChannelLayout | None:
        live = [n for n in node.all_input_nodes if n in self.layouts]
        if not live:
            return self._unknown(node, name) if effect is None else None
        if effect == "cat":
            return self._cat(node, name)
        if effect == "binary":
            return self._binary(node, name)
        source = live[0]
        tensors = [n for n in node.all_input_nodes if self.shapes[n] is not None]
        if len(tensors) > 1 or not isinstance(self.shapes[node], tuple):
            return self._unknown(node, name)
        layout, old, new = self.layouts[source], self.shapes[source], self.shapes[node]
        after: ChannelLayout | None = None
        arguments = node.args[1:] if node.op != "call_module" else ()
        if effect == "pointwise":
            after = layout
        elif effect == "spatial":
            after = operations.after_spatial(name, layout, len(old))
        elif effect == "resize":
            after = operations.after_resize(layout)
        elif effect == "reshape":
            after = operations.after_reshape(layout, old, new)
        elif effect == "permute":
            given = arguments or tuple(v for k, v in node.kwargs.items() if k != "input")
            after = operations.after_permute(name, layout, len(old), given)
        elif effect == "reduce":
            dims = node.kwargs.get("dim", arguments[0] if arguments else None)
            after = operations.after_reduce(layout, len(old), dims, len(new))
        return after or self._unknown(node, name)

    def _binary(self, node: fx.Node, name: str) -> ChannelLayout | None:
        """Unite the operands; one without channels passes only where it is broadcast over them."""
        ndim = len(self.shapes[node])
        operands = []
        for source in node.all_input_nodes:
            if self.shapes[source] is None:
                continue
            shift = ndim - len(self.shapes[source])
            layout = self.layouts.get(source)
            operands.append((source, layout and layout.moved(layout.axis + shift)))
        live = [layout for _, layout in operands if layout is not None and layout.length > 1]
        if not live:
            return None
        for source, layout in operands:
            if layout is not None and layout.length > 1:
                fits = layout.axis == live[0].axis and layout.length == live[0].length
            else:
                place = live[0].axis - (ndim - len(self.shapes[source]))
                fits = place < 0 or self.shapes[source][place] == 1
            if not fits:
                return self._unknown(node, f"{name} of tensors that are not channel by channel")
        reason = f"{name} in {self._where(node)} joins channels of different structure"
        for layout in live[1:]:
            self.spaces.unite(live[0].segments, layout.segments, reason)
        return live[0]

    def _cat(self, node: fx.Node, name: str) -> ChannelLayout | None:
        parts = node.args[0] if node.args else node.kwargs.get("tensors")
        dim = node.kwargs.get("dim", node.args[1] if len(node.args) > 1 else 0)
        if not isinstance(parts, list | tuple) or not isinstance(dim, int):
            return self._unknown(node, name)
        sources = [part for part in parts if isinstance(part, fx.Node)]
        axis = dim % len(self.shapes[node])
        segments: list[Segment] = []
        for source in sources:
            layout = self.layouts.get(source)
            if layout is None:
                fixed = self.spaces.open(self.shapes[source][axis])
                self.spaces.freeze((fixed,), "it has no free channels")
                layout = ChannelLayout(axis, (fixed,))
            if layout.axis != axis:
                return self._unknown(node, f"{name} over an axis that is not the channels'")
            segments.extend(layout.segments)
        return ChannelLayout(axis, tuple(segments))

    # --- what is not understood ----------------------------------------------------------------

    def _unknown(self, node: fx.Node, what: str) -> ChannelLayout | None:
        """Freeze all channels that a node reads and the tensors of its module; leave no layout."""
        self._freeze(node, what)
        if node.op == "call_module":
            for tensor, _ in self.modules[str(node.target)].named_parameters():
                self._fix_order_of(f"{node.target}.{tensor}")
        return None

    def _freeze(self, node: fx.Node, what: str) -> None:
        sources = [source for source in node.all_input_nodes if source in self.layouts]
        segments = [segment for source in sources for segment in self.layouts[source].segments]
        reason = f"{self._where(node)} is not understood: {what}"
        if self.spaces.freeze(segments, f"its channels reach {reason}"):
            _LOG.warning("channels stay unaligned because %s", reason)
            if node.op == "call_module":
                self.frozen[str(node.target)] = reason

    def _where(self, node: fx.Node) -> str:
        if node.op == "call_module":
            return f"{node.target} ({type(self.modules[str(node.target)]).__name__})"
        stack = list((node.meta.get("nn_module_stack") or {}).values())
        owner = str(stack[-1][0]) if stack else ""
        return f"{node.name} in module {owner!r}" if owner else f"{node.name} of the whole network"

    def _fix_order_of(self, tensor: str) -> None:
        if tensor in self.tensors:
            for axis in range(self.tensors[tensor].dim()):
                self._bind(tensor, axis, None, "vector")

    def _bind(self, tensor: str, axis: int, segments: Any, role: Any) -> None:
        if tensor in self.tensors:
            canonical = self.aliases[id(self.tensors[tensor])][0]
            self.spaces.bind(canonical, axis, segments, role)

    # --- the result ----------------------------------------------------------------------------

    def result(self, kernels: frozenset[str]) -> Traced:
        members: dict[int, list[Member]] = {}
        for (tensor, axis), binding in self.spaces.bindings.items():
            offset = 0
            for segment in binding.segments or ():
                root = members.setdefault(self.spaces.find(segment.space), [])
                for alias in self.aliases[id(self.tensors[tensor])]:
                    root.append(Member(alias, axis, offset, segment.block, binding.role))
                offset += segment.length
        names: dict[int, str] = {}
        sizes: dict[int, int] = {}
        kinds: dict[int, Kind] = {}
        for name, segment, kind in self.writers:
            root_space = self.spaces.find(segment.space)
            reason = self.spaces.reason(root_space)
            if reason is not None:
                self.frozen.setdefault(name, reason)
                continue
            names.setdefault(root_space, name)
            sizes[root_space] = segment.size
            kinds[root_space] = "conv" if kind == "conv" else kinds.get(root_space, kind)
        groups = (
            ChannelGroup(name, sizes[root], kinds[root], tuple(members[root]))
            for root, name in names.items()
        )
        return Traced(tuple(groups), self.frozen, kernels)
