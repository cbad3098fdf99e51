r"""Make a BatchNorm part of the layer before it, and separate it again.

In evaluation mode a BatchNorm scales and shifts its input,

.. math:: \mathrm{BN}(y) = k (y - \mu) + \beta, \qquad k = \gamma / \sqrt{\sigma^2 + \epsilon},

so that a layer ``y = W x + b`` with a BatchNorm behind it is one layer with

.. math:: W' = k W, \qquad b' = k (b - \mu) + \beta.

Networks that were trained apart can be merged in this form, because it has no running statistics,
which describe the activations of one network and fit no other. Afterwards the BatchNorm is restored
with statistics that fit the merged network, so that training can continue.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hfedatm_core.channels.graph import ChannelGraph
from hfedatm_core.channels.groups import ChannelGroup, Member
from hfedatm_core.channels.norms import Norm
from hfedatm_core.tensors import State

_TENSORS = ("weight", "bias", "running_mean", "running_var")


@dataclass(frozen=True)
class Moments:
    """Mean and variance of each output of a layer, before the activation."""

    mean: Tensor
    variance: Tensor


def fold(state: State, graph: ChannelGraph) -> dict[str, Tensor]:
    """Return the state of the network in which every norm of ``graph.norms`` is part of its layer.

    The folded network computes the same function as ``state`` in evaluation mode. Of the norms'
    tensors only the count of batches remains; a layer without a bias gets one.
    """
    folded = dict(state)
    for norm in graph.norms:
        scale, shift = _affine(state, norm)
        weight = state[f"{norm.layer}.weight"]
        folded[f"{norm.layer}.weight"] = weight * _over_rows(scale, weight)
        bias = state.get(f"{norm.layer}.bias")
        folded[f"{norm.layer}.bias"] = shift if bias is None else bias * scale + shift
        for tensor in _TENSORS:
            folded.pop(f"{norm.name}.{tensor}", None)
    return folded


def fold_graph(graph: ChannelGraph) -> ChannelGraph:
    """Return the channel groups of the folded network, with biases instead of norms."""
    gone = {f"{norm.name}.{tensor}": norm for norm in graph.norms for tensor in _TENSORS}

    def renamed(member: Member) -> Member:
        norm = gone.get(member.tensor)
        return member if norm is None else replace(member, tensor=f"{norm.layer}.bias")

    def folded(group: ChannelGroup) -> ChannelGroup:
        members = dict.fromkeys(renamed(member) for member in group.members)
        return replace(group, members=tuple(members))

    return replace(graph, groups=tuple(map(folded, graph.groups)), norms=())


def unfold(
    folded: State, graph: ChannelGraph, like: State, moments: Mapping[str, Moments]
) -> dict[str, Tensor]:
    r"""Restore the norms of ``graph.norms``; the network computes the same as the folded one.

    The statistics of a norm become those of its input, as training would find them: with the mean
    ``m`` and variance ``v`` of the folded layer's output,

    .. math:: \mu = s (m - b'), \quad \sigma^2 = s^2 v, \quad \gamma = \sqrt{\sigma^2+\epsilon}/s,
        \quad \beta = m, \quad W = s W'.

    The factor s of a channel makes its filter as long as in ``like``, because the length of a
    filter before a BatchNorm determines how fast the filter learns.

    Parameters
    ----------
    folded
        The state of a folded network.
    like
        A state of the network with its norms, whose names and types the result gets.
    moments
        Moments of the outputs by layer. Without them the statistics are 0 and 1: the function in
        evaluation mode is the same, but training starts from statistics that do not fit.
    """
    state = dict(folded)
    for norm in graph.norms:
        weight, bias = folded[f"{norm.layer}.weight"], folded[f"{norm.layer}.bias"]
        length = _lengths(like[f"{norm.layer}.weight"])
        factor = length / _lengths(weight)
        factor = torch.where(torch.isfinite(factor) & (factor > 0), factor, 1.0).to(weight.dtype)
        known = moments.get(norm.layer)
        mean = bias if known is None else known.mean.to(bias.dtype)
        spread = torch.ones_like(bias) if known is None else known.variance.to(bias.dtype)
        values = {
            "running_mean": factor * (mean - bias),
            "running_var": factor.square() * spread.clamp(min=0.0),
        }
        deviation = (values["running_var"] + norm.eps).sqrt()
        if f"{norm.name}.weight" in like:
            values |= {"weight": deviation / factor, "bias": mean}
        else:  # a norm without scale and shift: its statistics must do both
            factor = torch.full_like(bias, (1.0 + norm.eps) ** 0.5)
            values = {"running_mean": -factor * bias, "running_var": torch.ones_like(bias)}
        state[f"{norm.layer}.weight"] = weight * _over_rows(factor, weight)
        state[f"{norm.layer}.bias"] = torch.zeros_like(bias)
        state |= {f"{norm.name}.{tensor}": value for tensor, value in values.items()}
    return {name: state[name].to(tensor.dtype) for name, tensor in like.items()}


def _affine(state: State, norm: Norm) -> tuple[Tensor, Tensor]:
    """Return scale and shift of a BatchNorm in evaluation mode."""
    mean, variance = state[f"{norm.name}.running_mean"], state[f"{norm.name}.running_var"]
    scale = (variance + norm.eps).rsqrt()
    if f"{norm.name}.weight" not in state:
        return scale, -mean * scale
    scale = scale * state[f"{norm.name}.weight"]
    return scale, state[f"{norm.name}.bias"] - mean * scale


def _over_rows(vector: Tensor, weight: Tensor) -> Tensor:
    return vector.view(-1, *[1] * (weight.dim() - 1))


def _lengths(weight: Tensor) -> Tensor:
    lengths: Tensor = torch.linalg.vector_norm(weight.detach().flatten(1).double(), dim=1)
    return lengths
