"""A ridge in the scale of each feature: right in every form, and blind to the scale of features."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_closed_form import close, factor, gram, problem, seeds

from hfedatm_core import Gram, merge, regmean
from hfedatm_core.update import Update

forms = st.sampled_from([gram, factor])
scales = st.lists(st.floats(-4, 4), min_size=6, max_size=6)


def stretched(xs, weights, exponents):
    """Return inputs whose features are multiplied by something, and weights that undo it."""
    by = 10.0 ** torch.tensor(exponents, dtype=torch.float64)
    return [x * by for x in xs], [w / by for w in weights], by


def solved(xs, weights, ridge):
    """Return the solution of the stated equation."""
    total = sum(gram(x).dense() for x in xs)
    shift = ridge * total.diagonal().diag()
    right = sum(w @ gram(x).dense() for x, w in zip(xs, weights, strict=True))
    mean = sum(weights) / len(weights)
    return torch.linalg.solve(total + shift, (right + mean @ shift).T).T


@settings(max_examples=50)
@given(seeds, forms, st.sampled_from([1e-4, 0.1, 3.0]), st.integers(2, 20))
def test_solves_the_stated_equation_in_both_forms(seed, make, ridge, rows):
    xs, weights = problem(seed, rows=rows)
    merged = regmean(weights, [make(x) for x in xs], ridge=ridge, ridge_scale="feature")
    close(merged, solved(xs, weights, ridge), 1e-7)


@settings(max_examples=50)
@given(seeds, forms, scales, st.sampled_from([1e-6, 1e-2, 1.0]))
def test_the_scale_of_a_feature_does_not_matter(seed, make, exponents, ridge):
    xs, weights = problem(seed)
    plain = regmean(weights, [make(x) for x in xs], ridge=ridge, ridge_scale="feature")
    far, far_weights, by = stretched(xs, weights, exponents)
    merged = regmean(far_weights, [make(x) for x in far], ridge=ridge, ridge_scale="feature")
    close(merged * by, plain, 1e-6)


def test_the_mean_diagonal_loses_the_small_features():
    """The same problem; one of its features is measured in other units."""
    xs, weights = problem(0, rows=40)
    exact = regmean(weights, [gram(x) for x in xs], ridge=0.0)
    far, far_weights, by = stretched(xs, weights, [3.0, 0, 0, 0, 0, 0])
    grams = [gram(x) for x in far]

    def error(scale):
        merged = regmean(far_weights, grams, ridge=1e-3, ridge_scale=scale) * by
        return float((merged - exact).norm() / exact.norm())

    assert error("feature") < 1e-2 < 0.3 < error("mean")


@settings(max_examples=30)
@given(seeds, forms, st.sets(st.integers(0, 5), min_size=1, max_size=6))
def test_a_dead_feature_gets_the_mean_weight(seed, make, dead):
    xs, weights = problem(seed)
    for x in xs:
        x[:, list(dead)] = 0.0
    if len(dead) == 6:
        with pytest.warns(UserWarning, match="mean diagonal"):
            merged = regmean(weights, [make(x) for x in xs], ridge_scale="feature")
    else:
        merged = regmean(weights, [make(x) for x in xs], ridge_scale="feature")
    mean = sum(weights) / len(weights)
    close(merged[:, list(dead)], mean[:, list(dead)])
    assert torch.isfinite(merged).all()


@pytest.mark.parametrize("ridge", [1e10, float("inf")])
def test_a_large_ridge_gives_the_mean(ridge):
    xs, weights = problem(3)
    merged = regmean(weights, [gram(x) for x in xs], ridge=ridge, ridge_scale="feature")
    close(merged, sum(weights) / 3)


def test_a_singular_sum_is_repaired_in_its_own_units():
    """More features than rows and no ridge: the directions without energy keep the mean."""
    xs, weights = problem(1, rows=1)
    far, far_weights, by = stretched(xs, weights, [2.0, -2, 0, 1, -1, 0])
    merged = regmean(far_weights, [gram(x) for x in far], ridge=0.0, ridge_scale="feature") * by
    assert torch.isfinite(merged).all()
    for x, weight in zip(xs, weights, strict=True):
        close(x @ merged.T, x @ weight.T, 1e-6)


def test_wide_float32_layers():
    xs, weights = problem(0, rows=700, d=600)
    small = [gram(x.float()) for x in xs]
    merged = regmean([w.float() for w in weights], small, ridge=1e-4, ridge_scale="feature")
    close(merged.double(), solved(xs, weights, 1e-4), 1e-3)


def test_merging_passes_it_on_and_an_unknown_one_is_refused():
    xs, weights = problem(0)
    updates = [Update({"fc.weight": w}, {"fc": gram(x)}) for x, w in zip(xs, weights, strict=True)]
    merged = merge(updates, fot=False, ridge=0.5, ridge_scale="feature").state["fc.weight"]
    close(merged, solved(xs, weights, 0.5))
    with pytest.raises(ValueError, match="ridge_scale must be 'mean' or 'feature'"):
        regmean(weights, [gram(x) for x in xs], ridge_scale="row")


# --- what is taken for what


def test_a_matrix_and_its_transpose_are_two():
    a = torch.randn(5, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    xs, _ = problem(0, models=2, d=5)
    grams = [gram(x) for x in xs]
    assert torch.equal(regmean([a, a.T], grams), regmean([a, a.T.contiguous()], grams))
    assert not torch.allclose(regmean([a, a.T], grams), a)
    assert torch.equal(regmean([a, a], grams), a)


def test_an_indefinite_gram_is_warned_of():
    matrix = torch.tensor([[1.0, 2.0], [2.0, 1.0]], dtype=torch.float64)
    weights = [torch.eye(2).double(), -torch.eye(2).double()]
    whole = Gram.from_dense(torch.eye(2).double())
    with pytest.warns(UserWarning, match="the Gram of model 1 is not positive semi-definite"):
        regmean(weights, [whole * 9, Gram.from_dense(matrix)])  # though the sum is definite
    with pytest.warns(UserWarning, match="the Gram of model 0 is not positive semi-definite"):
        merged = regmean(weights, [Gram.from_dense(matrix), whole * 0.5])
    assert torch.isfinite(merged).all()
