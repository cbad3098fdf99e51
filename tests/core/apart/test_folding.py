"""Folding a BatchNorm into its layer and taking it out again never changes a network."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from nets import ConcatNet, LeNet5, ResidualCNN, SeparableNet, image, output, randomise
from torch import Tensor, nn
from torch.nn import functional as F

from hfedatm_core.apart.folding import Moments, fold, fold_graph, unfold
from hfedatm_core.channels.graph import ChannelGraph


class Scrambled(nn.Module):
    """Norms are stored in another order than they are used, of all kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.norm3 = nn.BatchNorm1d(9)
        self.norm1 = nn.BatchNorm2d(5, eps=1e-2)
        self.norm2 = nn.BatchNorm2d(6, affine=False)
        self.fc = nn.Linear(6, 9)
        self.conv2 = nn.Conv2d(5, 6, 3)
        self.drop = nn.Dropout2d()
        self.conv1 = nn.Conv2d(3, 5, 3, bias=False)
        self.head = nn.Linear(9, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm1(self.drop(self.conv1(x))))
        x = F.relu(self.norm2(self.conv2(x))).mean((2, 3))
        return self.head(F.relu(self.norm3(self.fc(x))))


class Entangled(nn.Module):
    """Every norm but the last has a reason why it is no part of a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.BatchNorm2d(3)
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.twice = nn.BatchNorm2d(4)
        self.inner = nn.Conv2d(4, 4, 3, padding=1)
        self.tied = nn.Conv2d(4, 4, 3, padding=1)
        self.tied.weight = self.inner.weight
        self.behind_tied = nn.BatchNorm2d(4)
        self.read_twice = nn.Conv2d(4, 4, 1)
        self.beside = nn.BatchNorm2d(4)
        self.blind = nn.BatchNorm2d(4, track_running_stats=False)
        self.plain = nn.Conv2d(4, 4, 1)
        self.unused = nn.BatchNorm2d(4)
        self.last = nn.Conv2d(4, 4, 1)
        self.good = nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.twice(self.conv(self.first(x)))
        x = self.behind_tied(self.tied(self.twice(self.inner(x))))
        x = self.read_twice(x)
        x = x + self.beside(x)
        return self.good(self.last(self.blind(self.plain(x)))).mean((2, 3))


NETS = {
    "scrambled": Scrambled,
    "lenet5-bn": lambda: LeNet5(batch_norm=True),
    "residual": ResidualCNN,
    "separable": SeparableNet,
    "concat": ConcatNet,
    "entangled": Entangled,
}


def made(name: str, seed: int = 0) -> tuple[nn.Module, Tensor, ChannelGraph]:
    torch.manual_seed(seed)
    model = NETS[name]().double().eval()
    randomise(model)
    x = image(4, 16)
    return model, x, ChannelGraph.trace(model, (x,))


def without_norms(model: nn.Module, graph: ChannelGraph) -> nn.Module:
    """Return the network that a folded state belongs to."""
    bare = copy.deepcopy(model)
    for norm in graph.norms:
        parent, _, child = norm.name.rpartition(".")
        setattr(bare.get_submodule(parent), child, nn.Identity())
        layer = bare.get_submodule(norm.layer)
        if layer.bias is None:
            layer.bias = nn.Parameter(torch.zeros(len(layer.weight), dtype=torch.float64))
    return bare


def any_moments(folded: dict[str, Tensor], graph: ChannelGraph) -> dict[str, Moments]:
    sizes = {norm.layer: len(folded[f"{norm.layer}.bias"]) for norm in graph.norms}
    return {
        layer: Moments(torch.randn(size).double(), torch.rand(size).double() * 3)
        for layer, size in sizes.items()
    }


@pytest.mark.parametrize("name", NETS)
@settings(max_examples=5)
@given(seed=st.integers(0, 2**16))
def test_folding_and_unfolding_keep_the_function(name: str, seed: int) -> None:
    model, x, graph = made(name, seed)
    before = output(model, model.state_dict(), x)
    folded = fold(model.state_dict(), graph)
    bare = without_norms(model, graph)
    assert set(folded) - set(bare.state_dict()) <= {
        f"{n.name}.num_batches_tracked" for n in graph.norms
    }
    inside = {key: value for key, value in folded.items() if key in bare.state_dict()}
    torch.testing.assert_close(output(bare, inside, x), before, rtol=1e-10, atol=1e-10)
    for moments in ({}, any_moments(folded, graph)):
        back = unfold(folded, graph, model.state_dict(), moments)
        assert list(back) == list(model.state_dict())
        torch.testing.assert_close(output(model, back, x), before, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", NETS)
def test_a_permutation_of_the_folded_network_keeps_its_function(name: str) -> None:
    model, x, graph = made(name)
    groups = fold_graph(graph)
    shuffles = {group.name: torch.randperm(group.size) for group in groups.groups}
    permuted = groups.permute(fold(model.state_dict(), graph), shuffles)
    back = unfold(permuted, graph, model.state_dict(), {})
    before = output(model, model.state_dict(), x)
    # What is no part of a layer is still there, and is permuted with the rest.
    torch.testing.assert_close(output(model, back, x), before, rtol=1e-10, atol=1e-10)


def test_norms_are_found_by_what_they_read() -> None:
    _, _, graph = made("scrambled")
    found = {norm.name: norm.layer for norm in graph.norms}
    assert found == {"norm1": "conv1", "norm2": "conv2", "norm3": "fc"}
    assert graph.norms[0].eps == 1e-2
    assert graph.lone_norms == {}


def test_a_norm_that_is_no_part_of_a_layer_is_named_with_the_reason() -> None:
    _, _, graph = made("entangled")
    assert [norm.name for norm in graph.norms] == ["good"]
    expected = {
        "first": "does not stand behind",
        "twice": "used or stored more than once",
        "behind_tied": "used or stored more than once",
        "beside": "something else reads 'read_twice'",
        "blind": "no running statistics",
        "unused": "does not call it",
    }
    assert set(graph.lone_norms) == set(expected)
    for name, part in expected.items():
        assert part in graph.lone_norms[name], name


def test_a_layer_that_something_else_reads_in_training_keeps_its_norm_apart() -> None:
    class Auxiliary(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
            self.aux = nn.Conv2d(4, 2, 3)

        def forward(self, x: Tensor) -> Tensor:
            x = self.conv(x)
            side = self.aux(x).mean((2, 3)) if self.training else 0
            return self.norm(x).mean((2, 3))[:, :2] + side

    graph = ChannelGraph.trace(Auxiliary(), (torch.zeros(1, 3, 8, 8),))
    assert graph.norms == ()
    assert graph.lone_norms == {"norm": "in training mode something else reads 'conv', too"}


def test_a_model_that_cannot_be_recorded_names_all_its_norms() -> None:
    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm2d(3)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(x) if x.sum() > 0 else x

    graph = ChannelGraph.trace(Branching(), (image(),))
    assert graph.norms == () and "cannot record" in graph.lone_norms["norm"]


def test_after_unfolding_training_finds_the_statistics_that_are_there() -> None:
    """With the moments of a batch, the network in training mode computes the same on that batch."""
    torch.manual_seed(0)
    conv, norm = nn.Conv2d(3, 5, 3, bias=False), nn.BatchNorm2d(5)
    model = nn.Sequential(conv, norm).double().eval()
    randomise(model)
    x = image(16, 8)
    graph = ChannelGraph.trace(model, (x,))
    before = output(model, model.state_dict(), x)
    moments = Moments(before.mean((0, 2, 3)), before.var((0, 2, 3), correction=0))
    back = unfold(fold(model.state_dict(), graph), graph, model.state_dict(), {"0": moments})
    torch.testing.assert_close(back["0.weight"].norm(), conv.weight.norm())
    in_training = output(copy.deepcopy(model).train(), back, x)
    torch.testing.assert_close(in_training, before, rtol=1e-10, atol=1e-10)


def test_a_channel_that_is_switched_off_survives() -> None:
    model = nn.Sequential(nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5)).double().eval()
    randomise(model)
    with torch.no_grad():
        model[1].weight[2] = 0.0
        model[0].weight[3] = 0.0
    x = image(2, 8)
    graph = ChannelGraph.trace(model, (x,))
    nothing = Moments(torch.zeros(5).double(), torch.zeros(5).double())
    state = model.state_dict()
    back = unfold(fold(state, graph), graph, state, {"0": nothing})
    torch.testing.assert_close(output(model, back, x), output(model, state, x), rtol=1e-9, atol=0)
