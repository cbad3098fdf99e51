"""RegMean: the closed form, its limits, and its behaviour on bad matrices."""

import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hfedatm_core import FactorGram, Gram, RegMeanAccumulator, regmean

seeds = st.integers(0, 10_000)
quick = settings(max_examples=30)


def problem(seed: int, models: int = 3, rows: int = 20, d: int = 6, out: int = 4):
    g = torch.Generator().manual_seed(seed)
    xs = [torch.randn(rows, d, generator=g, dtype=torch.float64) for _ in range(models)]
    weights = [torch.randn(out, d, generator=g, dtype=torch.float64) for _ in range(models)]
    return xs, weights


def gram(x: torch.Tensor) -> Gram:
    return Gram.from_dense(x.T @ x / len(x), len(x))


def factor(x: torch.Tensor) -> FactorGram:
    return FactorGram(x / len(x) ** 0.5, rows=len(x))


def close(a, b, limit=1e-8):
    assert a.dtype == b.dtype
    assert float((a - b).abs().max()) <= limit * max(1.0, float(b.abs().max()))


@quick
@given(seeds, st.integers(1, 5), st.integers(6, 30))
def test_equals_stacked_least_squares(seed, models, rows):
    xs, weights = problem(seed, models, rows=rows)
    # Every model's outputs on its own inputs are the targets.
    targets = torch.cat([x @ w.T for x, w in zip(xs, weights, strict=True)])
    wanted = torch.linalg.lstsq(torch.cat(xs), targets).solution.T
    condition = float(torch.linalg.cond(torch.cat(xs)) ** 2)
    merged = regmean(weights, [gram(x) for x in xs], ridge=0.0)
    close(merged, wanted, 1e-12 * max(1e4, condition))


@quick
@given(seeds, st.lists(st.floats(0.1, 9), min_size=2, max_size=5))
def test_without_off_diagonal_it_is_the_diagonal_weighted_mean(seed, gammas):
    xs, weights = problem(seed, len(gammas))
    diagonals = [c * x.square().mean(0) for c, x in zip(gammas, xs, strict=True)]
    wanted = sum(w * d for w, d in zip(weights, diagonals, strict=True)) / sum(diagonals)
    close(regmean(weights, [gram(x).shrink(0.0) for x in xs], gammas, ridge=0.0), wanted)


@quick
@given(seeds, st.lists(st.floats(0.1, 9), min_size=1, max_size=5), st.floats(0, 1))
def test_equal_grams_give_the_weighted_mean(seed, gammas, alpha):
    xs, weights = problem(seed, len(gammas))
    wanted = sum(c * w for c, w in zip(gammas, weights, strict=True)) / sum(gammas)
    close(regmean(weights, [gram(xs[0]).shrink(alpha)] * len(gammas), gammas), wanted)


@quick
@given(seeds)
def test_one_model_is_returned(seed):
    xs, weights = problem(seed, 1)
    close(regmean(weights, [gram(xs[0])]), weights[0], 1e-12)


@quick
@given(seeds, st.sampled_from([1e10, 1e14, float("inf")]))
def test_a_large_ridge_gives_the_mean(seed, ridge):
    xs, weights = problem(seed)
    wanted = sum(c * w for c, w in zip((1, 2, 3), weights, strict=True)) / 6
    for make in (gram, factor):
        close(regmean(weights, [make(x) for x in xs], [1, 2, 3], ridge=ridge), wanted)


@pytest.mark.parametrize("make", [gram, factor])
@pytest.mark.parametrize("alpha", [1.0, 0.75])
def test_a_dead_feature_gets_the_mean_weight(make, alpha):
    xs, weights = problem(1, rows=4, d=8)
    for x in xs:
        x[:, 2] = 0.0
    merged = regmean(weights, [make(x).shrink(alpha) for x in xs])
    close(merged[:, 2], torch.stack(weights).mean(0)[:, 2])
    assert (merged[:, 3] - torch.stack(weights).mean(0)[:, 3]).abs().max() > 1e-3


@quick
@given(seeds, st.floats(1e-8, 1e8), st.permutations(range(4)))
def test_invariant_to_order_and_common_scale(seed, scale, order):
    xs, weights = problem(seed, 4)
    grams, gammas = [gram(x) for x in xs], [1.0, 2.0, 3.0, 4.0]
    base = regmean(weights, grams, gammas)
    shuffled = [[values[i] for i in order] for values in (weights, grams, gammas)]
    close(regmean(*shuffled), base)
    close(regmean(weights, [g * scale for g in grams], gammas), base)


@pytest.mark.parametrize("ridge", [1e-6, 1e-3, 0.5])
def test_solves_the_stated_equation(ridge):
    xs, weights = problem(5)
    gammas, grams = [1.0, 2.0, 4.0], [gram(x).shrink(0.75) for x in xs]
    total = sum(c * g.dense() for c, g in zip(gammas, grams, strict=True))
    shift = ridge * total.diagonal().mean()
    mean = sum(c * w for c, w in zip(gammas, weights, strict=True)) / sum(gammas)
    right = sum(c * g.dense() @ w.T for c, g, w in zip(gammas, grams, weights, strict=True))
    wanted = torch.linalg.solve(
        total + shift * torch.eye(6, dtype=torch.float64), right + shift * mean.T
    ).T
    close(regmean(weights, grams, gammas, ridge), wanted, 1e-11)


@quick
@given(seeds, st.integers(1, 4), st.sampled_from([1.0, 0.75, 0.3]), st.integers(1, 6))
def test_the_factor_form_is_exact_while_its_rank_suffices(seed, models, alpha, rows):
    xs, weights = problem(seed, models, rows=rows, d=40)
    dense = regmean(weights, [gram(x).shrink(alpha) for x in xs], ridge=1e-4)
    low = regmean(weights, [factor(x).shrink(alpha) for x in xs], ridge=1e-4)
    close(low, dense)


@pytest.mark.parametrize("alpha", [1.0, 0.75])
def test_the_factor_form_at_the_default_ridge(alpha):
    xs, weights = problem(2, 3, rows=7, d=60)
    dense = regmean(weights, [gram(x).shrink(alpha) for x in xs])
    close(regmean(weights, [factor(x).shrink(alpha) for x in xs]), dense)


def test_more_factor_rows_than_features():
    xs, weights = problem(3, 5, rows=9, d=12)
    close(regmean(weights, [factor(x) for x in xs]), regmean(weights, [gram(x) for x in xs]))


@pytest.mark.parametrize("d", [100, 600])
def test_float32_is_as_good_as_its_inputs(d):
    xs, weights = problem(4, 4, rows=3 * d, d=d, out=5)
    exact = regmean(weights, [gram(x).shrink(0.9) for x in xs])
    single = regmean([w.float() for w in weights], [gram(x.float()).shrink(0.9) for x in xs])
    assert single.dtype == torch.float32
    close(single.double(), exact, 1e-5)


def test_an_ill_conditioned_float32_sum_is_solved_in_float64():
    d = 600
    xs, weights = problem(6, 2, rows=40, d=d, out=3)  # rank 80 of 600
    w = [x.float() for x in weights]
    merged = regmean(w, [gram(x.float()) for x in xs])
    for x, own in zip(xs, w, strict=True):  # interpolates every model on its own data
        error = x.float() @ (merged - own).T
        assert error.norm() < 1e-2 * (x.float() @ own.T).norm()


def test_close_models_keep_their_digits():
    # The difference of the models is 1e-9 of the weights; its merge must still be right.
    xs, weights = problem(7, 2)
    base = weights[0]
    small = [base, base + 1e-9 * weights[1]]
    grams = [gram(x) for x in xs]
    zero = [torch.zeros_like(base), weights[1]]
    close((regmean(small, grams) - base) / 1e-9, regmean(zero, grams), 1e-6)


def test_an_indefinite_sum_is_repaired():
    xs, weights = problem(8)
    matrix = gram(xs[0]).dense()
    values, vectors = torch.linalg.eigh(matrix)
    values[0] = -values[-1]
    bad = Gram.from_dense(vectors @ torch.diag(values) @ vectors.T)
    accumulator = RegMeanAccumulator({"fc": weights[0]})
    for w in weights:
        accumulator.add({"fc": w}, bad)
    mean = torch.stack(weights).mean(0)
    solution = accumulator.solve({"fc": mean})
    assert solution.how == "regmean" and "repaired" in solution.reason
    close(solution.weights["fc"], mean)  # equal Grams: the mean, in kept and in cut directions


@pytest.mark.parametrize("make", [gram, factor])
def test_a_singular_sum_without_ridge_is_finite(make):
    xs, weights = problem(9, 2, rows=2, d=8)
    merged = regmean(weights, [make(x) for x in xs], ridge=0.0)
    assert torch.isfinite(merged).all()
    for x, w in zip(xs, weights, strict=True):
        close(x @ merged.T, x @ w.T, 1e-6)


def test_no_information_gives_the_mean_with_a_warning():
    xs, weights = problem(10, 2)
    mean = torch.stack(weights).mean(0)
    with pytest.warns(UserWarning, match="not positive"):
        close(regmean(weights, [gram(x * 0) for x in xs]), mean)
    infinite = Gram.from_dense(torch.full((6, 6), float("inf"), dtype=torch.float64))
    with pytest.warns(UserWarning, match="not finite"):
        close(regmean(weights, [infinite] * 2), mean)


def test_good_matrices_do_not_warn():
    xs, weights = problem(11)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        regmean(weights, [gram(x) for x in xs])
        regmean(weights, [factor(x) for x in xs])


def test_half_precision_weights_keep_their_type():
    xs, weights = problem(12)
    merged = regmean([w.half() for w in weights], [gram(x) for x in xs])
    assert merged.dtype == torch.float16 and torch.isfinite(merged).all()


def test_layers_that_share_an_input_are_solved_together_as_alone():
    xs, weights = problem(13, 3)
    _, others = problem(14, 3, out=2)
    together = RegMeanAccumulator({"q": weights[0], "k": others[0]})
    for x, q, k in zip(xs, weights, others, strict=True):
        together.add({"q": q, "k": k}, gram(x))
    means = {"q": torch.stack(weights).mean(0), "k": torch.stack(others).mean(0)}
    alone = together.take(["k"]).solve(means).weights
    solved = together.solve(means).weights
    close(solved["q"], regmean(weights, [gram(x) for x in xs]), 1e-12)
    close(solved["k"], regmean(others, [gram(x) for x in xs]), 1e-12)
    assert list(alone) == ["k"] and torch.equal(alone["k"], solved["k"])


def test_errors_name_layer_and_shapes():
    xs, weights = problem(15, 2)
    with pytest.raises(ValueError, match="at least one"):
        regmean([], [])
    with pytest.raises(ValueError, match="2 weights, 1 Grams"):
        regmean(weights, [gram(xs[0])])
    with pytest.raises(ValueError, match=r"5 features.*\(4, 6\)"):
        regmean(weights, [gram(x[:, :5]) for x in xs])
    with pytest.raises(ValueError, match=r"model 1.*\(4, 5\).*\(4, 6\)"):
        regmean([weights[0], weights[1][:, :5]], [gram(x) for x in xs])
    with pytest.raises(ValueError, match="ridge"):
        regmean(weights, [gram(x) for x in xs], ridge=-1.0)
    with pytest.raises(ValueError, match="model 1.*NaN"):
        regmean([weights[0], weights[1] * float("nan")], [gram(x) for x in xs])
