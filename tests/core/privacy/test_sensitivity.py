"""No pair of neighbouring data sets is ever further apart than the sensitivity says."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from hfedatm_core import collect_grams
from hfedatm_core.privacy.clipping import clip_frobenius, clip_spectral
from hfedatm_core.privacy.mechanisms import find_mechanism

DIM = 5
numbers = st.floats(-1e3, 1e3, width=32)
# one example: a few rows (tokens) of features
examples = hnp.arrays(
    np.float64, st.tuples(st.integers(1, 4), st.just(3), st.just(DIM)), elements=numbers
)
bounds = st.floats(1e-2, 1e2)
SLACK = 1 + 1e-9


def sensitivity(mechanism: str, bound: float, dim: int, rank=None, adjacency="zero-out") -> float:
    options = {"rank": rank} if rank else {}
    return find_mechanism(mechanism)(bound, **options).sensitivity(dim, adjacency)


def summed(rows: torch.Tensor) -> torch.Tensor:
    flat = rows.reshape(-1, DIM)
    return flat.T @ flat


def clipped_sum(examples: torch.Tensor, c: float) -> torch.Tensor:
    """Sum of x x^T over all rows as a client collects it: from a layer that sees them."""
    layer = torch.nn.Sequential(torch.nn.Linear(examples.shape[-1], 1).double())
    gram = collect_grams(layer, [(examples, None)], clip=c)["0"]
    return gram.dense() * gram.rows


def triangle_distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(torch.triu(a - b)))


@given(examples, examples, bounds)
@settings(max_examples=150)
def test_example_level(data, other, c):
    rows = torch.from_numpy(data)
    bound = sensitivity("example", c, DIM)
    assert bound == c**2
    whole = clipped_sum(rows, c)
    rest = clipped_sum(rows[1:], c) if len(rows) > 1 else torch.zeros_like(whole)
    distance = float(torch.linalg.matrix_norm(whole - rest))
    assert triangle_distance(whole, rest) <= distance <= bound * SLACK
    replaced = clipped_sum(torch.cat([torch.from_numpy(other[:1]), rows[1:]]), c)
    distance = float(torch.linalg.matrix_norm(whole - replaced))
    assert distance <= sensitivity("example", c, DIM, adjacency="replace") * SLACK


@given(examples, examples, bounds)
@settings(max_examples=150)
def test_client_level(data, other, bound):
    left, right = (clip_frobenius(summed(torch.from_numpy(x)), bound) for x in (data, other))
    assert float(torch.linalg.matrix_norm(left)) <= sensitivity("client", bound, DIM) * SLACK
    distance = float(torch.linalg.matrix_norm(left - right))
    assert distance <= sensitivity("client", bound, DIM, adjacency="replace") * SLACK


@given(examples, examples, bounds, st.sampled_from([None, 1, 2]))
@settings(max_examples=150)
def test_spectral_clip_needs_the_root_of_the_rank(data, other, bound, rank):
    left, right = (clip_spectral(summed(torch.from_numpy(x)), bound, rank) for x in (data, other))
    assert float(torch.linalg.matrix_norm(left, 2)) <= bound * SLACK
    single = sensitivity("paper", bound, DIM, rank=rank)
    assert float(torch.linalg.matrix_norm(left)) <= single * SLACK
    distance = float(torch.linalg.matrix_norm(left - right))
    assert distance <= sensitivity("paper", bound, DIM, rank=rank, adjacency="replace") * SLACK


def test_the_bounds_are_reached():
    c = 3.0
    x = torch.tensor([[10.0, 0.0]], dtype=torch.float64)
    a, b = clipped_sum(x, c), clipped_sum(x.flip(1), c)
    assert float(torch.linalg.matrix_norm(a)) == pytest.approx(sensitivity("example", c, 2))
    apart = float(torch.linalg.matrix_norm(a - b))
    assert apart == pytest.approx(sensitivity("example", c, 2, adjacency="replace"))
    # a multiple of the identity has the Frobenius norm that a spectral clip alone does not see
    full = clip_spectral(100 * torch.eye(4, dtype=torch.float64), c)
    assert float(torch.linalg.matrix_norm(full)) == pytest.approx(sensitivity("paper", c, 4))
    assert sensitivity("paper", c, 4) == 2 * c


@given(examples, bounds)
@settings(max_examples=50)
def test_clipping_leaves_small_grams_alone_and_keeps_directions(data, bound):
    gram = summed(torch.from_numpy(data))
    norm = float(torch.linalg.matrix_norm(gram))
    clipped = clip_frobenius(gram, bound)
    if norm <= bound * (1 - 1e-12):
        assert torch.equal(clipped, gram)
    else:
        assert torch.allclose(clipped * norm, gram * bound, rtol=1e-9)


def test_bad_values_are_refused():
    with pytest.raises(ValueError, match="NaN or infinite"):
        clip_frobenius(torch.tensor([[float("nan")]]), 1.0)
    with pytest.raises(ValueError, match="positive number"):
        clip_frobenius(torch.eye(2), 0.0)
    with pytest.raises(ValueError, match="unknown mechanism 'nothing'"):
        sensitivity("nothing", 1.0, 3)
    assert sensitivity("none", 1.0, 3) == float("inf")
