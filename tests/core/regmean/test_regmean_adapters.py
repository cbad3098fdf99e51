"""Adapters are merged by their products, and factored in the metric of the layer's inputs."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hfedatm_core import Gram, Update, merge
from hfedatm_core.regmean.adapters import factored
from hfedatm_core.regmean.closed_form import regmean

A, B = "layer.lora_A.default", "layer.lora_B.default"
SEEDS = st.integers(0, 10_000)
OUT, IN = 6, 9


def drawn(seed):
    return torch.Generator().manual_seed(seed)


def gram(generator, rows=40, width=IN):
    """A Gram of inputs whose features have very different scales."""
    scales = torch.logspace(-2, 1, width, dtype=torch.float64)
    inputs = torch.randn(rows, width, generator=generator, dtype=torch.float64) * scales
    return Gram.from_dense(inputs.T @ inputs / rows, rows)


def station(generator, rank, name, examples=10, spread=1.0):
    def draw(*shape):
        return spread * torch.randn(*shape, generator=generator, dtype=torch.float64)

    state = {f"{A}.weight": draw(rank, IN), f"{B}.weight": draw(OUT, rank)}
    return Update(
        state, grams={A: gram(generator)}, num_examples=examples, num_clients=2, name=name
    )


def product(state):
    return state[f"{B}.weight"] @ state[f"{A}.weight"]


def distance(found, merged, metric):
    apart = found - merged
    return float(torch.trace(apart @ metric @ apart.T))


@given(seed=SEEDS, stations=st.integers(1, 3), ridge=st.sampled_from([0.0, 1e-6, 1e-2]))
def test_at_full_rank_it_is_regmean_of_the_full_matrices_minus_the_base(seed, stations, ridge):
    generator = drawn(seed)
    base = torch.randn(OUT, IN, generator=generator, dtype=torch.float64)
    updates = [station(generator, min(OUT, IN), f"s{n}", examples=10 + n) for n in range(stations)]
    whole = [
        Update(
            {"layer.weight": base + product(u.state)},
            grams={"layer": u.grams[A]},
            num_examples=u.num_examples,
            num_clients=u.num_clients,
            name=u.name,
        )
        for u in updates
    ]
    ours = merge(updates, fot=False, ridge=ridge)
    theirs = merge(whole, fot=False, ridge=ridge).state["layer.weight"] - base
    torch.testing.assert_close(product(ours.state), theirs, atol=1e-7, rtol=1e-6)
    assert {ours.report.layers[name].how for name in (A, B)} == {"regmean"}


@given(seed=SEEDS, rank=st.integers(1, OUT), stations=st.integers(2, 4))
def test_equal_adapters_are_a_fixed_point(seed, rank, stations):
    generator = drawn(seed)
    first = station(generator, rank, "s0")
    others = [
        Update(first.state, grams={A: gram(generator)}, num_examples=5, num_clients=1, name=f"o{n}")
        for n in range(stations - 1)
    ]
    merged = merge([first, *others], fot=False).state
    torch.testing.assert_close(product(merged), product(first.state), atol=1e-6, rtol=1e-6)
    for name, tensor in first.state.items():  # not only the product
        torch.testing.assert_close(merged[name], tensor, atol=1e-5, rtol=1e-5)


@given(seed=SEEDS, rank=st.integers(1, 4))
def test_no_matrix_of_the_rank_is_closer_in_the_metric(seed, rank):
    generator = drawn(seed)
    updates = [station(generator, rank, f"s{n}") for n in range(3)]
    metric = sum(2 * u.grams[A].dense() for u in updates)
    best = regmean(
        [product(u.state) for u in updates], [2 * u.grams[A] for u in updates], ridge=0.0
    )
    found = product(merge(updates, fot=False, ridge=0.0).state)
    assert torch.linalg.matrix_rank(found, rtol=1e-9) <= rank
    ours = distance(found, best, metric)
    left, values, right = torch.linalg.svd(best)
    plain = left[:, :rank] * values[:rank] @ right[:rank]
    assert ours <= distance(plain, best, metric) * (1 + 1e-9)
    # The smallest possible distance: the energy of the outputs beyond the rank.
    root = torch.linalg.cholesky(metric + 1e-12 * torch.eye(IN, dtype=torch.float64))
    beyond = torch.linalg.svdvals(best @ root)[rank:].square().sum()
    assert ours == pytest.approx(float(beyond), rel=1e-4, abs=1e-8)


@given(seed=SEEDS, rank=st.integers(1, 5), kept=st.integers(0, 3))
def test_a_product_of_smaller_rank_leaves_rows_that_can_be_trained(seed, rank, kept):
    generator = drawn(seed)
    near = torch.randn(rank, IN, generator=generator, dtype=torch.float64)
    columns = torch.randn(OUT, rank, generator=generator, dtype=torch.float64)
    columns[:, min(kept, rank) :] = 0
    first, second = factored(columns @ near, gram(generator), 0.0, near)
    torch.testing.assert_close(second @ first, columns @ near, atol=1e-7, rtol=1e-6)
    assert torch.linalg.matrix_rank(first, rtol=1e-9) == rank


@given(seed=SEEDS, rank=st.integers(1, 4), turned=st.sampled_from([1.0, 1e-3, 1e-8]))
def test_both_factors_stay_of_the_size_that_training_left_them(seed, rank, turned):
    """Also if the product has directions that the mean of the first factors hardly has."""
    generator = drawn(seed)
    near = torch.linalg.qr(torch.randn(IN, rank, generator=generator, dtype=torch.float64)).Q.T
    other = torch.randn(OUT, IN, generator=generator, dtype=torch.float64)
    across = other - other @ near.T @ near
    merged = across + turned * other @ near.T @ near
    first, second = factored(merged, gram(generator), 0.0, near)
    torch.testing.assert_close(torch.linalg.svdvals(first), torch.linalg.svdvals(near))
    largest = float(torch.linalg.svdvals(merged)[0])
    assert float(torch.linalg.svdvals(second)[0]) <= largest * (1 + 1e-9)


@given(seed=SEEDS, rank=st.integers(1, 5))
def test_mean_factors_of_another_direction_do_no_harm(seed, rank):
    generator = drawn(seed)
    rows = torch.randn(rank, IN, generator=generator, dtype=torch.float64)
    columns = torch.randn(OUT, rank, generator=generator, dtype=torch.float64)
    for near in (torch.zeros(rank, IN, dtype=torch.float64), rows.flip(0) * 1e-9):
        first, second = factored(columns @ rows, gram(generator), 0.0, near)
        torch.testing.assert_close(second @ first, columns @ rows, atol=1e-6, rtol=1e-5)
        assert torch.isfinite(first).all() and torch.isfinite(second).all()


def test_without_a_gram_of_every_station_the_factors_are_averaged():
    generator = drawn(0)
    one, two = (station(generator, 2, f"s{n}") for n in range(2))
    bare = Update(two.state, num_examples=10, num_clients=2, name="bare")
    with pytest.warns(UserWarning, match="no Gram from bare"):
        merged = merge([one, bare], fot=False)
    for name in one.state:
        torch.testing.assert_close(merged.state[name], (one.state[name] + two.state[name]) / 2)
    assert merged.report.layers[A].how == "averaged"


def test_regmean_off_averages_the_factors():
    generator = drawn(0)
    one, two = (station(generator, 2, f"s{n}") for n in range(2))
    merged = merge([one, two], fot=False, regmean=False)
    for name in one.state:
        torch.testing.assert_close(merged.state[name], (one.state[name] + two.state[name]) / 2)
