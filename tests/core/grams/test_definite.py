"""Every Gram passes, however it was rounded and shrunk; what would take energy away does not."""

import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from hfedatm_core import FactorGram, Gram, collect_grams, regmean
from hfedatm_core.grams.definite import is_semidefinite

ROUNDING = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 1e-5}
wires = st.sampled_from(list(ROUNDING))
alphas = st.sampled_from([0.0, 0.3, 0.75, 1.0])


def on_the_wire(gram: Gram, dtype: str) -> Gram:
    return Gram.from_arrays(gram.to_arrays(dtype))


@st.composite
def inputs(draw):
    """Rows of features of very different scale, some dead, some constant, some alike."""
    rows, dim = draw(st.integers(1, 30)), draw(st.integers(1, 24))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    x = torch.randn(rows, dim, generator=generator, dtype=torch.float64)
    x += draw(st.sampled_from([0.0, 3.0, 100.0]))
    kind = draw(hnp.arrays(np.int64, dim, elements=st.integers(0, 3)))
    scale = draw(hnp.arrays(np.float64, dim, elements=st.floats(-6, 2)))
    x[:, kind == 1] = 0.0
    x[:, kind == 2] = 1.0
    x[:, kind == 3] = x[:, :1].clone()
    return x * torch.from_numpy(10.0**scale) * 10.0 ** draw(st.integers(-8, 6))


@given(inputs(), wires, alphas)
@settings(max_examples=150)
def test_every_gram_passes_however_it_was_rounded_and_shrunk(x, wire, alpha):
    gram = Gram.from_dense((x.T @ x / len(x)).float())
    assert is_semidefinite(on_the_wire(gram, wire), ROUNDING[wire])
    again = on_the_wire(on_the_wire(gram, wire).shrink(alpha), wire)
    assert is_semidefinite(again, 2 * ROUNDING[wire], alpha)


@given(inputs(), wires, alphas, st.integers(1, 8))
@settings(max_examples=100)
def test_every_factor_passes(x, wire, alpha, rank):
    layer = torch.nn.Sequential(torch.nn.Linear(x.shape[1], 1).double())
    gram = collect_grams(layer, [(x, None)], max_dim=1, rank=rank)["0"]
    if not isinstance(gram, FactorGram):
        return
    assert is_semidefinite(on_the_wire(gram, wire), ROUNDING[wire])
    again = on_the_wire(on_the_wire(gram, wire).shrink(alpha), wire)
    assert is_semidefinite(again, 2 * ROUNDING[wire], alpha)


@given(inputs(), st.integers(0, 10**6), st.floats(0.0, 1.0))
@settings(max_examples=100)
def test_what_passes_has_next_to_no_negative_energy(x, seed, part):
    """In the scale of its diagonal, and by the eigenvalues, which nothing here computes."""
    dim = x.shape[1]
    generator = torch.Generator().manual_seed(seed)
    other = torch.randn(dim, dim, generator=generator, dtype=torch.float64)
    matrix = x.T @ x / len(x)
    matrix = matrix + part * (other + other.T) * float(matrix.diagonal().max())
    matrix.diagonal().abs_()
    rounding = ROUNDING["float16"]
    passes = is_semidefinite(Gram.from_dense(matrix), rounding)
    scale = matrix.diagonal().clamp(min=rounding * float(matrix.diagonal().max()))
    if not float(scale.min()) > 0:
        return
    slack = 4 * rounding * dim**0.5
    least = float(torch.linalg.eigvalsh(matrix / (scale.outer(scale)).sqrt())[0])
    if abs(least + slack) > 1e-4:  # of float32
        assert passes == (least > -slack)


@pytest.mark.parametrize("size", [1.0, 1e-20, 1e20])
def test_entries_that_the_diagonal_does_not_allow_do_not_pass(size):
    rounding = ROUNDING["float16"]
    pair = torch.tensor([[1.0, 2.0], [2.0, 1.0]], dtype=torch.float64) * size
    assert not is_semidefinite(Gram.from_dense(pair), rounding)
    apart = (2 * torch.eye(9, dtype=torch.float64) - 1) * size  # every two alone could be a Gram
    assert not is_semidefinite(Gram.from_dense(apart), rounding)
    hollow = torch.tensor([[0.0, 1.0], [1.0, 0.0]], dtype=torch.float64) * size
    assert not is_semidefinite(Gram.from_dense(hollow), rounding)
    beyond = FactorGram(torch.ones(1, 3) * size**0.5, torch.full((3,), 0.5) * size)
    assert not is_semidefinite(beyond, rounding)
    assert not is_semidefinite(FactorGram(torch.ones(1, 3), torch.zeros(3)), rounding)
    assert is_semidefinite(Gram.from_dense(torch.zeros(3, 3)), rounding)
    assert is_semidefinite(FactorGram(torch.zeros(1, 3), torch.zeros(3)), rounding)


def test_a_gram_that_claims_to_be_shrunk_has_a_diagonal_that_stands_out():
    x = torch.ones(4, 5, dtype=torch.float64)
    gram = Gram.from_dense(x.T @ x)
    assert is_semidefinite(gram, 1e-5)
    assert not is_semidefinite(gram, 1e-5, alpha=0.75)
    assert is_semidefinite(gram.shrink(0.75), 1e-5, alpha=0.75)


@pytest.mark.parametrize("wire", ROUNDING)
@pytest.mark.parametrize("mean", [0.0, 1.0, 10.0])
def test_wide_layers_pass_with_few_rows_and_a_large_mean(wire, mean):
    x = (torch.randn(30, 400, generator=torch.Generator().manual_seed(0)) + mean).relu()
    gram = Gram.from_dense(x.T @ x / 30)
    assert is_semidefinite(on_the_wire(gram, wire), ROUNDING[wire])
    again = on_the_wire(on_the_wire(gram, wire).shrink(0.75), wire)
    assert is_semidefinite(again, 2 * ROUNDING[wire], 0.75)


def test_the_attack_on_a_merge_is_real_and_refused():
    """One station of five takes the others' energy away, with a Gram no larger than theirs."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    inputs = [(normal(200, 60) * torch.logspace(0, -2, 60)).relu() for _ in range(4)]
    grams = [Gram.from_dense(x.T @ x / 200).shrink(0.75) for x in inputs]
    start = normal(10, 60)
    weights = [start + 0.1 * normal(10, 60) for _ in range(5)]
    hostile = -sum(gram.dense() for gram in grams)
    hostile.diagonal().zero_()
    honest, spread = regmean(weights[:4], grams), float((weights[0] - start).norm())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        merged = regmean(weights, [*grams, Gram.from_dense(hostile)])
    assert float((merged - honest).norm()) > 10 * spread
    hostile.diagonal().copy_(grams[0].diagonal())  # it may lie about its diagonal, too
    for gram in (hostile, hostile / 4):
        assert not is_semidefinite(Gram.from_dense(gram), ROUNDING["float16"])
