"""Layers that run in one mode only: a permutation keeps what the network computes in both."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from nets import image, randomise
from torch import Tensor, nn
from torchvision import models

from hfedatm_core import Update, merge
from hfedatm_core.channels.graph import ChannelGraph


def permuted(model: nn.Module, graph: ChannelGraph, seed: int = 0) -> nn.Module:
    """A copy with all free channels in another order."""
    generator = torch.Generator().manual_seed(seed)
    orders = {g.name: torch.randperm(g.size, generator=generator) for g in graph.groups}
    twin = copy.deepcopy(model)
    twin.load_state_dict(graph.permute(model.state_dict(), orders))
    return twin


def assert_both_modes_kept(model: nn.Module, graph: ChannelGraph, x: Tensor) -> None:
    twin = permuted(model, graph)
    for training in (False, True):
        torch.manual_seed(1)
        before = model.train(training)(x)
        torch.manual_seed(1)
        after = twin.train(training)(x)
        torch.testing.assert_close(after, before, rtol=1e-10, atol=1e-10)


class Auxiliary(nn.Module):
    """A second head that runs in training only, and a third that runs in evaluation only."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3, padding=1)
        self.norm = nn.BatchNorm2d(6)
        self.body = nn.Conv2d(6, 8, 3, padding=1)
        self.head = nn.Linear(8, 4)
        self.training_head = nn.Linear(6, 4)
        self.evaluation_gate = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        early = self.norm(self.stem(x)).relu()
        late = self.body(early).relu().mean((2, 3))
        if self.training:
            return self.head(late), self.training_head(early.mean((2, 3)))
        return self.head(late + self.evaluation_gate(late)), late.mean(1)


@pytest.mark.parametrize("batch", [1, 2])
def test_layers_of_one_mode_are_permuted_with_the_rest(batch: int) -> None:
    torch.manual_seed(0)
    model, x = Auxiliary().double(), image()
    randomise(model)
    graph = ChannelGraph.trace(model, (x[:batch],))
    assert "stem" in {group.name for group in graph.groups}
    assert_both_modes_kept(model, graph, x)


def test_the_heads_that_googlenet_trains_with_keep_their_function() -> None:
    torch.manual_seed(0)
    model, x = models.googlenet(num_classes=3, init_weights=False).double(), image(2, 48)
    randomise(model)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    graph = ChannelGraph.trace(model, (x,))
    assert {"aux1.conv.conv", "aux2.conv.conv"} <= {group.name for group in graph.groups}
    assert_both_modes_kept(model, graph, x)


class Sometimes(nn.Module):
    """A layer that neither mode runs: only a caller that asks for it does."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(), nn.Conv2d(6, 5, 3))
        self.head = nn.Linear(5, 2)
        self.extra = nn.Linear(5, 2)
        self.asked = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x).mean((2, 3))
        return self.extra(x) if self.asked else self.head(x)


def test_what_an_unused_weight_may_read_is_frozen_and_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    torch.manual_seed(0)
    model, x = Sometimes().double(), image()
    randomise(model)
    with caplog.at_level(logging.WARNING):
        graph = ChannelGraph.trace(model, (x,))
    assert [group.name for group in graph.groups] == ["body.0"]
    assert "extra.weight" in graph.unaligned["body.2"]
    assert "neither" in graph.unaligned["extra"]
    assert "extra.weight" in caplog.text
    model.asked = True
    assert_both_modes_kept(model, graph, x)


def test_a_bare_tensor_is_an_input() -> None:
    model, x = Auxiliary(), torch.zeros(2, 3, 8, 8)
    graph = ChannelGraph.trace(model, x)
    assert graph.groups
    assert graph == ChannelGraph.trace(model, (x,))


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x) if x.sum() > 0 else x


def test_a_merge_without_alignment_says_so_in_its_report() -> None:
    model = Branching()
    graph = ChannelGraph.trace(model, torch.ones(1, 3, 4, 4))
    updates = [Update(model.state_dict(), {}, 10, 1, name=name) for name in "ab"]
    report = merge(updates, graph).report
    assert list(report.unaligned) == ["Branching"]
    assert report.to_dict()["unaligned"] == graph.unaligned
    assert merge(updates, fot=False).report.unaligned == {}


def test_the_order_of_outputs_is_not_called_unaligned() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), nn.Flatten(), nn.Linear(64, 2))
    graph = ChannelGraph.trace(model, torch.ones(1, 3, 4, 4))
    assert "3" in graph.frozen
    assert graph.unaligned == {}
