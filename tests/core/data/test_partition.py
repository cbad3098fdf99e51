"""Heterogeneous partitioning."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hfedatm_core import heterogeneous_partition

sizes = st.lists(st.integers(0, 500), min_size=1, max_size=8)
clients = st.integers(1, 20)
quick = settings(max_examples=150)


@quick
@given(sizes, clients, st.floats(0, 1))
def test_every_sample_is_used_once(domain_sizes, num_clients, lam):
    counts = heterogeneous_partition(domain_sizes, num_clients, lam)
    assert counts.shape == (len(domain_sizes), num_clients)
    assert counts.dtype == np.int64
    assert (counts >= 0).all()
    assert counts.sum(1).tolist() == domain_sizes


@quick
@given(sizes, clients)
def test_lambda_zero_is_pure(domain_sizes, num_clients):
    counts = heterogeneous_partition(domain_sizes, num_clients, 0.0)
    if num_clients >= len(domain_sizes):
        assert ((counts > 0).sum(0) <= 1).all()  # a client sees one domain
        for row, size in zip(counts, domain_sizes, strict=True):
            assert (row > 0).any() == (size > 0)
    else:
        assert ((counts > 0).sum(1) <= 1).all()  # a domain lies at one client


@quick
@given(sizes, clients)
def test_lambda_one_is_uniform_within_one(domain_sizes, num_clients):
    counts = heterogeneous_partition(domain_sizes, num_clients, 1.0)
    assert (counts.max(1) - counts.min(1) <= 1).all()
    assert counts.sum(0).max() - counts.sum(0).min() <= 1


@quick
@given(sizes, clients, st.floats(0, 1))
def test_counts_follow_the_formula_within_one(domain_sizes, num_clients, lam):
    owned = heterogeneous_partition([10**6 + s for s in domain_sizes], num_clients, 0.0) > 0
    domain_sizes = [10**6 + s for s in domain_sizes]
    counts = heterogeneous_partition(domain_sizes, num_clients, lam)
    for d, size in enumerate(domain_sizes):
        wanted = lam * size / num_clients + (1 - lam) * owned[d] * size / owned[d].sum()
        assert np.abs(counts[d] - wanted).max() <= 1 + 1e-6


def test_more_clients_go_to_the_domain_with_most_samples_per_client():
    counts = heterogeneous_partition([100, 40, 30], 6, 0.0)
    # After one each: 100, 40, 30; then 50, 40, 30; then 33.3, 40, 30 -> the second domain.
    assert (counts > 0).sum(1).tolist() == [3, 2, 1]
    assert sorted(counts[0][counts[0] > 0].tolist()) == [33, 33, 34]


def test_fewer_clients_get_the_domains_by_size():
    counts = heterogeneous_partition([10, 50, 30, 25], 2, 0.0)
    # 50 -> A, 30 -> B, 25 -> B (30 < 50), 10 -> A (50 < 55)
    assert counts.tolist() == [[10, 0], [50, 0], [0, 30], [0, 25]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([], 2, 0.5), "domain_sizes"),
        (([-1], 2, 0.5), "domain_sizes"),
        (([1.5], 2, 0.5), "domain_sizes"),
        (([5], 0, 0.5), "num_clients"),
        (([5], 2, 1.5), "lam"),
        (([5], 2, float("nan")), "lam"),
    ],
)
def test_bad_input_is_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        heterogeneous_partition(*arguments)
