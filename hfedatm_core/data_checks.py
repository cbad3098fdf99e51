"""Refuse a data set whose examples no model could be trained on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from hfedatm_core.data.base import DataSpec, Domain, DomainData
from hfedatm_core.tasks import BadTargets, Classification, LearningTask

_CHUNK = 2**24  # values checked at once, so that memory-mapped data is never loaded as a whole


class BadDomain(ValueError):
    """A domain's examples do not fit the data set's description.

    ``fault`` says what is wrong without describing the examples, so that nodes that must not see
    the data may receive it; the message also names the domain and describes its examples.
    """

    def __init__(self, domain: str, fault: str, detail: str = "") -> None:
        self.fault = fault
        super().__init__(f"domain {domain!r}: {fault}" + (f" ({detail})" if detail else ""))


def check_domains(data: DomainData, task: LearningTask | None = None) -> None:
    """Raise `BadDomain` unless all targets suit the task and all inputs match the spec.

    Every example is checked once, a part of the data at a time. Without a task it is
    classification.
    """
    for name, domain in data.domains.items():
        if not isinstance(domain, Domain):
            raise BadDomain(str(name), f"it is {_kind(domain)}, not a Domain{_cure(domain)}")
        _check_targets(domain, task or Classification(data.spec))
        if data.spec.kind == "text":
            _check_tokens(domain, data.spec)
        else:
            _check_numbers(domain, data.spec)


def _check_targets(domain: Domain, task: LearningTask) -> None:
    targets: Any = domain.targets
    if not isinstance(targets, Tensor):
        raise BadDomain(domain.name, f"targets is {_kind(targets)}, not a Tensor{_cure(targets)}")
    if not len(targets):
        raise BadDomain(domain.name, "it has no examples")
    try:
        task.check(targets)
    except BadTargets as error:
        raise BadDomain(domain.name, error.fault, error.detail) from None


def _check_numbers(domain: Domain, spec: DataSpec) -> None:
    inputs: Any = domain.inputs
    if not isinstance(inputs, Tensor):
        raise BadDomain(domain.name, f"inputs is {_kind(inputs)}, not a Tensor{_cure(inputs)}")
    if inputs.shape[1:] != spec.input_shape:
        raise BadDomain(
            domain.name,
            f"an example has the shape {_shape(inputs[:1])[1:]}, and input_shape of the DataSpec "
            f"says {spec.input_shape}",
        )
    if inputs.dtype != torch.float32 and not (inputs.dtype, spec.kind) == (torch.uint8, "image"):
        raise BadDomain(
            domain.name,
            f"inputs is of {inputs.dtype}; it must be of torch.float32"
            + (", or torch.uint8 for pixels of 0 … 255" if spec.kind == "image" else ""),
        )
    if inputs.is_floating_point():
        for first, rows in _chunks(inputs):
            if not bool(torch.isfinite(rows).all()):
                bad = int((~torch.isfinite(rows.flatten(1)).all(1)).nonzero()[0])
                raise BadDomain(
                    domain.name,
                    "an input is NaN or infinite: remove such examples, or fill the gaps",
                    f"the first is in example {first + bad}",
                )


def _check_tokens(domain: Domain, spec: DataSpec) -> None:
    inputs: Any = domain.inputs
    if not isinstance(inputs, Mapping) or "input_ids" not in inputs:
        raise BadDomain(
            domain.name,
            f"inputs is {_kind(inputs)}; text is a dict with 'input_ids' and 'attention_mask'",
        )
    for key, tensor in inputs.items():
        if not isinstance(tensor, Tensor) or tensor.is_floating_point() or tensor.ndim != 2:
            raise BadDomain(domain.name, f"{key} must be a tensor of integers, examples x tokens")
        if tensor.shape[1] > spec.input_shape[0]:
            raise BadDomain(
                domain.name,
                f"{key} has {tensor.shape[1]} tokens per example, and input_shape of the DataSpec "
                f"says {spec.input_shape[0]}",
            )
    assert spec.vocab_size is not None  # a DataSpec of text has a vocab_size
    for _, rows in _chunks(inputs["input_ids"]):
        if int(rows.min()) < 0 or int(rows.max()) >= spec.vocab_size:
            raise BadDomain(
                domain.name,
                f"a token is not in the vocabulary: with vocab_size = {spec.vocab_size} tokens "
                f"are 0 … {spec.vocab_size - 1}",
            )


def _chunks(tensor: Tensor) -> Iterator[tuple[int, Tensor]]:
    step = max(1, _CHUNK // max(1, tensor[:1].numel()))
    for first in range(0, len(tensor), step):
        yield first, tensor[first : first + step]


def _shape(tensor: Tensor) -> tuple[int, ...]:
    return tuple(tensor.shape)


def _kind(value: object) -> str:
    if isinstance(value, Dataset):
        return f"a torch Dataset ({type(value).__name__})"
    return f"of type {type(value).__name__}"


def _cure(value: object) -> str:
    if isinstance(value, Dataset):
        return (
            ": make tensors of it, such as Domain(name, torch.stack([x for x, _ in dataset]), "
            "torch.tensor([y for _, y in dataset]))"
        )
    return ": torch.as_tensor makes one" if type(value).__module__ in ("numpy", "builtins") else ""
