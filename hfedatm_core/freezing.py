"""Cut a network into a frozen front and a trained end.

Only modules that hold both frozen and trained weights are opened; all others are called as they
are. So a frozen transformer may contain code that cannot be followed.
"""

from __future__ import annotations

import copy
import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from torch import Tensor, fx, nn

from hfedatm_core.crossing import Constant, Crossing, Crossings
from hfedatm_core.discovery import suggest
from hfedatm_core.hiding import frozen_names, hide

LAST = re.compile(r"last[ :=_-]*(\d+)")


def blocks(model: nn.Module, name: str = "") -> list[str]:
    """Return the names of the layers and blocks that hold weights, in order.

    Chains are opened, and modules that contain a chain of like blocks (a transformer's encoder).
    An embedding feeds the blocks beside it, so it comes before them wherever it is listed.
    """
    found = []
    children = sorted(model.named_children(), key=lambda c: not isinstance(c[1], nn.Embedding))
    for child, module in children:
        path = f"{name}.{child}" if name else child
        if _has_weights(module):
            opened = _is_chain(module) or any(_is_stack(part) for part in module.modules())
            found += blocks(module, path) if opened else [path]
    return found


def _has_weights(module: nn.Module) -> bool:
    return any(True for _ in module.parameters())


def _is_chain(module: nn.Module) -> bool:
    return isinstance(module, nn.Sequential | nn.ModuleList)


def _is_stack(module: nn.Module) -> bool:
    """Tell whether a module is a chain of blocks of one class, each with layers of its own."""
    parts = [part for part in module.children() if _has_weights(part)]
    alike = len({type(part) for part in parts}) == 1
    return _is_chain(module) and len(parts) > 1 and alike and any(True for _ in parts[0].children())


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
        if name not in known or not _has_weights(known[name]):
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
    trained
        The modules that are trained.
    front
        The frozen part, in evaluation mode: inputs to activations, one tensor for each of `arrays`.
        None if the network is not cut.
    frozen
        The weights that are not trained, by their names in the whole network.
    end
        The operations of the trained part, from activations to logits.
    arrays
        The tensors that cross the cut.
    constants
        Values that the end takes from frozen weights alone, by the names of their modules.
    why_whole
        The reason why the network is not cut; empty if it is.
    """

    trained: tuple[str, ...]
    front: nn.Module | None = None
    frozen: dict[str, Tensor] = field(default_factory=dict)
    end: fx.Graph | None = None
    arrays: tuple[Crossing, ...] = ()
    constants: dict[str, Tensor] = field(default_factory=dict)
    why_whole: str = ""

    def end_of(self, model: nn.Module) -> nn.Module:
        """Return the trained part of a network of this architecture; it shares its weights.

        Frozen weights in this part are hidden (`hfedatm_core.hiding`). If the network is not cut,
        the part is the network itself.
        """
        if self.end is None:
            return hide(model, self.trained)
        root = copy.copy(model)
        root._modules = {**model._modules, **{n: Constant(t) for n, t in self.constants.items()}}
        return hide(fx.GraphModule(root, self.end, type(model).__name__), self.trained)

    @property
    def digest(self) -> str:
        """Return a digest of what the activations depend on besides the examples."""
        found = hashlib.sha256(str(getattr(self.front, "code", "")).encode())
        for name, tensor in sorted(self.frozen.items()):
            found.update(name.encode() + tensor.detach().cpu().contiguous().numpy().tobytes())
        return found.hexdigest()


def cut(model: nn.Module, modules: Iterable[str], example: Tensor | Mapping[str, Tensor]) -> Cut:
    """Cut a network before the first of the named modules.

    Several tensors may cross the cut. What the end needs and follows from the inputs without
    weights is computed again; what follows from frozen weights alone is a constant. Frozen weights
    behind the cut stay in the end, hidden. A network that cannot be cut stays whole, with all its
    frozen weights hidden.

    Raises
    ------
    ValueError
        If everything would be trained, or nothing.
    """
    names = tuple(modules)
    every = dict(model.named_parameters())
    trained = {name for name in every if any(name.startswith(f"{part}.") for part in names)}
    if not trained:
        raise ValueError(f"no layer is named; the last ones are {', '.join(blocks(model)[-5:])}")
    if trained == set(every):
        raise ValueError("nothing would be frozen: leave it empty to train the whole model")
    try:
        parts = _cut(model, names, trained, example)
    except ValueError as error:
        parts = Cut(names, why_whole=str(error))
    state = model.state_dict()
    hidden = frozen_names(model, names)
    kept = set(parts.end_of(model).state_dict()) if parts.front else set(state) - hidden
    frozen_state = {n: t.detach() for n, t in state.items() if n not in kept}
    return replace(parts, frozen=frozen_state)


def _cut(
    model: nn.Module,
    names: tuple[str, ...],
    trained: set[str],
    example: Tensor | Mapping[str, Tensor],
) -> Cut:
    every = dict(model.named_parameters())
    graph = _graph(model, trained)
    behind: set[fx.Node] = set()
    for node in graph.nodes:
        if _weights(node, every) & trained or behind & set(node.all_input_nodes):
            behind.add(node)
    found = Crossings(graph, behind, every, model, example)
    front, end = _front(graph, found.edges), _end(graph, found)
    frozen_part = fx.GraphModule(model, front, "Frozen").eval().requires_grad_(False)
    return Cut(names, frozen_part, {}, end, found.arrays, found.constants)


class _Follow(fx.Tracer):
    """Open only modules that hold both frozen and trained weights, and no ``closed`` ones."""

    def __init__(self, trained: set[str], closed: Iterable[str]) -> None:
        super().__init__()
        self._trained, self._closed = trained, set(closed)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        inside = {f"{module_qualified_name}.{name}" for name, _ in m.named_parameters()}
        mixed = bool(inside & self._trained and inside - self._trained)
        return not mixed or module_qualified_name in self._closed


def _graph(model: nn.Module, trained: set[str]) -> fx.Graph:
    """Follow a network; blocks of mixed weights whose code cannot be followed stay closed."""
    before, graphs = model.training, list[fx.Graph]()
    for closed in ([], blocks(model)):
        try:
            graphs = [_Follow(trained, closed).trace(model.train(mode)) for mode in (True, False)]
            break
        except Exception as error:  # the user's forward may raise anything when it is followed
            why = f"{type(error).__name__}: {str(error)[:200]}"
        finally:
            model.train(before)
    if not graphs:
        raise ValueError(f"the code of {type(model).__name__} cannot be followed ({why})")
    if len({str(graph) for graph in graphs}) > 1:
        raise ValueError(
            f"{type(model).__name__} does different things in training and evaluation outside of "
            "its layers"
        )
    return graphs[0]


def _weights(node: fx.Node, every: Mapping[str, Tensor]) -> set[str]:
    if node.op == "get_attr":
        return {str(node.target)} & set(every)
    if node.op == "call_module":
        return {name for name in every if name.startswith(f"{node.target}.")}
    return set()


def _front(graph: fx.Graph, edges: list[fx.Node]) -> fx.Graph:
    needed = set(edges)
    for node in reversed(graph.nodes):
        if node in needed:
            needed |= set(node.all_input_nodes)
    front, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in graph.nodes:
        if node in needed or node.op == "placeholder":
            copies[node] = front.node_copy(node, lambda n: copies[n])
    front.output(tuple(copies[edge] for edge in edges))
    return front


def _end(graph: fx.Graph, found: Crossings) -> fx.Graph:
    end, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for edge, array in zip(found.edges, found.arrays, strict=True):
        copies[edge] = end.placeholder(array.name)
    for node, name in found.constant_nodes.items():
        copies[node] = end.call_module(name)
    for node in graph.nodes:
        if node in found.behind:
            copies[node] = end.node_copy(node, lambda n: copies[n])
    return end
