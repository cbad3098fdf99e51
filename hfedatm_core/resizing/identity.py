"""Blocks that compute nothing: what stands in a deeper network for a block that a network lacks."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from hfedatm_core.channels.graph import ChannelGraph
from hfedatm_core.resizing.architecture import Architecture
from hfedatm_core.resizing.depth import blocks

Passing = Mapping[str, tuple[Tensor, Tensor]]
"""Group -> matrices that write its channels and that read them; both sides have one inner size."""


class NoIdentity(ValueError):
    """A block cannot be left out: nothing in its place would keep the function."""


def identity_blocks(
    arch: Architecture, absent: tuple[str, ...], passing: Passing
) -> dict[str, Tensor]:
    """Return tensors for blocks of ``arch`` with which these blocks change nothing.

    The branch of a residual block adds zero. A convolution between others of its width becomes the
    identity (a Dirac kernel), and its BatchNorm too: its input comes from a ReLU, so another ReLU
    changes nothing. Both in evaluation mode.

    Parameters
    ----------
    absent
        The tensors of these blocks.
    passing
        How channels of the other network pass through the channels of ``arch``.
    """
    known = dict(passing)
    filled: dict[str, Tensor] = {}
    like = arch.model.state_dict()
    for block in blocks(absent, set(arch.shapes)):
        names = [n for n in absent if n == block or n.startswith(f"{block}.")]
        residual = _adds(arch.graph, names, set(absent))
        for name in names:
            if residual:
                filled[name] = _nothing(name, like[name])
            else:
                filled[name] = _same(arch, name, like[name], known)
    return filled


def _adds(graph: ChannelGraph, names: list[str], absent: set[str]) -> bool:
    """Tell whether a block adds its result to channels that other layers write, too."""
    for group in graph.groups:
        writers = {member.tensor for member in group.producers}
        if writers & set(names) and writers - absent:
            return True
    return False


def _nothing(name: str, like: Tensor) -> Tensor:
    return torch.ones_like(like) if name.endswith("running_var") else torch.zeros_like(like)


def _same(
    arch: Architecture, name: str, like: Tensor, known: dict[str, tuple[Tensor, Tensor]]
) -> Tensor:
    module, _, tensor = name.rpartition(".")
    if like.dim() < 2:
        if tensor == "weight":  # of a BatchNorm with statistics 0 and 1
            return torch.full_like(like, (1.0 + _eps(arch, module)) ** 0.5)
        return _nothing(name, like)
    graph = arch.graph
    inner, outer = graph.groups_at(name, 1), graph.groups_at(name, 0)
    if len(inner) != 1 or len(outer) != 1 or inner[0] not in known:
        raise NoIdentity(f"{module} (its channels start or end the network, or are frozen)")
    known.setdefault(outer[0], known[inner[0]])
    writes, reads = known[outer[0]][0], known[inner[0]][1]
    sizes = (like.shape[0], like.shape[1])
    if writes.shape[1] != reads.shape[0] or (len(writes), reads.shape[1]) != sizes:
        raise NoIdentity(
            f"{module} turns {like.shape[1]} channels into {like.shape[0]}, which no identity does"
        )
    if any(size % 2 == 0 for size in like.shape[2:]):
        raise NoIdentity(f"{module} has a kernel without a middle")
    result = torch.zeros_like(like)
    middle = result
    for size in like.shape[2:]:
        middle = middle.select(2, size // 2)
    middle.copy_((writes @ reads).to(like.dtype))
    return result


def _eps(arch: Architecture, module: str) -> float:
    return float(getattr(arch.model.get_submodule(module), "eps", 0.0))
