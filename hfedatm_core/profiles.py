r"""Class profiles: how strongly each channel responds to each class, on a coarse grid of places.

Two networks that were trained apart agree on what their classes mean, even if they share no
example. The mean activation of a channel per class, on a grid of 2 × 2 places, is a signature of
40 numbers (for ten classes) by which channels can be matched
(:mod:`hfedatm_core.fot.costs.profile`). Profiles are class means of activations: they say more
about the data than a Gram does, so nothing collects them unless it is asked to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hfedatm_core.channels.graph import ChannelGraph
from hfedatm_core.channels.groups import ChannelGroup, Member
from hfedatm_core.inputs import Inputs, forward


@dataclass(frozen=True)
class Profiles:
    """Mean activations of channels per class.

    Attributes
    ----------
    means
        Group name -> ``channels × classes × places``.
    counts
        Number of examples of each class; a class without examples is never compared.
    """

    means: Mapping[str, Tensor]
    counts: Tensor

    def permute(self, orders: Mapping[str, Tensor]) -> Profiles:
        """Return the profiles of the network whose channels are in these orders."""
        means = {n: m[orders[n]] if n in orders else m for n, m in self.means.items()}
        return Profiles(means, self.counts)

    def of_classes_with(self, least: int) -> Profiles:
        """Return the profiles without classes of fewer than ``least`` examples."""
        kept = self.counts >= max(least, 1)
        means = {n: m * kept[:, None].to(m.dtype) for n, m in self.means.items()}
        return Profiles(means, self.counts * kept)

    def pool(self, other: Profiles) -> Profiles:
        """Return the profiles over the examples of both, for the groups that both have."""
        counts = self.counts + other.counts
        share = (other.counts / counts.clamp(min=1.0))[:, None]
        means = {
            name: torch.lerp(mean, other.means[name], share.to(mean.dtype))
            for name, mean in self.means.items()
            if name in other.means
        }
        return Profiles(means, counts)


def collect_profiles(
    model: nn.Module,
    graph: ChannelGraph,
    batches: Iterable[tuple[Inputs, Tensor]],
    classes: int,
    grid: int = 2,
) -> Profiles:
    """Measure the class profiles of a network in evaluation mode.

    The activations of a channel group are the input of the first Linear layer or convolution that
    reads the group; a group that no such layer reads has no profile.

    Parameters
    ----------
    model, graph
        The network and its channel groups.
    batches
        Pairs ``(inputs, targets)`` with the class of every example.
    classes
        Number of classes.
    grid
        Places per side over which an image is averaged; tokens are averaged altogether.
    """
    readers = {group: _reader(model, group) for group in graph.groups}
    seen: dict[str, Tensor] = {}
    handles = [
        model.get_submodule(name).register_forward_pre_hook(_keep(seen, name), with_kwargs=True)
        for name in {found[0] for found in readers.values() if found is not None}
    ]
    modes = [(module, module.training) for module in model.modules()]
    sums: dict[str, Tensor] = {}
    counts = torch.zeros(classes)
    try:
        model.eval()
        with torch.no_grad():
            for inputs, targets in batches:
                seen.clear()
                forward(model, inputs)
                labels = F.one_hot(targets.long().cpu(), classes)
                counts += labels.sum(0)
                for group, found in readers.items():
                    if found is None or found[0] not in seen:
                        continue
                    values = _places(seen[found[0]].cpu(), group, found[1], grid)
                    if values is not None and len(values) == len(labels):
                        part = torch.einsum("bc,bsp->scp", labels.to(values.dtype), values)
                        sums[group.name] = sums.get(group.name, 0.0) + part
    finally:
        for handle in handles:
            handle.remove()
        for module, training in modes:
            module.training = training
    number = counts.clamp(min=1.0)[:, None]
    return Profiles({name: total / number for name, total in sums.items()}, counts)


def _keep(seen: dict[str, Tensor], name: str) -> Callable[..., None]:
    def hook(_: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
        seen.setdefault(name, args[0] if args else kwargs["input"])

    return hook


def _reader(model: nn.Module, group: ChannelGroup) -> tuple[str, Member] | None:
    """Return the first ungrouped layer that reads the group, and where it finds the channels."""
    for member in group.members:
        name = member.tensor.removesuffix(".weight")
        if member.role != "input" or member.axis != 1 or name == member.tensor:
            continue
        module = model.get_submodule(name)
        if isinstance(module, nn.Linear) or (isinstance(module, nn.Conv2d) and module.groups == 1):
            return name, member
    return None


def _places(x: Tensor, group: ChannelGroup, member: Member, grid: int) -> Tensor | None:
    """Return ``examples × channels × places`` of a layer's input; ``None`` if it has no such axes.

    Behind a flatten a channel is a block of positions, which is an image if its size is a square.
    """
    x = x if x.dtype == torch.float64 else x.float()
    positions = member.positions(group.size)
    if x.ndim == 4:
        return F.adaptive_avg_pool2d(x, grid).flatten(2)[:, positions[:, 0]]
    if x.ndim < 2:
        return None
    flat = x.reshape(len(x), -1, x.shape[-1]).mean(1)
    values = flat[:, positions.flatten()].view(len(x), *positions.shape)
    side = int(member.block**0.5)
    if member.places is not None or side < 2 or side * side != member.block:
        return values
    return F.adaptive_avg_pool2d(values.reshape(*values.shape[:2], side, side), grid).flatten(2)
