"""Check whether a checkpoint fits a model, and name the tensors that do not."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

from torch import Tensor, nn

from hfedatm_core.checkpoints.files import Shapes, differences, read_state
from hfedatm_core.tensors import State

T = TypeVar("T")


def shapes_of(state: State) -> dict[str, tuple[int, ...]]:
    """Return the shapes of tensors by name."""
    return {name: tuple(value.shape) for name, value in state.items()}


def named_like(found: Mapping[str, T], wanted: Shapes) -> dict[str, T]:
    """Return ``found`` without a wrapper's prefix of every name (``module.``, ``model.``)."""
    heads = {name.partition(".")[0] for name in found}
    if len(heads) == 1 and not any(name.partition(".")[0] in heads for name in wanted):
        prefix = f"{heads.pop()}."
        return {name.removeprefix(prefix): value for name, value in found.items()}
    return dict(found)


def read_fitting(path: Path | str, wanted: Shapes) -> dict[str, Tensor]:
    """Return the tensors of a checkpoint under the model's names, or raise if they do not fit."""
    state = read_state(path)
    require_fit(path, shapes_of(state), wanted)
    named = named_like(state, wanted)
    return {name: named[name] for name in wanted}  # in the model's order


def load_checkpoint(model: nn.Module, path: Path | str) -> None:
    """Load the weights in a file into a model."""
    model.load_state_dict(read_fitting(path, shapes_of(model.state_dict())))


def require_fit(path: Path | str, shapes: Shapes, wanted: Shapes) -> None:
    """Raise a ``ValueError`` that lists the differences, if there are any."""
    found = named_like(shapes, wanted)
    problems = differences(found, wanted)
    if not problems:
        return
    classes = class_counts(found, wanted)
    if found.keys() == wanted.keys() and classes is not None:
        raise ValueError(
            f"{path} has {classes[0]} classes, the model {classes[1]} ({problems[0]}); only "
            "checkpoints for the same classes can be merged"
        )
    missing = sum(problem.endswith("is missing") for problem in problems)
    raise ValueError(
        f"{path} does not fit the model: {'; '.join(problems[:3])} ({len(problems)} differences, "
        f"{missing} of them missing tensors); all checkpoints must be of the model's architecture"
    )


def class_counts(found: Shapes, wanted: Shapes) -> tuple[int, int] | None:
    """Return both numbers of classes if the shapes differ only in them, else None."""
    pairs = [(tuple(found[n]), tuple(shape)) for n, shape in wanted.items() if n in found]
    unlike = [(a, b) for a, b in pairs if a != b]
    counts = {(a[0], b[0]) for a, b in unlike if a and b and a[1:] == b[1:]}
    rows_alone = all(a and b and a[1:] == b[1:] for a, b in unlike)
    return counts.pop() if rows_alone and len(counts) == 1 else None
