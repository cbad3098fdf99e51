import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hfedatm_core.data.base import DataSpec, Domain, DomainData
from hfedatm_core.data.split import client_shares, split_validation, station_order

SPEC = DataSpec("image", 2, (1, 1, 1))


def make(**sizes):
    return DomainData(
        SPEC,
        {n: Domain(n, torch.zeros(s, 1, 1, 1), torch.zeros(s).long()) for n, s in sizes.items()},
    )


@settings(max_examples=60)
@given(
    sizes=st.lists(st.integers(40, 90), min_size=1, max_size=5),
    clients=st.integers(1, 12),
    lam=st.sampled_from([0.0, 0.1, 0.5, 1.0]),
    seed=st.integers(0, 5),
)
def test_every_example_goes_to_exactly_one_client(sizes, clients, lam, seed):
    data = make(**{f"d{i}": size for i, size in enumerate(sizes)})
    shares = client_shares(data, list(data.domains), clients, lam, seed)
    assert len(shares) == clients
    for name, domain in data.domains.items():
        held = torch.cat([share[name] for share in shares if name in share])
        assert sorted(held.tolist()) == list(range(len(domain)))
    assert all(len(indices) for share in shares for indices in share.values())


def test_lambda_decides_how_pure_clients_are():
    data = make(a=60, b=60, c=60)
    pure = client_shares(data, ["a", "b", "c"], 6, 0.0, 0)
    assert all(len(share) == 1 for share in pure)
    even = client_shares(data, ["a", "b", "c"], 6, 1.0, 0)
    assert all({n: len(i) for n, i in s.items()} == {"a": 10, "b": 10, "c": 10} for s in even)


def test_the_seed_shuffles_and_other_domains_do_not_matter():
    data = make(a=50, b=50, c=50)

    def held(seed, sources):
        shares = client_shares(data, sources, len(sources), 0.0, seed)
        return torch.cat([s["a"] for s in shares if "a" in s]).tolist()

    assert held(0, ["a", "b"]) == held(0, ["a", "b"]) == held(0, ["a", "c"])
    assert held(0, ["a", "b"]) != held(1, ["a", "b"])
    assert held(0, ["a", "b"]) != list(range(50))


def test_wrong_divisions_are_refused():
    data = make(a=3, b=3)
    with pytest.raises(ValueError, match="unknown domain 'x'; this data has: a, b"):
        client_shares(data, ["a", "x"], 2, 0.0, 0)
    with pytest.raises(ValueError, match="given once each"):
        client_shares(data, ["a", "a"], 2, 0.0, 0)
    empty = "14 of 20 clients would hold no examples.*use fewer clients"
    with pytest.raises(ValueError, match=empty):
        client_shares(data, ["a", "b"], 20, 0.0, 0)


def test_domain_order_keeps_the_clients_of_a_domain_together():
    shares = client_shares(make(a=60, b=60, c=60), ["a", "b", "c"], 6, 0.0, 0)
    stations = station_order(shares, 3, "domain")
    assert [{n for c in s for n in shares[c]} for s in stations] == [{"a"}, {"b"}, {"c"}]


def test_mixed_order_spreads_them():
    shares = client_shares(make(a=60, b=60, c=60), ["a", "b", "c"], 6, 0.0, 0)
    stations = station_order(shares, 2, "mixed")
    assert [{n for c in s for n in shares[c]} for s in stations] == [{"a", "b", "c"}] * 2


@settings(max_examples=30)
@given(
    stations=st.integers(1, 5), size=st.integers(1, 4), mode=st.sampled_from(["domain", "mixed"])
)
def test_every_client_is_in_one_station_of_equal_size(stations, size, mode):
    shares = client_shares(make(a=70, b=90), ["a", "b"], stations * size, 0.1, 0)
    order = station_order(shares, stations, mode)
    assert [len(clients) for clients in order] == [size] * stations
    assert sorted(c for clients in order for c in clients) == list(range(stations * size))


def test_stations_must_divide_the_clients():
    with pytest.raises(ValueError, match="3 clients cannot be divided evenly over 2 stations"):
        station_order([{}, {}, {}], 2)
    with pytest.raises(ValueError, match="'domain', 'mixed' or 'eara', not 'random'"):
        station_order([{}], 1, "random")


@settings(max_examples=80)
@given(
    targets=st.lists(st.integers(0, 4), min_size=0, max_size=80),
    fraction=st.floats(0, 0.9),
    seed=st.integers(0, 3),
)
def test_validation_is_stratified_and_loses_nothing(targets, fraction, seed):
    labels = torch.tensor(targets, dtype=torch.long)
    train, validation = split_validation(labels, fraction, seed)
    assert sorted(train.tolist() + validation.tolist()) == list(range(len(targets)))
    assert len(validation) == min(round(fraction * len(targets)), max(len(targets) - 1, 0))
    held, every = labels[validation].bincount(minlength=5), labels.bincount(minlength=5)
    share = len(validation) / len(targets) if targets else 0
    assert ((held - share * every).abs() < 1 + 1e-6).all()


def test_validation_depends_on_the_seed_alone():
    labels = torch.arange(100) % 3
    first, again, other = (split_validation(labels, 0.2, seed)[1] for seed in (0, 0, 1))
    assert torch.equal(first, again) and not torch.equal(first, other)
    with pytest.raises(ValueError, match=r"\[0, 1\), not 1.0"):
        split_validation(labels, 1.0, 0)
