"""Trees of stations: combined level by level they give the merge of all stations."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_merging import GRAPH, batches, lenet, permutations, permuted

from hfedatm_core import AlignmentOptions, FactorGram, Update, collect_grams, merge
from hfedatm_core.merging import PRODUCTS, split_products
from hfedatm_core.tiers import combine, no_products

START = lenet(0)
REFERENCE = START.state_dict()
EXACT = AlignmentOptions(solver="exact")
OPTIONS = {"regmean": True, "alignment": EXACT, "pool_variances": True}


def station(number: int, moved: bool) -> Update:
    """A station near the start, with Grams of its own inputs, perhaps in another channel order."""
    generator = torch.Generator().manual_seed(number)
    model = lenet(0)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter += 0.02 * noise
    grams = collect_grams(model, batches(number))
    update = Update(
        {name: value.clone() for name, value in model.state_dict().items()},
        {name: gram.shrink(0.75) for name, gram in grams.items()},
        num_examples=10 + 7 * (number % 5),
        num_clients=1 + number % 4,
        name=f"station {number}",
    )
    return permuted(update, permutations(number, ("conv",))) if moved else update


def trees(depth: int) -> st.SearchStrategy:
    """Nested lists: leaves stand for stations; every path has the same length."""
    tree: st.SearchStrategy = st.booleans()
    for _ in range(depth - 1):
        tree = st.lists(tree, min_size=1, max_size=3 if depth < 4 else 2)
    return tree


def leaves(tree, made: list[Update]) -> list:
    """Replace every leaf by a station of its own."""
    if isinstance(tree, bool):
        made.append(station(len(made), tree))
        return made[-1]
    return [leaves(child, made) for child in tree]


def summed(tree: list, name: str, coefficients: str) -> Update:
    """Combine a subtree from the bottom up."""
    lowest = isinstance(tree[0], Update)
    children = (
        tree if lowest else [summed(t, f"{name}.{i}", coefficients) for i, t in enumerate(tree)]
    )
    found = combine(
        children, REFERENCE, GRAPH, fot=lowest, coefficients=coefficients, name=name, **OPTIONS
    )
    return found.update


@settings(max_examples=12, deadline=None)
@given(
    tree=st.integers(3, 5).flatmap(trees),
    coefficients=st.sampled_from(["clients", "examples"]),
)
def test_a_tree_of_any_depth_gives_the_flat_merge(tree, coefficients):
    stations: list[Update] = []
    tree = leaves(tree, stations)
    flat = merge(
        stations,
        GRAPH,
        reference="previous",
        previous=REFERENCE,
        coefficients=coefficients,
        **OPTIONS,
    )
    top = [summed(child, f"region {i}", coefficients) for i, child in enumerate(tree)]
    deep = merge(
        top,
        GRAPH,
        fot=False,
        reference="previous",
        previous=REFERENCE,
        coefficients=coefficients,
        **OPTIONS,
    )
    assert deep.state.keys() == flat.state.keys()
    for name, value in flat.state.items():
        torch.testing.assert_close(deep.state[name], value, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(deep.average[name], flat.average[name], rtol=1e-6, atol=1e-6)
    assert deep.moved == flat.moved
    assert {n: r.how for n, r in deep.report.layers.items()} == {
        n: r.how for n, r in flat.report.layers.items()
    }


def test_regmean_of_regional_means_would_not_be_the_flat_merge():
    """Without the products the tree gives another model: they are needed."""
    stations = [station(n, moved=False) for n in range(4)]
    flat = merge(stations, GRAPH, reference="previous", previous=REFERENCE)
    pairs = [combine(stations[i : i + 2], REFERENCE, regmean=True).update for i in (0, 2)]
    bare = [
        Update(split_products(p.state)[0], p.grams, p.num_examples, p.num_clients, f"r{i}")
        for i, p in enumerate(pairs)
    ]
    other = merge(bare, GRAPH, fot=False, reference="previous", previous=REFERENCE)
    assert any((other.state[n] - flat.state[n]).abs().max() > 1e-5 for n in flat.state)


def test_products_travel_beside_the_weights_in_their_layers_shapes():
    found = combine([station(0, False), station(1, False)], REFERENCE, regmean=True).update
    weights, products = split_products(found.state)
    assert weights.keys() == REFERENCE.keys()
    expected = no_products(weights, {name: gram.dim for name, gram in found.grams.items()})
    assert {PRODUCTS + n: p.shape for n, p in products.items()} == {
        n: p.shape for n, p in expected.items()
    }
    assert found.num_examples == 10 + 17 and found.num_clients == 1 + 2


def test_a_share_of_a_robust_rule_counts_at_every_level():
    half = Update(REFERENCE, {}, num_examples=10, num_clients=2, name="a", share=0.5)
    found = combine([half, Update(REFERENCE, {}, 10, 2, "b")], REFERENCE).update
    assert (found.num_examples, found.num_clients) == (15, 3)


def test_combined_updates_need_the_reference_they_were_aligned_to():
    found = combine([station(0, False)], REFERENCE, regmean=True, name="r").update
    with pytest.raises(ValueError, match="reference='previous'"):
        merge([found], GRAPH, fot=False)


def test_factors_of_wide_layers_are_summed_too():
    """A low-rank factor is exact while its rank holds the sum."""
    generator = torch.Generator().manual_seed(0)
    start = {"a.weight": torch.randn(3, 20, generator=generator, dtype=torch.float64)}

    def wide(number: int) -> Update:
        rows = torch.randn(2, 20, generator=generator, dtype=torch.float64)
        weight = start["a.weight"] + 0.1 * torch.randn(3, 20, generator=generator).double()
        factor = FactorGram(rows, rows.square().sum(0) + 0.5, 2, 16)
        return Update({"a.weight": weight}, {"a": factor}, 5, 1, f"s{number}")

    stations = [wide(n) for n in range(4)]
    flat = merge(stations, fot=False, reference="previous", previous=start)
    pairs = [combine(stations[i : i + 2], start, regmean=True, name=f"r{i}").update for i in (0, 2)]
    deep = merge(pairs, fot=False, reference="previous", previous=start)
    torch.testing.assert_close(deep.state["a.weight"], flat.state["a.weight"], rtol=1e-6, atol=1e-6)
    assert isinstance(pairs[0].grams["a"], FactorGram)
