"""Robust rules against NumPy: what they compute, and how little one liar changes."""

import importlib
import pkgutil

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hfedatm_core import Gram, Update, merge, weighted_mean
from hfedatm_core.robust import rules
from hfedatm_core.robust.bounding import Bounds
from hfedatm_core.robust.rules.base import RobustRule
from hfedatm_core.robust.rules.geometric_median import GeometricMedian, weiszfeld
from hfedatm_core.robust.rules.median import CoordinateMedian
from hfedatm_core.robust.rules.multi_krum import MultiKrum
from hfedatm_core.robust.rules.none import Everybody
from hfedatm_core.robust.rules.record import Record, shares
from hfedatm_core.robust.rules.trimmed_mean import TrimmedMean
from hfedatm_core.robust.updates import BoundedUpdates

ALL = [Everybody, CoordinateMedian, TrimmedMean, MultiKrum, GeometricMedian, Record]
SHAPES = {"w": (4, 3), "b": (5,)}
START = {name: torch.zeros(shape) for name, shape in SHAPES.items()} | {"n": torch.tensor(2)}
OFF = Bounds(0.0, 0.0, 0.0)


def update(values, name="", examples=10) -> Update:
    """Make an update of 17 numbers."""
    values = torch.as_tensor(np.asarray(values), dtype=torch.float32)
    state = {"w": values[:12].view(4, 3), "b": values[12:17], "n": torch.tensor(3)}
    return Update(state, num_examples=examples, name=name)


def flat(state) -> np.ndarray:
    return np.concatenate([state["w"].double().numpy().ravel(), state["b"].double().numpy()])


def admitted(rule: RobustRule, updates, bounds=OFF) -> list[Update]:
    held = BoundedUpdates(START, bounds)
    for one in updates:
        held.add(one)
    return list(rule.admit(held))


def mean(updates) -> np.ndarray:
    return flat(
        weighted_mean([u.state for u in updates], [u.num_examples * u.share for u in updates])
    )


matrices = st.builds(
    lambda seed, n, scale: (
        np.random.default_rng(seed).normal(size=(n, 17)).astype(np.float32) * scale
    ),
    st.integers(0, 10_000),
    st.integers(1, 9),
    st.sampled_from([1e-3, 1.0, 1e3]),
)


def test_every_rule_is_a_file_that_the_tests_know():
    files = {info.name for info in pkgutil.iter_modules(rules.__path__)} - {"base"}
    assert files == {cls.__module__.rpartition(".")[2] for cls in ALL}
    for name in files:
        importlib.import_module(f"{rules.__name__}.{name}")


@given(matrices)
def test_the_median_is_that_of_numpy(x):
    found = admitted(CoordinateMedian(), [update(row) for row in x])
    assert len(found) == len(x)
    if len(x) > 2:
        for one in found:
            np.testing.assert_allclose(flat(one.state), np.median(x, axis=0), rtol=1e-5, atol=1e-9)


@given(matrices, st.integers(0, 4))
def test_the_trimmed_mean_clamps_into_the_range_of_numpy(x, liars):
    found = admitted(TrimmedMean(liars), [update(row) for row in x])
    ordered, count = np.sort(x, axis=0), len(x)
    if count < 3 or liars == 0:
        wanted = x
    elif 2 * liars < count - 1:
        wanted = np.clip(x, ordered[liars], ordered[count - 1 - liars])
    else:
        wanted = np.broadcast_to(np.median(x, axis=0), x.shape)
    np.testing.assert_allclose([flat(u.state) for u in found], wanted, rtol=1e-5, atol=1e-9)
    assert all(u.state["n"] == 3 for u in found)


@given(matrices, st.integers(1, 3))
def test_multi_krum_chooses_as_numpy_does(x, liars):
    found = admitted(MultiKrum(liars), [update(row, str(k)) for k, row in enumerate(x)])
    count = len(x)
    if count < 3:
        assert len(found) == count
        return
    parts = [x[:, :12].astype(np.float64), x[:, 12:].astype(np.float64)]
    scaled = np.hstack([p / np.sort(np.linalg.norm(p, axis=1))[(count - 1) // 2] for p in parts])
    squares = ((scaled[:, None] - scaled) ** 2).sum(2)
    scores = np.sort(squares, axis=1)[:, 1 : 1 + max(1, count - liars - 2)].sum(1)
    chosen = set(np.argsort(scores)[: max(1, count - liars)].tolist())
    ties = {k for k in range(count) if any(np.isclose(scores[k], scores[j]) for j in chosen)}
    assert chosen <= {int(u.name) for u in found} | ties
    assert {int(u.name) for u in found} <= chosen | ties


@given(matrices)
def test_the_geometric_median_has_a_smaller_summed_distance_than_any_update_or_the_mean(x):
    x = x.astype(np.float64)
    shares = weiszfeld(torch.from_numpy(x @ x.T)).numpy()
    centre = (shares[:, None] * x).sum(0) / shares.sum()

    def total(point):
        return np.linalg.norm(x - point, axis=1).sum()

    assert total(centre) <= total(x.mean(0)) * (1 + 1e-6)
    assert total(centre) <= min(total(row) for row in x) * 1.05 + 1e-12


@pytest.mark.parametrize("cls", ALL)
@given(row=st.integers(0, 999), count=st.integers(1, 8))
def test_equal_updates_are_a_fixed_point(cls, row, count):
    values = np.random.default_rng(row).normal(size=17).astype(np.float32)
    found = admitted(cls(), [update(values, str(k)) for k in range(count)], Bounds())
    assert found
    np.testing.assert_allclose(mean(found), values, rtol=1e-6)


@pytest.mark.parametrize("cls", ALL)
@given(x=matrices, seed=st.integers(0, 100))
def test_the_order_of_arrival_changes_nothing(cls, x, seed):
    order = np.random.default_rng(seed).permutation(len(x))
    straight = admitted(cls(), [update(row, str(k)) for k, row in enumerate(x)])
    mixed = admitted(cls(), [update(x[k], str(k)) for k in order])
    np.testing.assert_allclose(mean(mixed), mean(straight), rtol=1e-3, atol=1e-4 * np.abs(x).max())


@pytest.mark.parametrize("cls", ALL)
@pytest.mark.parametrize("count", [3, 4, 5, 8])
@pytest.mark.parametrize("wild", ["max", "min", "mixed", "flip", "far"])
def test_one_liar_moves_the_mean_by_no_more_than_the_honest_reach(cls, count, wild):
    rng = np.random.default_rng(count)
    x = (1.0 + 0.3 * rng.normal(size=(count - 1, 17))).astype(np.float32)
    top = np.finfo(np.float32).max
    lie = {
        "max": np.full(17, top),
        "min": np.full(17, -top),
        "mixed": top * np.where(np.arange(17) % 2, 1.0, -1.0),
        "flip": -x[0],
        "far": 1e6 * x[0],
    }[wild].astype(np.float32)
    bounds = Bounds(2.0, 3.0, agreement=0.0)  # what the rule does by itself, and the bounds
    found = admitted(cls(), [update(lie, "liar", 10**6), *(update(row) for row in x)], bounds)
    result = mean(found)
    assert np.isfinite(result).all()
    reach = np.linalg.norm(x, axis=1).max()
    assert np.linalg.norm(result - x.mean(0)) <= 1.5 * reach
    if cls in (CoordinateMedian, TrimmedMean):  # the values stay among those of the honest
        assert (result >= x.min(0) - 1e-5).all() and (result <= x.max(0) + 1e-5).all()


@pytest.mark.parametrize("cls", ALL)
def test_values_that_overflow_give_no_nan_even_without_bounds(cls):
    top = np.finfo(np.float32).max
    rows = [
        np.ones(17),
        -np.ones(17) * top,
        1.1 * np.ones(17),
        0.9 * np.ones(17),
        np.ones(17) * top,
    ]
    for one in admitted(cls(), [update(row) for row in rows]):
        assert np.isfinite(flat(one.state)).all() and np.isfinite(one.share)


@pytest.mark.parametrize("cls", ALL)
def test_what_a_rule_admits_is_merged_by_regmean(cls):
    grams = {"w": Gram.from_dense(torch.eye(3) + 0.1)}
    updates = []
    for k in range(5):
        row = np.random.default_rng(k).normal(size=17)
        one = update(row, f"station {k}")
        state = {"w.weight": one.state["w"], "w.bias": one.state["b"][:4]}
        updates.append(Update(state, grams, 10, 2, one.name))
    start = {name: torch.zeros_like(value) for name, value in updates[0].state.items()}
    held = BoundedUpdates(start, Bounds(2.0, 3.0, 0.0))
    for one in updates:
        held.add(one)
    merged = merge(cls().admit(held), fot=False)
    assert merged.report.layers["w"].how == "regmean"
    kept = list(cls().admit(held))
    # Equal Grams: RegMean is the mean weighted by clients and share.
    wanted = weighted_mean([u.state for u in kept], [u.num_clients * u.share for u in kept])
    torch.testing.assert_close(merged.state["w.weight"], wanted["w.weight"], rtol=1e-4, atol=1e-5)


@given(st.lists(st.floats(-1, 1), min_size=3, max_size=9))
def test_shares_by_record_are_twice_the_part_of_the_usual_one_and_at_most_all(records):
    usual = sorted(records)[(len(records) - 1) // 2]
    found = shares(torch.tensor(records, dtype=torch.float64)).tolist()
    if usual <= 0:
        assert found == [1.0] * len(records)
    else:
        wanted = [min(1.0, max(0.0, 2 * record / usual)) for record in records]
        assert found == pytest.approx(wanted)


def test_by_record_who_agreed_little_counts_little_and_the_honest_fully():
    direction = np.random.default_rng(0).normal(size=17)
    noise = np.random.default_rng(1).normal(size=(5, 17))
    updates = [update(direction + 0.3 * noise[k], f"node {k}") for k in range(4)]
    held = BoundedUpdates(
        START, Bounds(), earlier={f"node {k}": 3.0 for k in range(4)} | {"node 4": 0.1}
    )
    for one in [*updates, update(noise[4], "node 4")]:
        held.add(one)
    found = {one.name: one.share for one in Record().admit(held)}
    assert [found[f"node {k}"] for k in range(4)] == [1.0] * 4
    assert found.get("node 4", 0.0) < 0.5
