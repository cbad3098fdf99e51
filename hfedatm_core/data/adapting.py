"""Domains from data sets of torch and Hugging Face, without conversion by hand.

Partitions of ``flwr-datasets`` are data sets of Hugging Face. Their package need not be installed:
a data set is recognised by its columns.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

from hfedatm_core.data.base import DataSpec, Domain, DomainData, Inputs

INPUTS = ("image", "img", "pixel_values", "inputs", "input", "features", "x")
TARGETS = ("label", "labels", "target", "targets", "fine_label", "y")
TEXT = ("input_ids", "attention_mask", "token_type_ids")


class NotADomain(ValueError):
    """A data set cannot be read as a domain; the message does not describe its examples."""


def as_domains(data: DomainData) -> DomainData:
    """Return the data with every torch or Hugging Face data set in it made a `Domain`.

    Raises
    ------
    NotADomain
        If the columns or the shapes of a data set are not understood; ``args`` are the domain's
        name and the reason.
    """
    if all(isinstance(domain, Domain) for domain in data.domains.values()):
        return data
    domains: dict[str, Domain] = {}
    for name, found in data.domains.items():
        try:
            domains[name] = domain_of(name, found, data.spec) if is_data_set(found) else found
        except NotADomain as error:
            raise NotADomain(name, str(error)) from None
    return replace(data, domains=domains)


def is_data_set(found: object) -> bool:
    """Return whether this is a data set of torch or of Hugging Face."""
    return isinstance(found, Dataset) or _has_columns(found)


def domain_of(
    name: str,
    data_set: Any,
    spec: DataSpec,
    *,
    inputs: str | Sequence[str] | None = None,
    targets: str | None = None,
) -> Domain:
    """Read a data set of torch or Hugging Face once, and keep its examples as tensors.

    An example is a pair ``(input, target)``, or a mapping of columns. Images may be tensors,
    arrays or PIL images: bytes stay bytes (uint8, channels first) and are scaled by the spec. A
    transform with randomness is applied once; the setting ``augment`` changes every batch.

    Parameters
    ----------
    name
        The name of the domain.
    data_set
        A data set with ``len`` and ``[]``, such as ``torchvision.datasets.MNIST(...)``,
        ``datasets.load_dataset(...)["train"]`` or a partition of ``flwr-datasets``.
    spec
        The description of the data.
    inputs, targets
        The columns of an example that is a mapping. Without them common names are looked for
        (``image``, ``label``, ...); text consists of ``input_ids`` and ``attention_mask``.
    """
    if isinstance(data_set, IterableDataset) or not hasattr(data_set, "__len__"):
        raise NotADomain(
            f"a {type(data_set).__name__} has no length, and clients get examples by number: use a "
            "data set with len() and [], such as list(data_set)"
        )
    if not len(data_set):
        raise NotADomain("it has no examples")
    first = data_set[0]
    if isinstance(first, Mapping):
        used, wanted = _columns(list(first), spec, inputs, targets)
        rows: Iterable[Any] = (data_set[row] for row in range(len(data_set)))
        return _from_columns(name, rows, used, wanted, spec)
    if not isinstance(first, tuple | list) or len(first) != 2:
        raise NotADomain(
            f"an example is a {type(first).__name__}; needed is a pair (input, target) or a "
            "mapping of columns"
        )
    pairs = [data_set[row] for row in range(len(data_set))]
    return Domain(
        name,
        _stack([_tensor(value, spec) for value, _ in pairs], "inputs"),
        _targets([target for _, target in pairs]),
    )


def _from_columns(
    name: str, rows: Iterable[Any], used: Sequence[str], wanted: str, spec: DataSpec
) -> Domain:
    kept: dict[str, list[Any]] = {column: [] for column in used}
    found: list[Any] = []
    for row in rows:
        for column in used:
            kept[column].append(_tensor(row[column], spec))
        found.append(row[wanted])
    stacked = {column: _stack(values, column) for column, values in kept.items()}
    inputs: Inputs = stacked if spec.kind == "text" else stacked[used[0]]
    return Domain(name, inputs, _targets(found))


def _columns(
    there: list[str], spec: DataSpec, inputs: str | Sequence[str] | None, targets: str | None
) -> tuple[list[str], str]:
    """Return the columns that are inputs, and the column of targets."""
    if inputs is None:
        known = TEXT if spec.kind == "text" else INPUTS
        found = [column for column in known if column in there]
        used = found if spec.kind == "text" else found[:1]
    else:
        used = [inputs] if isinstance(inputs, str) else list(inputs)
    wanted = targets or next((column for column in TARGETS if column in there), "")
    missing = [column for column in (*used, wanted) if column not in there]
    if not used or missing:
        what = "inputs" if not used or missing[0] in used else "targets"
        raise NotADomain(
            f"it has the columns {', '.join(there)}; say which are which: domain_of(name, "
            f"data_set, spec, inputs=..., targets=...) ({what} not found)"
            + (", and text must be tokenised (input_ids)" if spec.kind == "text" else "")
        )
    return used, wanted


def _tensor(value: Any, spec: DataSpec) -> Tensor:
    """Return an input as a tensor; of a picture with channels last, channels come first."""
    if isinstance(value, Tensor):
        return value
    array = np.asarray(value)
    if array.dtype == object:
        raise NotADomain(f"an input is a {type(value).__name__}, which is no array of numbers")
    if spec.kind == "image" and not isinstance(value, np.ndarray | list):  # a PIL image
        array = array[None] if array.ndim == 2 else array.transpose(2, 0, 1)
    elif spec.kind == "image" and array.ndim == 2:
        array = array[None]
    found = torch.from_numpy(np.ascontiguousarray(array))
    return found.float() if found.dtype == torch.float64 else found


def _stack(values: list[Tensor], what: str) -> Tensor:
    shapes = {tuple(value.shape) for value in values}
    if len(shapes) > 1:
        some = ", ".join(map(str, sorted(shapes)[:3]))
        raise NotADomain(
            f"{what} of several shapes ({some}); resize, pad or cut them to one shape first"
        )
    return torch.stack(values)


def _targets(values: list[Any]) -> Tensor:
    if isinstance(values[0], Tensor):
        return _stack([torch.as_tensor(value) for value in values], "targets")
    array = np.asarray(values)
    if array.dtype == object or array.dtype.kind not in "biuf":
        raise NotADomain("targets are no numbers of one shape; number the classes from 0")
    found = torch.from_numpy(np.ascontiguousarray(array))
    if found.dtype == torch.float64:
        return found.float()
    return found if found.is_floating_point() or found.ndim > 1 else found.long()


def _has_columns(found: object) -> bool:
    return all(hasattr(found, name) for name in ("column_names", "features", "__getitem__"))
