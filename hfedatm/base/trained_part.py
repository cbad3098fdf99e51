"""Train a part of the model: activations behind the frozen front take the place of the examples.

The rest of the code sees a smaller model and a data set of activations. So what is frozen is
neither sent nor merged nor measured, and rounds cost as much as the trained end.
"""

from __future__ import annotations

import copy
import hashlib
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import nn

from hfedatm.base.errors import UserError
from hfedatm_core import forward
from hfedatm_core.adapters import adapter_modules, is_lora
from hfedatm_core.crossing import Constant, Crossing
from hfedatm_core.data import DataSpec, Domain, DomainData, Inputs, batches
from hfedatm_core.data.cache import Array, cached_array
from hfedatm_core.factor_names import FIRST, SECOND
from hfedatm_core.freezing import Cut, cut, trained_modules
from hfedatm_core.hiding import hidden_names
from hfedatm_core.tensors import State

log = logging.getLogger("hfedatm")
ROWS = 64
TIMED = 8
KINDS = {1: "vector", 3: "image"}


@dataclass(frozen=True)
class ActivationSpec(DataSpec):
    """The description of activations; ``before`` describes the examples they are made of.

    ``arrays`` describes activations that are several tensors, or one of another shape than a
    vector's or an image's.
    """

    before: DataSpec = DataSpec("vector", 2, (1,))
    arrays: tuple[Crossing, ...] = ()

    def example(self, batch: int = 2) -> Inputs:
        """Return small valid inputs, always the same ones, for tracing a model."""
        if not self.arrays:
            return super().example(batch)
        generator = torch.Generator().manual_seed(0)
        return {
            array.name: torch.randn((batch, *array.shape), generator=generator)
            if array.dtype.is_floating_point
            else torch.ones((batch, *array.shape), dtype=array.dtype)
            for array in self.arrays
        }

    def token_wise(self, inputs: Mapping[str, torch.Tensor]) -> set[str]:
        """Return the inputs whose second axis counts the tokens of a text."""
        if not self.arrays:
            return super().token_wise(inputs)
        return {array.name for array in self.arrays if array.by_token}


class FrozenPart:
    """The front of a model that is not trained; equal ones turn examples into equal activations."""

    def __init__(self, model: nn.Module, train_only: str, spec: DataSpec) -> None:
        try:
            lora = is_lora(train_only)
            self.trained = adapter_modules(model) if lora else trained_modules(model, train_only)
            self._cut: Cut = cut(model, self.trained, spec.example())
        except ValueError as error:
            raise UserError(f"train-only: {error}") from None
        self.before = spec
        self.spec = _spec(self._cut.arrays, spec) if self._cut.front else _same(spec)
        self.digest = self._cut.digest
        self.state: State = self._cut.frozen
        self._end = self._cut.end_of(model)
        self.hides = bool(hidden_names(self._end))

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
        own, frozen = _bytes(end.state_dict()), _bytes(self.state)
        numbers = [sum(t.numel() for t in s.values()) for s in (end.state_dict(), self.state)]
        line = (
            f"trains only {_listed(self.trained)}: {numbers[0]:,} of {sum(numbers):,} numbers "
            f"({100 * numbers[0] / sum(numbers):.1f} %) travel, {_size(own)} instead of "
            f"{_size(own + frozen)} a model; the rest is frozen"
        )
        if not self.why_whole:
            return line
        return f"{line}, and computed in every pass, because {self.why_whole}"

    def savings(self, device: torch.device) -> dict[str, float]:
        """Return what is saved: bytes of a model in one direction, seconds of a pass.

        The seconds are measured here, on made-up examples, and are those of one example; a pass
        over the activations saves them for every example.
        """
        saved = {"bytes_per_model": float(_bytes(self.state)), "seconds_per_example": 0.0}
        if self._cut.front is None:
            return saved
        front, inputs = self._cut.front.to(device).eval(), self.before.example(TIMED)
        given = {k: v.to(device) for k, v in inputs.items()} if isinstance(inputs, dict) else None
        with torch.no_grad():
            for _ in range(2):  # the first pass warms up
                started = time.perf_counter()
                forward(front, given if given is not None else inputs.to(device))  # type: ignore[union-attr]
                saved["seconds_per_example"] = (time.perf_counter() - started) / TIMED
        return saved

    @property
    def why_whole(self) -> str:
        """Return why activations are not computed once; empty if they are."""
        return self._cut.why_whole

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
        assert self._cut.front is not None  # activations() asks no part that is not cut
        log.info("  %s: computing %d activations, once", domain.name, len(domain))
        front, start = self._cut.front.to(device).eval(), 0
        names = [crossing.name for crossing in self.spec.arrays]
        stored: Any = array
        parts = [stored[name] for name in names] if names else [stored]
        with torch.no_grad():
            for inputs, targets in batches(domain, self.before, ROWS, device=device):
                for part, found in zip(parts, forward(front, inputs), strict=True):
                    # A batch of short texts is narrower than the array, which is made of zeros.
                    widths = (slice(0, size) for size in found.shape[1:])
                    part[slice(start, start + len(targets)), *widths] = found.cpu().numpy()
                start += len(targets)


@lru_cache(maxsize=4)
def activations(data: DomainData, part: FrozenPart, device: torch.device) -> DomainData:
    """Return a data set of activations; each domain's are computed once and kept in the cache."""
    if part.why_whole:
        return replace(data, spec=part.spec)
    found = {name: _domain(domain, part, device) for name, domain in data.domains.items()}
    return replace(data, spec=part.spec, domains=found)


def join(whole: nn.Module, end: nn.Module, part: FrozenPart) -> nn.Module:
    """Put a trained end back into a whole model, which hides nothing."""
    graph: Any = getattr(end, "graph", None)
    if part.why_whole and type(end) is type(whole):
        for name, child in end.named_children():
            setattr(whole, name, child)
    for node in graph.nodes if graph else ():
        if node.op == "call_module" and not isinstance(end.get_submodule(node.target), Constant):
            whole.set_submodule(node.target, end.get_submodule(node.target))
    if set(whole.state_dict()) != set(part.state) | set(end.state_dict()):
        raise UserError(
            "train-only: the client method or fix-model changes the model in a way that does not "
            "fit a model of which only a part is trained"
        )
    return whole


def _domain(domain: Domain, part: FrozenPart, device: torch.device) -> Domain:
    shape: tuple[int, ...] = (len(domain), *part.spec.input_shape)
    kind: np.dtype[Any] = np.dtype(np.float32)
    if part.spec.arrays:
        fields = [(a.name, _stored(a.dtype), a.shape) for a in part.spec.arrays]
        shape, kind = (len(domain),), np.dtype(fields)
    key = f"{part.digest[:16]}-{_digest(domain)}-{device.type}"
    name = "".join(c if c.isalnum() else "-" for c in domain.name)
    array: Any = cached_array(
        f"activations-{name}", key, shape, kind, lambda a: part.fill(a, domain, device)
    )
    inputs: Inputs = (
        {a.name: torch.from_numpy(np.asarray(array[a.name])) for a in part.spec.arrays}
        if part.spec.arrays
        else torch.from_numpy(np.asarray(array))
    )
    return Domain(domain.name, inputs, domain.targets)


def _stored(dtype: torch.dtype) -> type[np.generic]:
    return np.float32 if dtype.is_floating_point else np.int32


def _listed(names: list[str]) -> str:
    """Return the names of trained modules; the two factors of adapters as a number of layers."""
    layers = [name for name in names if name.endswith(f".{FIRST}")]
    rest = [name for name in names if not name.endswith((f".{FIRST}", f".{SECOND}"))]
    adapters = [f"adapters of {len(layers)} layers"] if layers else []
    return ", ".join(adapters + rest)


def _bytes(state: Mapping[str, torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in state.values())


def _size(count: int) -> str:
    return f"{count / 1e6:.1f} MB" if count >= 1e6 else f"{count / 1e3:.1f} kB"


def _same(before: DataSpec) -> ActivationSpec:
    """Describe the examples themselves, as what a model that is not cut works on."""
    given = {f.name: getattr(before, f.name) for f in fields(DataSpec)}
    if before.outputs:
        given["num_classes"] = 0  # follows from the outputs
    return ActivationSpec(**given, before=before)


def _spec(arrays: tuple[Crossing, ...], before: DataSpec) -> ActivationSpec:
    """Describe the activations: a vector, an image, or tensors by name."""
    same = {
        "class_names": before.class_names,
        "outputs": before.outputs,
        "target_mean": before.target_mean,
        "target_std": before.target_std,
        "before": before,
    }
    plain = len(arrays) == 1 and arrays[0].dtype.is_floating_point and not arrays[0].by_token
    if plain and (kind := KINDS.get(len(arrays[0].shape))):
        return ActivationSpec(kind, before.num_classes, arrays[0].shape, **same)  # type: ignore[arg-type]
    return ActivationSpec(
        before.kind,
        before.num_classes,
        before.input_shape,
        vocab_size=before.vocab_size,
        tokenizer=before.tokenizer,
        arrays=arrays,
        **same,  # type: ignore[arg-type]
    )


def _digest(domain: Domain) -> str:
    """Return a digest of a domain's examples, read a part at a time."""
    inputs = domain.inputs if isinstance(domain.inputs, Mapping) else {"": domain.inputs}
    found = hashlib.sha256()
    for name, tensor in inputs.items():
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        for start in range(0, len(tensor), 1024):
            found.update(tensor[start : start + 1024].contiguous().numpy().data)
    return found.hexdigest()[:16]
