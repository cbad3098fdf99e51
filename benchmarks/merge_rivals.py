"""Other ways to merge networks that were trained apart, as `merge_quality.py` compares them.

These are our own small implementations, for the comparison only. Methods marked ``data`` need
examples at the server, or an exchange with the clients that have them; a federation's server has
none.

- Weight matching: Ainsworth et al., "Git Re-Basin", arXiv:2209.04836.
- Activation matching: the same paper; Li et al., arXiv:1511.07543.
- REPAIR: Jordan et al., arXiv:2211.08403.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn

from hfedatm_core import AlignmentOptions, ChannelGraph, Update, merge, weighted_mean
from hfedatm_core.apart.folding import fold, fold_graph, unfold
from hfedatm_core.batch_norm import measure_again
from hfedatm_core.channels.groups import ChannelGroup, Member
from hfedatm_core.fot.alignment import permute_grams

State = dict[str, Tensor]
Networks = Sequence[nn.Module]


def average(models: Networks) -> State:
    """Return the mean of the weights."""
    return weighted_mean([m.state_dict() for m in models], [1.0] * len(models))


def paper(updates: Sequence[Update], graph: ChannelGraph, scope: str = "conv") -> State:
    """Return the merge of the HFedATM paper: filters matched by transport, Linear by RegMean."""
    linear = [_linear_only(update) for update in updates]
    options = AlignmentOptions(scope="all" if scope == "all" else "conv")
    return merge(linear, graph, alignment=options).state


def weight_matching(models: Networks, graph: ChannelGraph) -> list[dict[str, Tensor]]:
    """Return the permutations that bring each network nearest to the first, weight by weight."""
    reference = models[0].state_dict()
    found: list[dict[str, Tensor]] = [{}]
    for model in models[1:]:
        state = model.state_dict()
        orders = {g.name: torch.arange(g.size) for g in graph.groups}
        generator = torch.Generator().manual_seed(0)
        for _ in range(50):
            moved = False
            for place in torch.randperm(len(graph.groups), generator=generator).tolist():
                group = graph.groups[place]
                rest = {n: p for n, p in orders.items() if n != group.name}
                score = sum(
                    _rows(reference[m.tensor], group, m)
                    @ _rows(_permuted(graph, m.tensor, state[m.tensor], rest), group, m).T
                    for m in group.members
                    if reference[m.tensor].is_floating_point() and "running" not in m.tensor
                )
                best = _assigned(torch.as_tensor(score))
                moved |= not torch.equal(best, orders[group.name])
                orders[group.name] = best
            if not moved:
                break
        found.append(orders)
    return found


def activation_matching(
    models: Networks, graph: ChannelGraph, images: Tensor
) -> list[dict[str, Tensor]]:
    """Return the permutations that make the activations of the same images most alike (data)."""
    reference = _activations(models[0], graph, images)
    found: list[dict[str, Tensor]] = [{}]
    for model in models[1:]:
        theirs = _activations(model, graph, images)
        found.append(
            {name: _assigned(_correlation(ours, theirs[name])) for name, ours in reference.items()}
        )
    return found


def permuted_mean(
    models: Networks, graph: ChannelGraph, orders: Sequence[dict[str, Tensor]]
) -> State:
    """Return the mean of the networks in these orders."""
    states = [graph.permute(m.state_dict(), p) for m, p in zip(models, orders, strict=True)]
    return weighted_mean(states, [1.0] * len(states))


def permuted_regmean(
    updates: Sequence[Update], graph: ChannelGraph, orders: Sequence[dict[str, Tensor]]
) -> State:
    """Return the RegMean of Linear layers, with the mean of the rest, in these orders."""
    aligned = []
    for update, order in zip(map(_linear_only, updates), orders, strict=True):
        grams = permute_grams(update.grams, update.state, graph, order)
        aligned.append(replace(update, state=graph.permute(update.state, order), grams=grams))
    return merge(aligned, fot=False).state


def with_statistics(model: nn.Module, state: State, images: Tensor) -> State:
    """Return the network with BatchNorm's statistics measured again (data)."""
    network = copy.deepcopy(model)
    network.load_state_dict(state)
    if any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in network.modules()):
        measure_again(network, [(part, None) for part in images.split(100)])
    return network.state_dict()


def repair(
    models: Networks, graph: ChannelGraph, orders: Sequence[dict[str, Tensor]], images: Tensor
) -> State:
    """Return the mean network, with units rescaled to the networks' mean and deviation (data)."""
    groups = fold_graph(graph)
    states = [
        groups.permute(fold(m.state_dict(), graph), p) for m, p in zip(models, orders, strict=True)
    ]
    like = models[0].state_dict()
    merged = weighted_mean(states, [1.0] * len(states))
    network = copy.deepcopy(models[0])
    layers = [n for n, m in network.named_modules() if isinstance(m, nn.Linear | nn.Conv2d)]
    wanted = [_outputs(network, unfold(s, graph, like, {}), graph, images) for s in states]
    for layer in layers[:-1]:
        mean = torch.stack([w[layer][0] for w in wanted]).mean(0)
        deviation = torch.stack([w[layer][1] for w in wanted]).mean(0)
        now = _outputs(network, unfold(merged, graph, like, {}), graph, images)[layer]
        scale = torch.where(now[1] > 1e-6, deviation / now[1].clamp(min=1e-6), 1.0)
        weight = merged[f"{layer}.weight"]
        merged[f"{layer}.weight"] = weight * scale.view(-1, *[1] * (weight.dim() - 1))
        merged[f"{layer}.bias"] = (merged[f"{layer}.bias"] - now[0]) * scale + mean
    return unfold(merged, graph, like, {})


def ensemble(models: Networks) -> Callable[[Tensor], Tensor]:
    """Return the mean of the networks' probabilities."""
    return lambda x: torch.stack([m(x).softmax(1) for m in models]).mean(0)


def _linear_only(update: Update) -> Update:
    """Return the Grams of the paper's stations: shrunk, of Linear layers, without a constant."""
    matrices = {n: update.state[f"{n}.weight"] for n in update.grams}
    grams = {
        n: gram.leading(matrices[n].shape[1]).shrink(0.75)
        for n, gram in update.grams.items()
        if matrices[n].dim() == 2
    }
    return replace(update, grams=grams)


def _permuted(graph: ChannelGraph, name: str, tensor: Tensor, orders: dict[str, Tensor]) -> Tensor:
    return graph.permute({name: tensor}, orders)[name]


def _rows(tensor: Tensor, group: ChannelGroup, member: Member) -> Tensor:
    rows = tensor.transpose(0, member.axis)
    rows = rows[member.offset : member.offset + group.size * member.block]
    return rows.reshape(group.size, -1)


def _assigned(score: Tensor) -> Tensor:
    return torch.from_numpy(linear_sum_assignment(score.numpy(), maximize=True)[1])


@torch.no_grad()
def _activations(model: nn.Module, graph: ChannelGraph, images: Tensor) -> dict[str, Tensor]:
    """Return the input of the first reader of every group, channels by examples and places."""
    readers = {g: next(m for m in g.members if m.role == "input") for g in graph.groups}
    seen: dict[str, Tensor] = {}
    hooks = []
    for name, module in model.named_modules():
        if any(m.tensor == f"{name}.weight" for m in readers.values()):
            hooks.append(
                module.register_forward_pre_hook(
                    lambda _, args, name=name: seen.update({name: args[0]})
                )
            )
    model(images)
    for hook in hooks:
        hook.remove()
    found = {}
    for group, member in readers.items():
        values = seen[member.tensor.removesuffix(".weight")].transpose(0, 1)
        values = values[member.offset : member.offset + group.size * member.block]
        found[group.name] = values.reshape(group.size, -1)
    return found


def _correlation(ours: Tensor, theirs: Tensor) -> Tensor:
    def unit(rows: Tensor) -> Tensor:
        rows = rows - rows.mean(1, keepdim=True)
        return rows / rows.norm(dim=1, keepdim=True).clamp(min=1e-9)

    return unit(ours) @ unit(theirs).T


@torch.no_grad()
def _outputs(
    model: nn.Module, state: State, graph: ChannelGraph, images: Tensor
) -> dict[str, tuple[Tensor, Tensor]]:
    """Return mean and deviation of the outputs of every layer, with its norm."""
    model.load_state_dict(state)
    model.eval()
    behind = {norm.layer: norm.name for norm in graph.norms}
    found: dict[str, tuple[Tensor, Tensor]] = {}

    def keep(name: str, value: Tensor) -> None:
        rows = value.transpose(0, 1).flatten(1)
        found[name] = rows.mean(1), rows.std(1)

    hooks = [
        model.get_submodule(behind.get(name, name)).register_forward_hook(
            lambda _, __, value, name=name: keep(name, value)
        )
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | nn.Conv2d)
    ]
    model(images)
    for hook in hooks:
        hook.remove()
    return found
