"""Find the channel groups of a module.

Every position along every axis gets a name, an *atom* (:mod:`hfedatm_core.channels.atoms`). The
tracer follows the model operation by operation (:mod:`hfedatm_core.channels.recording`). Each
operation unites atoms, passes them on, or freezes them when it is not understood. Atoms that remain
free and that all tensors treat alike form a group (:mod:`hfedatm_core.channels.exchange`).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException

from hfedatm_core.channels.atoms import POSITION
from hfedatm_core.channels.exchange import Axis, Cells, Stretch, rows_of
from hfedatm_core.channels.groups import OUTPUT, ChannelGroup, Kind, Member, Role
from hfedatm_core.channels.layouts import Column
from hfedatm_core.channels.norms import BATCH_NORMS, Norm, find_norms
from hfedatm_core.channels.recording import Inputs, Recording

_LOG = logging.getLogger(__name__)
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


class Traced(NamedTuple):
    """The result of tracing: the fields of :class:`~hfedatm_core.channels.graph.ChannelGraph`."""

    groups: tuple[ChannelGroup, ...]
    frozen: dict[str, str]
    kernels: frozenset[str]
    norms: tuple[Norm, ...]
    lone_norms: dict[str, str]


def trace(model: nn.Module, inputs: Inputs) -> Traced:
    """See :meth:`hfedatm_core.channels.graph.ChannelGraph.trace`."""
    kernels = frozenset(
        f"{name}.weight" if name else "weight"
        for name, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, _CONVOLUTIONS)
    )
    try:
        recording = Recording(model)
        # Some layers run in one of the two modes only.
        evaluation, training = (recording.run(inputs, mode) for mode in (False, True))
    except Exception as error:  # the user's forward may raise anything
        what = f"{type(error).__name__}: {error}"
        if isinstance(error, DataDependentOutputException):
            what = f"its control flow depends on values ({error})"
        reason = f"cannot record the operations of this model: {what}"
        _LOG.warning("%s is merged without channel alignment: %s", type(model).__name__, reason)
        norms = [n for n, module in model.named_modules() if isinstance(module, BATCH_NORMS)]
        return Traced((), {type(model).__name__: reason}, kernels, (), dict.fromkeys(norms, reason))
    _fix_around_unused(recording, dict(model.named_parameters()))
    groups, frozen = _groups(recording, _aliases(model))
    for reason in dict.fromkeys(frozen.values()):
        if reason != OUTPUT:
            modules = [name for name in frozen if frozen[name] == reason]
            shown = ", ".join(modules[:3]) + (", ..." if len(modules) > 3 else "")
            _LOG.warning("channels of %s stay unaligned: %s", shown, reason)
    norms_found = find_norms(model, recording.names, evaluation, training)
    return Traced(groups, frozen, kernels, *norms_found)


def _aliases(model: nn.Module) -> dict[str, list[str]]:
    """Return all names of each tensor, keyed by its first name."""
    names: dict[int, list[str]] = {}
    for name, tensor in (
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ):
        names.setdefault(id(tensor), []).append(name)
    return {same[0]: same for same in names.values()}


def _fix_around_unused(recording: Recording, parameters: Mapping[str, Tensor]) -> None:
    """Freeze channels that may be read in another call, by weights that were not used here."""
    for name, parameter in parameters.items():
        if name in recording.used or not parameter.dim():
            continue
        owner = name
        while owner and owner not in recording.passed:
            owner = owner.rpartition(".")[0]
        reason = f"{name} is used neither in evaluation nor in training"
        for layout in recording.passed.get(owner, ()):
            recording.atoms.freeze(layout, f"it may reach {name}: {reason}")
        recording.frozen.setdefault(name.rpartition(".")[0], reason)


def _groups(
    recording: Recording, aliases: Mapping[str, list[str]]
) -> tuple[tuple[ChannelGroup, ...], dict[str, str]]:
    axes = list(_axes(recording))
    kept = [
        np.stack(columns, -1)
        for columns in (recording.atoms.resolve(layout) for layout in recording.kept)
    ]
    cells = Cells(recording.atoms, axes, kept)
    stretches = cells.stretches()
    groups: dict[int, ChannelGroup] = {}
    frozen = dict(recording.frozen)
    names: dict[str, int] = {}
    for tensor, (written, kind) in recording.writers.items():
        module = tensor.rpartition(".")[0]
        columns = [axis.rows for axis in axes if axis.tensor == tensor and axis.role == "filter"]
        found = np.concatenate([np.zeros(0, np.int64), *(rows.ravel() for rows in columns)])
        for cell in _in_order(cells.of[found]):
            if cell not in stretches:
                continue
            if cell not in groups:
                names[module] = names.get(module, 0) + 1
                name = module if names[module] == 1 else f"{module}#{names[module]}"
                groups[cell] = _group(name, kind, stretches[cell], aliases)
            elif kind == "conv" and groups[cell].kind != "conv":
                known = groups[cell]
                groups[cell] = ChannelGroup(known.name, known.size, kind, known.members)
        reason = _why(recording, written)
        if reason:
            frozen.setdefault(module, reason)
    return tuple(groups.values()), frozen


def _axes(recording: Recording) -> list[Axis]:
    """Return the axes of all tensors in use; freeze axes that cannot be permuted separately."""
    found = []
    for tensor, layout in recording.used.items():
        layout = recording.atoms.resolve(layout)
        for dim in range(layout[0].ndim if layout else 0):
            rows = rows_of(layout, dim)
            if rows is not None:
                found.append(Axis(tensor, dim, _role(recording, tensor, dim, rows), rows))
            else:
                mixed = tuple(column for column in layout if column.shape[dim] > 1)
                recording.atoms.freeze(mixed, f"the axes of {tensor} cannot be permuted separately")
    return found


def _role(recording: Recording, tensor: str, dim: int, rows: Column) -> Role:
    if tensor not in recording.writers:
        return "vector"
    written = recording.atoms.resolve(recording.writers[tensor][0])
    writes = dim == 0 and any(np.isin(column, rows).any() for column in written)
    return "filter" if writes else "input"


def _group(
    name: str, kind: Kind, stretches: list[Stretch], aliases: Mapping[str, list[str]]
) -> ChannelGroup:
    members = []
    for stretch in stretches:
        size, block = stretch.places.shape
        offset = int(stretch.places.min())
        regular = offset + np.arange(size * block)
        places = None
        if not np.array_equal(stretch.places.ravel(), regular):
            places = tuple(map(int, stretch.places.ravel()))
        for alias in aliases[stretch.axis.tensor]:
            axis, role = stretch.axis.axis, stretch.axis.role
            members.append(Member(alias, axis, offset, block, role, places))
    return ChannelGroup(name, size, kind, tuple(members))


def _in_order(cells: Column) -> list[int]:
    return list(dict.fromkeys(int(cell) for cell in cells if cell >= 0))


def _why(recording: Recording, written: tuple[Column, ...]) -> str:
    """Return the reason why channels are frozen; empty if all channels of a weight can move."""
    columns = recording.atoms.resolve(written)
    if not columns:
        return ""
    rows = np.stack([column.ravel() for column in columns], -1)
    stuck = rows[~recording.atoms.is_free(rows).any(1)]
    reasons = [recording.atoms.reason(int(atom)) for atom in np.unique(stuck) if atom]
    return next((reason for reason in reasons if reason != POSITION), reasons[0] if reasons else "")
