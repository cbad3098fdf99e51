"""Class profiles: what they measure, how they are pooled, and when they count."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from hfedatm_core import ChannelGraph, Profiles, Update, collect_grams, collect_profiles
from hfedatm_core.apart.merging import merge_apart
from hfedatm_core.fot.costs.profile import ProfileCost


def small() -> tuple[nn.Module, ChannelGraph]:
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Conv2d(1, 3, 3, padding=1), nn.ReLU(), nn.Conv2d(3, 4, 3, padding=1), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(4 * 36, 5), nn.ReLU(), nn.Linear(5, 2)),
    )
    return model, ChannelGraph.trace(model, torch.zeros(2, 1, 6, 6))


def test_a_profile_is_the_mean_activation_per_class_and_quarter() -> None:
    model, graph = small()
    x, y = torch.randn(9, 1, 6, 6), torch.tensor([0, 2, 0, 2, 0, 0, 2, 2, 2])
    batches = [(x[:4], y[:4]), (x[4:], y[4:])]
    found = collect_profiles(model.train(), graph, batches, classes=3)
    assert model.training  # as it was before
    assert found.counts.tolist() == [4.0, 0.0, 5.0]
    first = model[1](model[0](x)).detach()
    corner = first[y == 2][:, :, 3:, :3].mean((0, 2, 3))  # below, left: the third quarter
    torch.testing.assert_close(found.means["0"][:, 2, 2], corner)
    second = model[3](model[2](first)).detach()  # a block of the flattened input is a channel
    corner = second[y == 0][:, :, :3, 3:].mean((0, 2, 3))
    torch.testing.assert_close(found.means["2"][:, 0, 1], corner)
    hidden = model[6](model[5](second.flatten(1))).detach()
    torch.testing.assert_close(found.means["5"][:, 2, 0], hidden[y == 2].mean(0))
    assert {name: tuple(mean.shape) for name, mean in found.means.items()} == {
        "0": (3, 3, 4),
        "2": (4, 3, 4),
        "5": (5, 3, 1),
    }


@given(split=st.integers(1, 11), seed=st.integers(0, 2**16))
def test_pooled_profiles_are_those_of_all_examples(split: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(12, 3, 1, generator=generator)
    labels = torch.randint(0, 4, (12,), generator=generator)

    def of(some: slice) -> Profiles:
        hot = nn.functional.one_hot(labels[some], 4).float()
        counts = hot.sum(0)
        means = torch.einsum("bc,bsp->scp", hot, values[some]) / counts.clamp(min=1)[:, None]
        return Profiles({"g": means}, counts)

    pooled, whole = of(slice(split)).pool(of(slice(split, None))), of(slice(None))
    torch.testing.assert_close(pooled.means["g"], whole.means["g"], rtol=1e-4, atol=1e-5)
    assert torch.equal(pooled.counts, whole.counts)


def networks(*labels: torch.Tensor | None) -> tuple[list[Update], ChannelGraph]:
    """Return networks with random weights; one for which there are labels has profiles."""
    model, graph = small()
    updates = []
    for number, y in enumerate(labels):
        torch.manual_seed(number)
        x = torch.randn(12, 1, 6, 6)
        with torch.no_grad():
            for value in model.parameters():
                value.normal_()
        found = None if y is None else collect_profiles(model, graph, [(x, y)], classes=4)
        grams = collect_grams(model, [(x, None)], full=True)
        state = {name: value.clone() for name, value in model.state_dict().items()}
        updates.append(Update(state, grams, profiles=found))
    return updates, graph


MIXED = torch.arange(12) % 4


def orders(updates: list[Update], graph: ChannelGraph) -> list[list[int]]:
    found = merge_apart(updates, graph).permutations["station-1"]
    return [order.tolist() for order in found.values()]


def test_profiles_change_a_match_only_if_both_networks_have_them() -> None:
    updates, graph = networks(MIXED, MIXED)
    plain, _ = networks(None, None)
    half, _ = networks(MIXED, None)
    assert orders(updates, graph) != orders(plain, graph)
    assert orders(half, graph) == orders(plain, graph)
    assert orders(half[::-1], graph) == orders(plain[::-1], graph)


def test_networks_without_a_common_class_are_matched_by_their_grams() -> None:
    updates, graph = networks(MIXED % 2, 2 + MIXED % 2)
    plain, _ = networks(None, None)
    assert orders(updates, graph) == orders(plain, graph)


def test_only_classes_count_that_both_networks_have() -> None:
    torch.manual_seed(0)
    ours, theirs = torch.randn(2, 3, 4, 2).double()
    counts = torch.tensor([5.0, 3.0, 0.0, 1.0]), torch.tensor([2.0, 4.0, 6.0, 0.0])
    sides = [Profiles({"g": m}, n) for m, n in zip((ours, theirs), counts, strict=True)]

    class Nothing:
        def members(self, group: object) -> list:
            return []

        def between(self, *_: object) -> torch.Tensor:
            return torch.zeros(3, 3).double()

    found = ProfileCost(Nothing(), *sides).between(SimpleNamespace(name="g"), None, {})
    one, other = (m[:, :2].flatten(1) for m in (ours, theirs))  # both have the first two
    wanted = 1 - torch.corrcoef(torch.cat([one, other]))[:3, 3:]
    torch.testing.assert_close(found, wanted / 2)


@pytest.mark.parametrize("grid", [1, 3])
def test_the_grid_sets_the_number_of_places(grid: int) -> None:
    model, graph = small()
    batch = torch.randn(4, 1, 6, 6), torch.tensor([0, 1, 0, 1])
    found = collect_profiles(model, graph, [batch], classes=2, grid=grid)
    assert found.means["0"].shape == (3, 2, grid**2)
