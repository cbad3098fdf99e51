"""Bounds: what is usual passes bit by bit, what is not is cut back, and nothing becomes NaN."""

import statistics

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from hfedatm_core import FactorGram, Gram, PackedGram, Update, weighted_mean
from hfedatm_core.robust.bounding import Bounds, gram_size, scale_back
from hfedatm_core.robust.updates import BoundedUpdates
from hfedatm_core.tensors import distance, norm_of

START = {
    "weight": torch.linspace(-1, 1, 12).view(3, 4),
    "bias": torch.zeros(3),
    "bn.running_var": torch.ones(3),
    "bn.num_batches_tracked": torch.tensor(7),
}
ONLY_SIZES = Bounds(2.0, 3.0, agreement=0.0)


def moved(seed: int, length: float = 1.0, examples: int = 100, **more) -> Update:
    """An update whose floating tensors all move by ``length``; variances stay positive."""
    generator = torch.Generator().manual_seed(seed)
    state = {}
    for name, start in START.items():
        if start.is_floating_point():
            step = torch.randn(start.shape, generator=generator)
            step = step.abs() if name.endswith("var") else step
            state[name] = start + length * step / step.norm()
        else:
            state[name] = start + 3
    return Update(state, num_examples=examples, name=f"client {seed}", **more)


def bounded(updates, bounds=ONLY_SIZES, start=START) -> BoundedUpdates:
    held = BoundedUpdates(start, bounds)
    for update in updates:
        held.add(update)
    return held


def same(one: Update, other: Update) -> bool:
    return all(torch.equal(one.state[n], other.state[n]) for n in other.state)


@given(st.lists(st.floats(0.6, 1.15), min_size=1, max_size=7))
def test_what_is_usual_passes_bit_by_bit(lengths):
    updates = [moved(seed, length) for seed, length in enumerate(lengths)]
    held = bounded(updates)
    for found, sent in zip(held, updates, strict=True):
        assert same(found, sent) and found.num_examples == sent.num_examples
    assert held.cuts() == []


@given(
    st.lists(st.floats(0.5, 2.0), min_size=2, max_size=6),
    st.floats(0.1, 1e30),
    st.integers(0, 6),
)
def test_no_tensor_moves_further_than_twice_the_median(lengths, far, place):
    place = min(place, len(lengths))
    lengths.insert(place, far)
    found = list(bounded([moved(seed, length) for seed, length in enumerate(lengths)]))
    for name in ("weight", "bias"):
        limit = 2 * statistics.median(lengths)
        for update in found:
            assert distance(update.state[name], START[name]) <= limit * (1 + 1e-4)
            assert torch.isfinite(update.state[name]).all()


@given(st.integers(3, 8), st.sampled_from(["low", "high", "mixed"]), st.integers(0, 7))
def test_one_update_of_the_largest_floats_moves_the_mean_by_little(count, sign, place):
    top = torch.finfo(torch.float32).max
    honest = [moved(seed) for seed in range(count - 1)]
    wild = {}
    for name, start in START.items():
        full = torch.full_like(start, 2**62) if not start.is_floating_point() else None
        wild[name] = full if full is not None else torch.full_like(start, top)
        if sign == "low" and full is None:
            wild[name] = -wild[name]
        if sign == "mixed" and full is None:
            wild[name].view(-1)[::2] *= -1
    place = min(place, count - 1)
    updates = [*honest[:place], Update(wild, num_examples=10**6, name="liar"), *honest[place:]]
    held = bounded(updates)
    admitted = list(held)
    mean = weighted_mean([u.state for u in admitted], [u.num_examples for u in admitted])
    for name, start in START.items():
        assert torch.isfinite(mean[name].double()).all()
        usual = 3.0 if not start.is_floating_point() else 1.0
        # Its claim counts three times, its move at most twice over the root of three.
        pull = (count - 1 + 3 * 2 / 3**0.5) / (count + 2)
        assert distance(mean[name], start) <= pull * usual * 1.001 + 0.5
    assert (mean["bn.running_var"] >= 0).all()
    assert [cut.name for cut in held.cuts()] == ["liar"]


def test_a_tensor_that_nobody_else_moves_stays():
    still = [Update(dict(START), name=str(k)) for k in range(4)]
    lone = Update({**START, "bias": torch.ones(3)}, name="lone")
    *_, last = bounded([*still, lone])
    assert torch.equal(last.state["bias"], START["bias"])


def test_counters_stay_whole_numbers():
    updates = [moved(seed) for seed in range(4)]
    far = moved(9)
    far.state["bn.num_batches_tracked"].fill_(1007)
    *_, last = bounded([*updates, far])
    assert last.state["bn.num_batches_tracked"].dtype == torch.int64
    assert int(last.state["bn.num_batches_tracked"]) == 7 + 6  # twice the usual three


def test_a_variance_is_never_negative():
    wrong = moved(9)
    wrong.state["bn.running_var"].fill_(-0.4)
    *_, last = bounded([*(moved(seed) for seed in range(4)), wrong])
    assert (last.state["bn.running_var"] >= 0).all()


@given(st.lists(st.integers(1, 1000), min_size=3, max_size=8))
def test_a_claim_counts_up_to_three_times_the_median(examples):
    found = bounded([moved(seed, examples=n) for seed, n in enumerate(examples)])
    most = 3 * statistics.median(examples)
    for update, claimed in zip(found, examples, strict=True):
        assert update.num_examples == (claimed if claimed <= most else int(most * (1 + 1e-12)))


def test_every_number_that_weighs_is_cut_with_the_claim():
    metrics = {"num-examples": 100, "num-clients": 2, "steps": 10.0, "path": 4.0, "loss": 1.0}
    honest = [moved(seed, metrics=metrics, num_clients=2) for seed in range(4)]
    liar = {"num-examples": 10**6, "num-clients": 900, "steps": 1e9, "path": 1e9, "loss": 1.0}
    wild = moved(9, examples=10**6, metrics=liar, num_clients=900)
    *_, last = bounded([*honest, wild])
    assert (last.num_examples, last.num_clients) == (300, 6)
    wanted = {"num-examples": 300, "num-clients": 6, "steps": 30.0, "path": 12.0, "loss": 1.0}
    assert dict(last.metrics) == pytest.approx(wanted)


def test_one_update_passes_whatever_it_is():
    (found,) = bounded([moved(0, 1e20, examples=10**6)])
    assert same(found, moved(0, 1e20)) and found.num_examples == 10**6


def test_of_two_the_received_model_has_the_third_vote():
    tiny, huge = moved(0, 0.1), moved(1, 1e9)
    first, second = bounded([tiny, huge])
    assert same(first, tiny)
    norm = float(START["weight"].norm())
    assert distance(second.state["weight"], START["weight"]) == pytest.approx(2 * norm, rel=1e-4)
    rider, honest = Update(dict(START)), moved(1, 0.5)
    _, kept = bounded([rider, honest])
    assert torch.equal(kept.state["weight"], honest.state["weight"])


@given(st.permutations(range(6)))
def test_the_order_of_arrival_changes_nothing(order):
    updates = [moved(seed, 0.3 + 0.4 * seed, examples=50 + 100 * seed) for seed in range(6)]
    straight = {u.name: u for u in bounded(updates)}
    mixed = {u.name: u for u in bounded([updates[k] for k in order])}
    for name, update in straight.items():
        assert same(mixed[name], update)
        assert mixed[name].num_examples == update.num_examples


def test_factors_are_those_of_numpy():
    lengths, examples = [0.5, 1.0, 1.2, 9.0, 1.1], [100, 90, 110, 250, 100]
    updates = [moved(s, d, n) for s, (d, n) in enumerate(zip(lengths, examples, strict=True))]
    found = list(bounded(updates))
    x = np.stack([u.state["weight"].numpy().astype(np.float64) for u in updates])
    r = START["weight"].numpy().astype(np.float64)
    d = np.sqrt(((x - r) ** 2).sum((1, 2)))
    claims = np.minimum(examples, 3 * np.median(examples))
    most = 2 * np.minimum(1, np.sqrt(np.median(examples) / claims)) * np.median(d)
    wanted = r + np.minimum(1, most / d)[:, None, None] * (x - r)
    for update, expected in zip(found, wanted, strict=True):
        np.testing.assert_allclose(update.state["weight"].numpy(), expected, rtol=1e-5)


# --- Grams


def gram(seed: int, scale: float = 1.0) -> PackedGram:
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(seed))
    return Gram.from_dense(scale * x.T @ x / 8)


@pytest.mark.parametrize("scale", [1e6, 1e30, 1e-6])
def test_a_gram_is_cut_to_twice_the_median_size(scale):
    grams = [gram(seed) for seed in range(4)]
    updates = [moved(k, grams={"a": g, "b": g}) for k, g in enumerate(grams)]
    own = gram(9, scale)
    *others, last = bounded([*updates, moved(9, grams={"a": own, "b": own})])
    sizes = sorted([*map(gram_size, grams), gram_size(own)])
    assert gram_size(last.grams["a"]) <= 2 * sizes[2] * 1.0001
    assert last.grams["a"] is last.grams["b"]  # layers that share one still do
    if scale < 1:
        assert last.grams["a"] is own
    for found, sent in zip(others, grams, strict=True):
        assert gram_size(sent) > 2 * sizes[2] or found.grams["a"] is sent


@given(st.integers(0, 1000), st.integers(1, 6))
def test_the_size_of_a_true_gram_is_its_trace(seed, rows):
    x = torch.randn(rows, 5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    dense = x.T @ x
    for form in (Gram.from_dense(dense), FactorGram(x)):
        assert gram_size(form) == pytest.approx(float(dense.trace()))


def test_a_matrix_that_is_no_gram_cannot_hide_behind_a_small_trace():
    wild = torch.eye(4)
    wild[0, 1] = wild[1, 0] = 1e9
    assert gram_size(Gram.from_dense(wild)) >= 1e9
    assert gram_size(FactorGram(torch.full((1, 4), 1e9), torch.ones(4))) >= 1e18


# --- lengths


@given(st.lists(st.floats(-1e300, 1e300), min_size=1, max_size=5), st.booleans())
def test_lengths_do_not_overflow(values, single):
    tensor = torch.tensor(values, dtype=torch.float32 if single else torch.float64)
    assume(bool(torch.isfinite(tensor).all()))
    top = max(abs(v) for v in tensor.double().tolist())
    found = norm_of(tensor.double())
    assert top * (1 - 1e-6) <= found <= top * len(values) ** 0.5 * (1 + 1e-6) + 1e-300
    assert distance(tensor, torch.zeros_like(tensor)) == pytest.approx(found, rel=1e-6, abs=1e-140)


def test_the_largest_float32_is_scaled_back_to_a_finite_number():
    top = torch.full((3,), torch.finfo(torch.float32).max)
    length = distance(top, -top)
    assert length == pytest.approx(2 * 3.4028235e38 * 3**0.5)
    assert torch.allclose(scale_back(top, -torch.ones(3), 1e-38), torch.full((3,), 2.4028), 1e-4)


def test_a_cut_is_said_in_one_line():
    held = bounded([*(moved(seed) for seed in range(4)), moved(9, 1e6, examples=10**6)])
    (cut,) = held.cuts()
    assert cut.name == "client 9" and cut.factor < 1e-5
    assert "num-examples 3.33e+03 x its bound" in cut.what and "more" in cut.what
    assert "\n" not in cut.what and len(cut.what) < 200
