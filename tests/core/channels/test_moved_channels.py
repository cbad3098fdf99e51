"""An index map moves whatever is named after the model as the channel graph moves the model."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from hfedatm_core import ChannelGraph
from hfedatm_core.channels.index_maps import IndexMap


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Conv2d(4, 6, 3, groups=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(6 * 16, 5),
        nn.ReLU(),
        nn.Linear(5, 3),
    )


MODEL = network().state_dict()
GRAPH = ChannelGraph.trace(network(), (torch.zeros(2, 1, 8, 8),))


def orders(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {g.name: torch.randperm(g.size, generator=generator) for g in GRAPH.groups}


@given(st.integers(0, 1000), st.sampled_from(["", "z.", "mtgc.y."]))
def test_kept_values_follow_the_model(seed, prefix):
    torch.manual_seed(seed)
    kept = {name: torch.randn(value.shape) for name, value in MODEL.items()}
    moved = IndexMap.of(GRAPH, orders(seed), MODEL).moved(
        {prefix + name: value for name, value in kept.items()}, MODEL, {}
    )
    expected = GRAPH.permute(kept, orders(seed))
    assert moved.keys() == {prefix + name for name in expected}
    assert all(torch.equal(moved[prefix + name], value) for name, value in expected.items())


@given(st.integers(0, 1000))
def test_a_table_of_units_follows_the_axis_it_names(seed):
    found = IndexMap.of(GRAPH, orders(seed), MODEL)
    table = torch.arange(10.0).reshape(2, 5)
    moved = found.moved({"table": table, "other": table}, MODEL, {"table": {1: ("8.weight", 1)}})
    index = GRAPH.index("8.weight", 1, 5, orders(seed))
    assert torch.equal(moved["table"], table[:, index]) and torch.equal(moved["other"], table)


def test_the_identity_is_no_map_and_copies_nothing():
    still = {group.name: torch.arange(group.size) for group in GRAPH.groups}
    found = IndexMap.of(GRAPH, still, MODEL)
    assert not found
    assert all(value is MODEL[name] for name, value in found.moved(MODEL, MODEL, {}).items())


def test_a_name_follows_the_longest_name_it_ends_with():
    model = {"weight": torch.zeros(2), "a.weight": torch.zeros(2)}
    found = IndexMap({("weight", 0): torch.tensor([1, 0])})
    kept = {"x.weight": torch.tensor([1.0, 2.0]), "x.a.weight": torch.tensor([1.0, 2.0])}
    moved = found.moved(kept, model, {})
    assert moved["x.weight"].tolist() == [2.0, 1.0]
    assert moved["x.a.weight"] is kept["x.a.weight"]


def test_an_axis_of_another_length_cannot_follow():
    found = IndexMap.of(GRAPH, orders(3), MODEL)
    with pytest.raises(ValueError, match=r"table of shape \(2, 4\) cannot follow axis 1"):
        found.moved({"table": torch.zeros(2, 4)}, MODEL, {"table": {1: ("8.weight", 1)}})
