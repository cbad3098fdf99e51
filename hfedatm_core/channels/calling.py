"""A model's arguments and results, and a way to keep it from hiding its operations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

Inputs = Tensor | Sequence[Any] | Mapping[str, Any]


def arguments(inputs: Inputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return positional and keyword arguments of a model's forward."""
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return ((inputs,) if isinstance(inputs, Tensor) else tuple(inputs)), {}


def tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in the result of a model, whatever its type."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors(item)
    elif isinstance(value, list | tuple | set):
        for item in value:
            yield from tensors(item)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from tensors(getattr(value, field.name))


def keeps_strides(tensor: Tensor, size: Sequence[int], stride: Sequence[int], *rest: Any) -> bool:
    """Tell whether strides change only in dimensions of size one."""
    longer = [dim for dim, count in enumerate(size) if count > 1]
    return list(tensor.shape) == list(size) and all(
        tensor.stride(dim) == stride[dim] for dim in longer
    )


def storage(tensor: Tensor) -> int:
    """Return the identity of a tensor's memory."""
    return int(tensor.untyped_storage()._cdata)


@contextmanager
def slow_path() -> Iterator[None]:
    """Prevent torch's attention from running as one fused kernel, which hides its operations."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)
