"""Find the layer before every BatchNorm, and the BatchNorms that belong to no layer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
# In evaluation mode these modules return their input unchanged.
NOTHING = (nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)


@dataclass(frozen=True)
class Norm:
    """A BatchNorm that reads only the output of one layer, and is the only reader of that output.

    In evaluation mode it scales and shifts that output, so it can be made a part of the layer.

    Attributes
    ----------
    name, layer
        Dotted names of the BatchNorm and of the convolution or Linear layer.
    eps
        The constant that the BatchNorm adds to the variance.
    """

    name: str
    layer: str
    eps: float


@dataclass(frozen=True)
class Event:
    """One operation: its name, its arguments by name, and the identities of its tensors."""

    name: str
    arguments: Mapping[str, Any]
    operands: tuple[int, ...]
    results: tuple[int, ...]


def find_norms(
    model: nn.Module,
    names: Mapping[int, str],
    evaluation: Sequence[Event],
    training: Sequence[Event],
) -> tuple[tuple[Norm, ...], dict[str, str]]:
    """Return the norms that belong to a layer, and the reason why each other norm does not.

    A reader that runs in training mode only, such as an auxiliary classifier, counts as well.

    Parameters
    ----------
    names
        Names of the model's tensors by their identities in the events.
    """
    found, reasons = _find(model, names, evaluation)
    in_training, others = _find(model, names, training)
    both = tuple(norm for norm in found if norm in in_training)
    changed = [norm.name for norm in found if norm not in in_training]
    reasons |= {
        name: f"in training mode {others.get(name, 'it reads another layer')}" for name in changed
    }
    return both, reasons


def _find(
    model: nn.Module, names: Mapping[int, str], events: Sequence[Event]
) -> tuple[tuple[Norm, ...], dict[str, str]]:
    readers = Counter(operand for event in events for operand in set(event.operands))
    single = _Single(model, {names[i]: count for i, count in readers.items() if i in names})
    writers: dict[int, Event] = {}
    found: list[Norm] = []
    reasons = {
        name: "the forward pass does not call it"
        if module.running_mean is not None
        else "it keeps no running statistics"
        for name, module in model.named_modules()
        if isinstance(module, BATCH_NORMS)
    }
    for event in events:
        mean = event.arguments.get("running_mean") if "batch_norm" in event.name else None
        name = names.get(id(mean), "").removesuffix(".running_mean")
        if name in reasons:
            source = event.operands[0]
            layer = _layer(writers.get(source), writers, names, single)
            reason = _obstacle(name, layer, readers[source], single)
            if reason:
                reasons[name] = reason
            else:
                del reasons[name]
                found.append(Norm(name, layer, float(event.arguments["eps"])))
        writers.update(dict.fromkeys(event.results, event))
    return tuple(found), reasons


def _layer(
    event: Event | None, writers: Mapping[int, Event], names: Mapping[int, str], single: _Single
) -> str:
    """Return the name of the convolution or Linear layer of an operation; empty if none."""
    if event is None or event.name not in ("convolution", "addmm", "mm"):
        return ""
    weight = event.arguments["weight" if event.name == "convolution" else "mat2"]
    turned = writers.get(id(weight))
    if event.name != "convolution":
        if turned is None or turned.name not in ("t", "transpose"):
            return ""
        weight = turned.arguments["self"]
    layer, _, tensor = names.get(id(weight), "").rpartition(".")
    bias = event.arguments.get("self" if event.name == "addmm" else "bias")
    if isinstance(bias, Tensor) and names.get(id(bias)) != f"{layer}.bias":
        # The bias is another layer's. If that layer has the same weight, it is the layer sought.
        other = names.get(id(bias), "").removesuffix(".bias")
        layer = other if single.tied(layer, other) else ""
    return layer if tensor == "weight" else ""


class _Single:
    """Tell which modules have one name, are used once, share no parameter and have no hooks."""

    def __init__(self, model: nn.Module, uses: Mapping[str, int]) -> None:
        self._modules = dict(model.named_modules(remove_duplicate=False))
        self._stored = Counter(id(module) for module in self._modules.values())
        self._owners = Counter(
            id(tensor)
            for module in model.modules()
            for tensor in module._parameters.values()
            if tensor is not None
        )
        self._uses = uses

    def tied(self, one: str, other: str) -> bool:
        weights = [getattr(self._modules.get(name), "weight", None) for name in (one, other)]
        return weights[0] is not None and weights[0] is weights[1]

    def once(self, name: str) -> bool:
        module = self._modules[name]
        tensors = {n: t for n, t in module._parameters.items() if t is not None}
        return self._stored[id(module)] == 1 and all(
            self._owners[id(tensor)] == 1 and self._uses.get(f"{name}.{part}", 1) == 1
            for part, tensor in tensors.items()
        )

    def hooked(self, name: str) -> bool:
        module = self._modules[name]
        return bool(module._forward_hooks or module._forward_pre_hooks)


def _obstacle(name: str, layer: str, readers: int, single: _Single) -> str:
    """Return the reason why a BatchNorm is not part of the layer before it; empty if it is."""
    if not layer:
        return "it does not stand behind a convolution or a Linear layer"
    if not (single.once(name) and single.once(layer)):
        return f"it or '{layer}' is used or stored more than once"
    if readers > 1:
        return f"something else reads '{layer}', too"
    if single.hooked(name) or single.hooked(layer):
        return f"it or '{layer}' has hooks"
    return ""
