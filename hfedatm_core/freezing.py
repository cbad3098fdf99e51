"""Cut a network into a frozen front and a trained end.

Only modules that hold both frozen and trained weights are opened; all others are called as they
are. So a frozen transformer may contain code that cannot be followed.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, fx, nn

from hfedatm_core.discovery import suggest

LAST = re.compile(r"last[ :=_-]*(\d+)")


def blocks(model: nn.Module, name: str = "") -> list[str]:
    """Return the names of the layers and blocks that hold weights, in order; chains are opened."""
    found = []
    for child, module in model.named_children():
        path = f"{name}.{child}" if name else child
        if not any(True for _ in module.parameters()):
            continue
        chain = isinstance(module, nn.Sequential | nn.ModuleList)
        found += blocks(module, path) if chain else [path]
    return found


def trained_modules(model: nn.Module, chosen: str) -> list[str]:
    """Return the modules that ``chosen`` names: their names, or ``last N`` of the `blocks`."""
    if match := LAST.fullmatch(chosen.strip().lower()):
        every, number = blocks(model), int(match[1])
        if not 1 <= number <= len(every):
            raise ValueError(f"the model has {len(every)} layers and blocks, not {number}")
        return every[-number:]
    names = [part.strip() for part in chosen.split(",") if part.strip()]
    known = dict(model.named_modules())
    for name in names:
        if name not in known or not any(True for _ in known[name].parameters()):
            last = ", ".join(blocks(model)[-5:])
            raise ValueError(
                f"the model has no layer {name!r} with weights; its last ones are {last}."
                f"{suggest(name, known)}"
            )
    return names


@dataclass(frozen=True, eq=False)
class Cut:
    """A network in two parts.

    Attributes
    ----------
    front
        The frozen part, in evaluation mode: inputs to activations.
    frozen
        Its weights, by their names in the whole network.
    end
        The operations of the trained part, from activations to logits.
    shape
        The shape of one example's activations.
    """

    front: nn.Module
    frozen: dict[str, Tensor]
    end: fx.Graph
    shape: tuple[int, ...]

    def end_of(self, model: nn.Module) -> nn.Module:
        """Return the trained part of a network of this architecture; it shares its weights."""
        return fx.GraphModule(model, self.end, type(model).__name__)

    @property
    def digest(self) -> str:
        """Return a digest of what the activations depend on besides the examples."""
        found = hashlib.sha256(self.front.code.encode())  # type: ignore[operator,union-attr]
        for name, tensor in sorted(self.frozen.items()):
            found.update(name.encode() + tensor.detach().cpu().contiguous().numpy().tobytes())
        return found.hexdigest()


def cut(model: nn.Module, modules: Iterable[str], example: Tensor | Mapping[str, Tensor]) -> Cut:
    """Cut a network before the first of the named modules.

    Raises
    ------
    ValueError
        If frozen weights come behind trained ones, if more than one tensor crosses the cut, or if
        the network's code cannot be followed.
    """
    names = list(modules)
    every = dict(model.named_parameters())
    trained = {name for name in every if any(name.startswith(f"{part}.") for part in names)}
    if trained == set(every):
        raise ValueError("nothing would be frozen: leave it empty to train the whole model")
    graph = _graph(model, trained)
    behind: set[fx.Node] = set()
    for node in graph.nodes:
        own = _weights(node, every)
        if own & trained or behind & set(node.all_input_nodes):
            behind.add(node)
            if frozen := own - trained:
                layer = min(frozen).rpartition(".")[0]
                raise ValueError(
                    f"{layer} comes behind trained layers but is not trained: name it, too; what "
                    "is trained must be the end of the model"
                )
    crossing = {n for node in behind for n in node.all_input_nodes if n not in behind}
    if len(crossing) != 1:
        names_of = ", ".join(sorted(str(node) for node in crossing))
        raise ValueError(
            f"{len(crossing)} tensors cross the cut ({names_of}): cut between blocks, not inside "
            "of one"
        )
    (edge,) = crossing
    front, end = _front(graph, edge), _end(graph, edge, behind)
    frozen_part = fx.GraphModule(model, front, "Frozen").eval().requires_grad_(False)
    with torch.no_grad():
        given = example if isinstance(example, Mapping) else {"": example}
        found = frozen_part(**given) if isinstance(example, Mapping) else frozen_part(example)
    rows = len(next(iter(given.values())))
    if not isinstance(found, Tensor) or found.dim() < 2 or len(found) != rows:
        raise ValueError("what crosses the cut is not one row of numbers per example")
    kept = set(fx.GraphModule(model, end).state_dict())
    frozen_state = {n: t.detach() for n, t in model.state_dict().items() if n not in kept}
    return Cut(frozen_part, frozen_state, end, tuple(found.shape[1:]))


class _Follow(fx.Tracer):
    """Open only modules that hold both frozen and trained weights."""

    def __init__(self, trained: set[str]) -> None:
        super().__init__()
        self._trained = trained

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        inside = {f"{module_qualified_name}.{name}" for name, _ in m.named_parameters()}
        return inside <= self._trained or not inside & self._trained


def _graph(model: nn.Module, trained: set[str]) -> fx.Graph:
    before = model.training
    try:
        graphs = [_Follow(trained).trace(model.train(mode)) for mode in (True, False)]
    except Exception as error:  # the user's forward may raise anything when it is followed
        raise ValueError(
            f"the code of {type(model).__name__} cannot be followed at this cut "
            f"({type(error).__name__}: {error})"
        ) from error
    finally:
        model.train(before)
    if len({str(graph) for graph in graphs}) > 1:
        raise ValueError(
            f"{type(model).__name__} does different things in training and evaluation outside of "
            "its layers, at this cut"
        )
    return graphs[0]


def _weights(node: fx.Node, every: Mapping[str, Tensor]) -> set[str]:
    if node.op == "get_attr":
        return {str(node.target)} & set(every)
    if node.op == "call_module":
        return {name for name in every if name.startswith(f"{node.target}.")}
    return set()


def _front(graph: fx.Graph, edge: fx.Node) -> fx.Graph:
    needed = {edge}
    for node in reversed(graph.nodes):
        if node in needed:
            needed |= set(node.all_input_nodes)
    front, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in graph.nodes:
        if node in needed or node.op == "placeholder":
            copies[node] = front.node_copy(node, lambda n: copies[n])
    front.output(copies[edge])
    return front


def _end(graph: fx.Graph, edge: fx.Node, behind: set[fx.Node]) -> fx.Graph:
    end = fx.Graph()
    copies = {edge: end.placeholder("activations")}
    for node in graph.nodes:
        if node in behind:
            copies[node] = end.node_copy(node, lambda n: copies[n])
    return end
