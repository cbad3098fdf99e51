"""What crosses the cut between a network's frozen front and its trained end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

MASK = "attention_mask"
Example = Tensor | Mapping[str, Tensor]


@dataclass(frozen=True)
class Crossing:
    """A tensor that crosses the cut.

    Attributes
    ----------
    name
        Its name among the inputs of the end.
    shape
        The shape of one example's part.
    dtype
        Its type.
    by_token
        Whether the first axis of ``shape`` counts the tokens of a text, so that columns of padding
        can be cut off.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    by_token: bool


class Constant(nn.Module):
    """A tensor that no example changes; it is neither saved nor sent."""

    value: Tensor

    def __init__(self, value: Tensor) -> None:
        super().__init__()
        self.register_buffer("value", value.detach().clone(), persistent=False)

    def forward(self) -> Tensor:
        """Return the tensor."""
        return self.value


class Crossings:
    """Find the tensors that cross a cut.

    ``behind`` grows by the nodes that the end computes again: those that follow from inputs
    without weights, and those whose values are not one row of numbers per example (a length).
    """

    def __init__(
        self,
        graph: fx.Graph,
        behind: set[fx.Node],
        weights: Mapping[str, Tensor],
        model: nn.Module,
        example: Example,
    ) -> None:
        self.behind, self._rows = set(behind), len(_first(example))
        try:
            values = _values(model, graph, example)
        except Exception as error:  # the user's forward may raise anything
            raise ValueError(f"it does not run on an example ({str(error)[:200]})") from error
        other = _other(example)
        try:
            others = _values(model, graph, other)
        except Exception:  # the network takes no shorter texts
            other = _longer(example)
            others = _values(model, graph, other)
        self._shorter = _tokens(other) < _tokens(example)
        uses_inputs, uses_weights = _ancestry(graph, weights)
        edges: dict[fx.Node, None] = {}
        self.constant_nodes: dict[fx.Node, str] = {}
        todo = [n for node in graph.nodes if node in behind for n in node.all_input_nodes]
        while todo:
            node = todo.pop(0)
            if node in self.behind or node in edges or node in self.constant_nodes:
                continue
            rows = self._is_rows(values[node], others[node])
            if node not in uses_inputs and isinstance(values[node], Tensor):
                self.constant_nodes[node] = f"_constant_{len(self.constant_nodes)}"
            elif rows and (node.op == "placeholder" or node in uses_weights):
                edges[node] = None
            elif node.op == "placeholder" or _owns(node, weights):
                raise ValueError(
                    f"{node.target} crosses the cut with something else than one row of numbers "
                    "per example: cut between blocks, not inside of one"
                )
            else:
                self.behind.add(node)
                todo += node.all_input_nodes
        self.edges = [node for node in graph.nodes if node in edges]
        self.constants = {name: values[node] for node, name in self.constant_nodes.items()}
        if not any(node in uses_weights for node in self.edges):
            raise ValueError("no frozen weights come before the trained ones: nothing is saved")
        self.arrays = tuple(self._crossing(node, values[node], others[node]) for node in self.edges)

    def _is_rows(self, value: Any, later: Any) -> bool:
        return (
            isinstance(value, Tensor)
            and value.dim() > 0
            and len(value) == self._rows
            and len(later) == self._rows + 1
            and (value.dtype.is_floating_point or value.dtype in (torch.int64, torch.int32))
        )

    def _crossing(self, node: fx.Node, value: Tensor, later: Tensor) -> Crossing:
        by_token = (
            self._shorter
            and value.dim() > 1
            and later.shape[1] == value.shape[1] - 1
            and value.shape[2:] == later.shape[2:]
        )
        name = "activations" if len(self.edges) == 1 else node.name
        return Crossing(name, tuple(value.shape[1:]), value.dtype, by_token)


def _ancestry(graph: fx.Graph, weights: Mapping[str, Tensor]) -> tuple[set[fx.Node], set[fx.Node]]:
    """Return the nodes that depend on inputs, and those that depend on weights."""
    inputs, weighted = set[fx.Node](), set[fx.Node]()
    for node in graph.nodes:
        before = set(node.all_input_nodes)
        if node.op == "placeholder" or before & inputs:
            inputs.add(node)
        if _owns(node, weights) or before & weighted:
            weighted.add(node)
    return inputs, weighted


def _owns(node: fx.Node, weights: Mapping[str, Tensor]) -> bool:
    if node.op == "get_attr":
        return str(node.target) in weights
    return node.op == "call_module" and any(n.startswith(f"{node.target}.") for n in weights)


def _values(model: nn.Module, graph: fx.Graph, example: Example) -> dict[fx.Node, Any]:
    """Return the value of every node for an example, in evaluation mode."""
    before = model.training
    reader = fx.Interpreter(model.eval(), garbage_collect_values=False, graph=graph)
    given = example if isinstance(example, Mapping) else None
    try:
        with torch.no_grad():
            names = [node.target for node in graph.nodes if node.op == "placeholder"]
            args = [given[str(n)] for n in names if n in given] if given else [example]
            reader.run(*args)
    finally:
        model.train(before)
    return reader.env


def _first(example: Example) -> Tensor:
    return next(iter(example.values())) if isinstance(example, Mapping) else example


def _tokens(example: Example) -> int:
    return example[MASK].shape[1] if isinstance(example, Mapping) and MASK in example else 0


def _longer(example: Example) -> Example:
    """Return the example with a row more, which tells rows from other axes."""
    if isinstance(example, Mapping):
        return {name: torch.cat([t, t[:1]]) for name, t in example.items()}
    return torch.cat([example, example[:1]])


def _other(example: Example) -> Example:
    """Return the example with a row more and, for a text, a token less."""
    tokens, more = _tokens(example), _longer(example)
    if tokens < 2 or not isinstance(more, Mapping):
        return more
    return {n: t[:, :-1] if t.shape[1:2] == (tokens,) else t for n, t in more.items()}
