"""Record a network's operations and the shapes of their results without running it."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Recording:
    """A model's operations in the order of its forward pass.

    Attributes
    ----------
    model
        The model that was recorded, in evaluation mode.
    nodes
        Its operations.
    shapes
        Shape of each result; ``None`` for something that holds no tensor (a size, a number), an
        empty list for a structure of several tensors.
    """

    model: nn.Module
    nodes: tuple[fx.Node, ...]
    shapes: dict[fx.Node, Any]


def record(model: nn.Module, inputs: Sequence[Any] | Mapping[str, Any]) -> Recording:
    """Record ``model`` with ``torch.fx``; raises whatever its forward raises under tracing."""
    # The copy shares all tensors with the model: only its structure and its mode are its own.
    shared: dict[int, Any] = {id(t): t for t in (*model.parameters(), *model.buffers())}
    twin = copy.deepcopy(model, shared).eval()
    recorded = fx.symbolic_trace(twin)
    shapes = _ShapePropagation(recorded)
    shapes.propagate(inputs)
    return Recording(twin, tuple(recorded.graph.nodes), shapes.shapes)


class _ShapePropagation(fx.Interpreter):
    def __init__(self, recorded: fx.GraphModule) -> None:
        super().__init__(recorded)
        self.shapes: dict[fx.Node, Any] = {}

    def propagate(self, inputs: Sequence[Any] | Mapping[str, Any]) -> None:
        if isinstance(inputs, Mapping):
            holders = [node for node in self.graph.nodes if node.op == "placeholder"]
            missing = inspect.Parameter.empty
            inputs = [inputs.get(n.target, n.args[0] if n.args else missing) for n in holders]
        with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.no_grad():
            self.run(*pytree.tree_map_only(Tensor, mode.from_tensor, tuple(inputs)))

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if isinstance(result, Tensor):
            self.shapes[n] = tuple(result.shape)
        else:
            leaves = pytree.tree_leaves(result)
            self.shapes[n] = [] if any(isinstance(leaf, Tensor) for leaf in leaves) else None
        return result
