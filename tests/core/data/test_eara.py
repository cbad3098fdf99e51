"""EARA: the divergence, the limits, and how near the search comes to the best assignment."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import entropy

from hfedatm_core.data.eara import assign, divergence, total_divergence
from hfedatm_core.data.split import station_order

counts_of = st.lists(
    st.lists(st.integers(0, 30), min_size=3, max_size=3), min_size=4, max_size=8
).filter(lambda rows: all(sum(row) for row in rows))


@settings(max_examples=80)
@given(st.lists(st.integers(0, 50), min_size=2, max_size=8).filter(any))
def test_the_divergence_is_that_of_scipy(counts):
    uniform = np.full(len(counts), 1 / len(counts))
    assert divergence(counts) == pytest.approx(entropy(counts, uniform), abs=1e-12)


def test_even_classes_have_no_divergence_and_one_class_has_the_most():
    assert divergence([7, 7, 7]) == pytest.approx(0, abs=1e-15)
    assert divergence([0, 5, 0]) == pytest.approx(np.log(3))
    assert divergence([0, 0, 0]) == 0


@settings(max_examples=60)
@given(counts_of, st.integers(1, 4), st.randoms(use_true_random=False))
def test_limits_hold_and_no_swap_gains(counts, stations, random):
    capacities = [1 + random.randrange(len(counts)) for _ in range(stations)]
    capacities[0] += max(0, len(counts) - sum(capacities))
    chosen = assign(counts, capacities)
    held = np.bincount(chosen, minlength=stations)
    assert (held <= capacities).all() and held.sum() == len(counts)
    full = held == capacities
    assert held.max() <= held[~full].min(initial=len(counts)) + 1  # as even as the limits allow
    best = total_divergence(counts, chosen, stations)
    for i, j in itertools.combinations(range(len(counts)), 2):
        other = chosen.copy()
        other[[i, j]] = other[[j, i]]
        assert total_divergence(counts, other, stations) >= best - 1e-9


def best_of_all(counts, capacities):
    """Return the least sum of divergences, by trying every assignment."""
    stations = len(capacities)
    every = itertools.product(range(stations), repeat=len(counts))
    fits = (np.array(a) for a in every if all(np.bincount(a, minlength=stations) <= capacities))
    return min(total_divergence(counts, a, stations) for a in fits)


@pytest.mark.parametrize("capacities", [[2, 2, 2], [1, 3, 2], [5, 1]])
def test_the_search_is_near_the_best_of_all_assignments(capacities):
    generator = np.random.default_rng(0)
    found, least, mixed = [], [], []
    stations = len(capacities)
    for _ in range(20):
        counts = generator.integers(0, 20, (6, 3)) * generator.integers(0, 2, (6, 3)) + 1
        found.append(total_divergence(counts, assign(counts, capacities), stations))
        least.append(best_of_all(counts, capacities))
        any_order = np.repeat(np.arange(stations), capacities)
        mixed.append(total_divergence(counts, any_order, stations))
    assert all(f >= b - 1e-12 for f, b in zip(found, least, strict=True))
    assert np.isclose(found, least).sum() >= 15
    assert sum(found) < 1.2 * sum(least) < sum(mixed)


def test_clients_of_one_class_each_are_spread():
    counts = torch.tensor([[9, 0, 0]] * 3 + [[0, 9, 0]] * 3 + [[0, 0, 9]] * 3)
    shares = [{"a": torch.arange(9)}] * 9
    stations = station_order(shares, 3, "eara", counts)
    assert [sorted(int(counts[c].argmax()) for c in held) for held in stations] == [[0, 1, 2]] * 3


@settings(max_examples=30)
@given(counts_of)
def test_it_is_never_worse_than_the_mixed_order(counts):
    counts = counts[: len(counts) // 2 * 2]
    shares = [{"ab"[c % 2]: torch.arange(sum(row))} for c, row in enumerate(counts)]

    def total(mode):
        order = station_order(shares, 2, mode, torch.tensor(counts))
        stations = np.array([int(c in order[1]) for c in range(len(counts))])
        return total_divergence(counts, stations, 2)

    assert total("eara") <= total("mixed") + 1e-12


def test_mistakes_are_named():
    with pytest.raises(ValueError, match=r"3 clients do not fit into stations of \[1, 1\]"):
        assign([[1, 2]] * 3, [1, 1])
    with pytest.raises(ValueError, match="a row per client"):
        assign([[1.0, np.nan]], [1])
    with pytest.raises(ValueError, match="class counts of the clients"):
        station_order([{}, {}], 2, "eara")
