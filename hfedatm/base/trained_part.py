"""Train a part of the model: activations behind the frozen front take the place of the examples.

The rest of the code sees a smaller model and a data set of activations. So what is frozen is
neither sent nor merged nor measured, and rounds cost as much as the trained end.
"""

from __future__ import annotations

import copy
import hashlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import nn

from hfedatm.base.errors import UserError
from hfedatm_core import forward
from hfedatm_core.data import DataSpec, Domain, DomainData, batches
from hfedatm_core.data.base import SHAPES
from hfedatm_core.data.cache import Array, cached_array
from hfedatm_core.freezing import Cut, cut, trained_modules
from hfedatm_core.tensors import State

log = logging.getLogger("hfedatm")
ROWS = 64
KINDS = {1: "vector", 3: "image"}


@dataclass(frozen=True)
class ActivationSpec(DataSpec):
    """The description of activations; ``before`` describes the examples they are made of."""

    before: DataSpec = DataSpec("vector", 2, (1,))


class FrozenPart:
    """The front of a model that is not trained; equal ones turn examples into equal activations."""

    def __init__(self, model: nn.Module, train_only: str, spec: DataSpec) -> None:
        try:
            self.trained = trained_modules(model, train_only)
            self._cut: Cut = cut(model, self.trained, spec.example())
        except ValueError as error:
            raise UserError(f"train-only: {error}") from None
        shape = self._cut.shape
        if len(shape) not in KINDS:
            raise UserError(
                f"train-only: what crosses the cut has the shape {shape} per example; needed is "
                f"{SHAPES['vector']} or {SHAPES['image']}, such as behind the pooling"
            )
        self.before = spec
        self.spec = ActivationSpec(
            KINDS[len(shape)],  # type: ignore[arg-type]
            spec.num_classes,
            shape,
            spec.class_names,
            outputs=spec.outputs,
            target_mean=spec.target_mean,
            target_std=spec.target_std,
            before=spec,
        )
        self.digest = self._cut.digest
        self.state: State = self._cut.frozen
        self._end = self._cut.end_of(model)

    def __eq__(self, other: object) -> bool:
        """Tell whether both give the same activations."""
        if not isinstance(other, FrozenPart):
            return False
        return (other.digest, other.before) == (self.digest, self.before)

    def __hash__(self) -> int:
        """Return a number that equal parts share."""
        return hash((self.digest, self.before))

    def describe(self, end: nn.Module) -> str:
        """Return one line that says what is trained."""
        frozen = sum(tensor.numel() for tensor in self.state.values())
        own = sum(tensor.numel() for tensor in end.state_dict().values())
        return (
            f"trains only {', '.join(self.trained)}: {own:,} of {own + frozen:,} numbers "
            f"({100 * own / (own + frozen):.1f} %) travel; the rest is frozen"
        )

    def end(self, model: nn.Module | None = None) -> nn.Module:
        """Return the trained end of a whole model, or a copy of that of the initial model."""
        return copy.deepcopy(self._end) if model is None else self._cut.end_of(model)

    def without(self, state: Mapping[str, torch.Tensor], source: object) -> State:
        """Return the trained tensors of a whole model; its frozen ones must be the same as here."""
        for name, tensor in self.state.items():
            if name not in state or not torch.equal(state[name], tensor):
                raise UserError(
                    f"{source}: its frozen layer {name} is not that of this model; has train-only, "
                    "the model or its pretrained file changed since?"
                )
        return {name: tensor for name, tensor in state.items() if name not in self.state}

    def fill(self, array: Array, domain: Domain, device: torch.device) -> None:
        """Write a domain's activations."""
        log.info("  %s: computing %d activations, once", domain.name, len(domain))
        front, start = self._cut.front.to(device).eval(), 0
        with torch.no_grad():
            for inputs, targets in batches(domain, self.before, ROWS, device=device):
                found = forward(front, inputs).float().cpu().numpy()
                array[start : start + len(targets)] = found
                start += len(targets)


@lru_cache(maxsize=4)
def activations(data: DomainData, part: FrozenPart, device: torch.device) -> DomainData:
    """Return a data set of activations; each domain's are computed once and kept in the cache."""
    found = {name: _domain(domain, part, device) for name, domain in data.domains.items()}
    return replace(data, spec=part.spec, domains=found)


def join(whole: nn.Module, end: nn.Module, part: FrozenPart) -> nn.Module:
    """Put a trained end back into a whole model."""
    graph: Any = getattr(end, "graph", None)
    for node in graph.nodes if graph else ():
        if node.op == "call_module":
            whole.set_submodule(node.target, end.get_submodule(node.target))
    if set(whole.state_dict()) != set(part.state) | set(end.state_dict()):
        raise UserError(
            "train-only: the client method or fix-model changes the model in a way that does not "
            "fit a model of which only a part is trained"
        )
    return whole


def _domain(domain: Domain, part: FrozenPart, device: torch.device) -> Domain:
    shape = (len(domain), *part.spec.input_shape)
    key = f"{part.digest[:16]}-{_digest(domain)}-{device.type}"
    name = "".join(c if c.isalnum() else "-" for c in domain.name)
    array = cached_array(
        f"activations-{name}", key, shape, np.float32, lambda a: part.fill(a, domain, device)
    )
    return Domain(domain.name, torch.from_numpy(np.asarray(array)), domain.targets)


def _digest(domain: Domain) -> str:
    """Return a digest of a domain's examples, read a part at a time."""
    inputs = domain.inputs if isinstance(domain.inputs, Mapping) else {"": domain.inputs}
    found = hashlib.sha256()
    for name, tensor in inputs.items():
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        for start in range(0, len(tensor), 1024):
            found.update(tensor[start : start + 1024].contiguous().numpy().data)
    return found.hexdigest()[:16]
