"""Gram matrices: the two forms, their algebra, the wire form, means over clients."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hfedatm_core import (
    FactorGram,
    Gram,
    GramAccumulator,
    PackedGram,
    grams_nbytes,
    pack_grams,
    unpack_grams,
)
from hfedatm_core.grams.low_rank import FactorStack, compress
from hfedatm_core.grams.triangle import pack, unpack

seeds = st.integers(0, 10_000)
dims = st.integers(1, 9)
quick = settings(max_examples=30)


def rows_of(seed: int, n: int, d: int) -> torch.Tensor:
    return torch.randn(n, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def packed(x: torch.Tensor) -> PackedGram:
    return Gram.from_dense(x.T @ x / len(x), rows=len(x))


def factored(x: torch.Tensor, rank: int | None = None) -> FactorGram:
    return FactorGram(x / len(x) ** 0.5, rows=len(x), rank=rank)


FORMS = [packed, factored]


@quick
@given(seeds, st.integers(1, 300))
def test_packing_is_lossless(seed, d):
    x = rows_of(seed, 3, d)
    matrix = x.T @ x
    assert torch.equal(unpack(pack(matrix)), matrix.triu() + matrix.triu(1).T)
    assert pack(matrix).numel() == d * (d + 1) // 2


@pytest.mark.parametrize("make", FORMS)
@quick
@given(seed=seeds, d=dims, n=st.integers(1, 12), alpha=st.floats(0, 1))
def test_shrink_keeps_the_diagonal_and_scales_the_rest(make, seed, d, n, alpha):
    gram = make(rows_of(seed, n, d))
    matrix = gram.dense()
    wanted = alpha * matrix + (1 - alpha) * torch.diag(matrix.diagonal())
    torch.testing.assert_close(gram.shrink(alpha).dense(), wanted, rtol=0, atol=1e-12)
    torch.testing.assert_close(gram.diagonal(), matrix.diagonal())


@pytest.mark.parametrize("make", FORMS)
@quick
@given(seed=seeds, d=dims, n=st.integers(1, 12))
def test_permute_moves_rows_and_columns(make, seed, d, n):
    x = rows_of(seed, n, d)
    index = torch.randperm(d, generator=torch.Generator().manual_seed(seed))
    moved = make(x).permute(index).dense()
    torch.testing.assert_close(moved, make(x).dense()[index][:, index])
    torch.testing.assert_close(moved, make(x[:, index]).dense(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("make", FORMS)
def test_permute_moves_blocks_and_leaves_the_constant_feature(make):
    patches = rows_of(1, 20, 3 * 4)  # 3 channels of a 2×2 kernel
    index = torch.tensor([2, 0, 1])
    wanted = patches.reshape(20, 3, 4)[:, index].reshape(20, 12)
    torch.testing.assert_close(make(patches).permute(index).dense(), make(wanted).dense())
    one = torch.ones(20, 1, dtype=torch.float64)
    augmented = make(torch.cat([patches, one], 1)).permute(index)
    torch.testing.assert_close(augmented.dense(), make(torch.cat([wanted, one], 1)).dense())


@pytest.mark.parametrize("index", [[0, 0, 1], [0, 1, 3], [[0, 1, 2]], [], list(range(8))])
def test_permute_refuses_what_is_no_permutation(index):
    with pytest.raises(ValueError, match="permutation"):
        packed(rows_of(0, 4, 3)).permute(torch.tensor(index, dtype=torch.long))


@pytest.mark.parametrize("make", FORMS)
@quick
@given(seed=seeds, d=dims, n=st.integers(2, 20), cut=st.integers(1, 19))
def test_split_rows_add_up_to_the_whole(make, seed, d, n, cut):
    x = rows_of(seed, n, d)
    cut = min(cut, n - 1)
    whole = make(x[:cut], *([] if make is packed else [d])) + make(x[cut:])
    torch.testing.assert_close(whole.dense(), packed(x).dense(), rtol=0, atol=1e-10)
    assert whole.rows == n


@pytest.mark.parametrize("make", FORMS)
def test_scaling(make):
    gram = make(rows_of(0, 6, 4))
    torch.testing.assert_close((gram * 0.5).dense(), gram.dense() / 2)
    torch.testing.assert_close((3 * gram).dense(), gram.dense() * 3)
    assert (gram * 0.5).rows == gram.rows
    with pytest.raises(ValueError, match="≥ 0"):
        gram * -1.0


def test_the_diagonal_of_a_truncated_factor_is_exact():
    x = rows_of(3, 40, 10)
    low, lost = compress(x, 4)
    gram = FactorGram(low / 40**0.5, packed(x).diagonal(), rows=40)
    torch.testing.assert_close(gram.diagonal(), packed(x).diagonal())
    torch.testing.assert_close(gram.dense().diagonal(), packed(x).dense().diagonal())
    assert lost > 0.01
    left, out = rows_of(4, 2, 10), torch.zeros(2, 10, dtype=torch.float64)
    gram.add_product(out, left, 2.0)
    torch.testing.assert_close(out, 2 * left @ gram.dense())
    assert torch.linalg.eigvalsh(gram.dense()).min() > -1e-12


@quick
@given(seed=seeds, rank=st.integers(1, 5), parts=st.integers(1, 12))
def test_factor_stack_is_lossless_up_to_its_rank(seed, rank, parts):
    basis = rows_of(seed, rank, 11)
    stack = FactorStack(rank)
    total = torch.zeros(11, 11, dtype=torch.float64)
    for part in range(parts):
        x = rows_of(seed + part + 1, 3, rank) @ basis
        stack.push(x)
        total += x.T @ x
        assert len(stack) <= 2 * rank
    factor = stack.factor(rank)
    assert len(factor) <= rank
    scale = float(total.abs().max())
    torch.testing.assert_close(factor.T @ factor, total, rtol=0, atol=1e-12 * scale)


@pytest.mark.parametrize("make", FORMS)
@pytest.mark.parametrize(
    ("dtype", "error"), [(None, 0), ("float32", 1e-7), ("float16", 1e-3), ("bfloat16", 8e-3)]
)
@pytest.mark.parametrize("size", [1.0, 1e6, 1e-9])
def test_wire_form(make, dtype, error, size):
    gram = make(rows_of(5, 30, 7)) * size
    arrays = gram.to_arrays(dtype)
    assert all(isinstance(a, np.ndarray) and a.dtype != object for a in arrays.values())
    back = Gram.from_arrays(arrays)
    assert type(back) is type(gram) and back.rows == 30 and back.dim == 7
    limit = error * 3 * float(gram.dense().abs().max())
    assert float((back.dense() - gram.dense()).abs().max()) <= limit
    if dtype in ("float16", "bfloat16"):
        payload = next(iter(arrays.values()))
        assert payload.itemsize == 2


def test_float16_keeps_small_features_alive():
    scales = torch.tensor([1.0, 1e-4], dtype=torch.float64)  # diagonal 1 and 1e-8
    gram = packed(rows_of(5, 30, 2) * scales)
    back = Gram.from_arrays(gram.to_arrays("float16"))
    torch.testing.assert_close(back.diagonal().double(), gram.diagonal(), rtol=2e-3, atol=0)


def broken(**changes) -> dict[str, np.ndarray]:
    return packed(rows_of(0, 4, 3)).to_arrays() | changes


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        (broken(triangle=np.zeros(5)), "upper triangle"),
        (broken(triangle=np.zeros((2, 3))), "shape"),
        (broken(triangle=np.zeros(0)), "shape"),
        (broken(triangle=np.full(6, np.nan)), "not finite"),
        (broken(triangle=np.full(6, np.inf, dtype=np.float32)), "not finite"),
        (broken(triangle=np.zeros(6, dtype=np.int64)), "type int64"),
        (broken(triangle=np.array([object()] * 6)), "type object"),
        (broken(rows=np.array([0])), "rows"),
        (broken(rows=np.array([1.5])), "integer"),
        (broken(scale=np.array([0.0])), "positive"),
        (broken(scale=np.array([np.nan])), "positive"),
        (broken(extra=np.zeros(1)), "extra"),
        ({}, "rows"),
        (factored(rows_of(0, 4, 3)).to_arrays() | {"diagonal": np.ones(4)}, "diagonal of 3"),
        (factored(rows_of(0, 4, 3)).to_arrays() | {"factor": np.ones(3)}, "2-d"),
    ],
)
def test_malformed_arrays_are_refused(arrays, message):
    with pytest.raises(ValueError, match=message):
        Gram.from_arrays(arrays)


def test_shared_grams_travel_once():
    shared, own = packed(rows_of(1, 9, 4)), factored(rows_of(2, 3, 5))
    grams = {"block.q": shared, "block.k": shared, "out": own, "block.v": shared}
    arrays = pack_grams(grams)
    assert sum(key.endswith("/triangle") for key in arrays) == 1
    assert grams_nbytes(grams) == shared.nbytes + own.nbytes
    back = unpack_grams(arrays)
    assert set(back) == set(grams)
    assert back["block.q"] is back["block.k"] is back["block.v"]
    torch.testing.assert_close(back["out"].dense(), own.dense())


@pytest.mark.parametrize("table", [b"[[]]", b"{", b'[["a"],["a"]]', b'[["a"],["b"]]', b'["a"]'])
def test_a_broken_layer_table_is_refused(table):
    arrays = pack_grams({"a": packed(rows_of(1, 9, 4))})
    arrays["layers"] = np.frombuffer(table, dtype=np.uint8)
    with pytest.raises(ValueError, match="packed Grams"):
        unpack_grams(arrays)
    with pytest.raises(ValueError, match="'a'.*not finite"):
        good = pack_grams({"a": packed(rows_of(1, 9, 4))})
        unpack_grams(good | {"0/triangle": np.full(10, np.nan)})


@pytest.mark.parametrize("make", FORMS)
@quick
@given(
    seed=seeds, weights=st.lists(st.floats(0.1, 9), min_size=1, max_size=6), rows=st.integers(1, 9)
)
def test_accumulator_is_the_weighted_mean_over_clients(make, seed, weights, rows):
    clients = [rows_of(seed + i, rows + i, 4) for i in range(len(weights))]
    mean = GramAccumulator()
    for x, weight in zip(clients, weights, strict=True):
        gram = make(x) if make is packed else FactorGram(x / len(x) ** 0.5, rows=len(x), rank=60)
        mean.add({"a": gram, "b": gram}, weight)
    result = mean.result()
    wanted = sum(w * packed(x).dense() for w, x in zip(weights, clients, strict=True))
    torch.testing.assert_close(result["a"].dense(), wanted / sum(weights), rtol=0, atol=1e-10)
    assert result["a"] is result["b"]
    assert result["a"].rows == sum(map(len, clients))


def test_accumulator_compresses_factors_to_their_rank_with_exact_diagonal():
    clients = [rows_of(i, 8, 30) for i in range(10)]
    mean = GramAccumulator()
    for x in clients:
        mean.add({"wide": factored(x)})
    result = mean.result()["wide"]
    exact = torch.stack([packed(x).dense() for x in clients]).mean(0)
    assert isinstance(result, FactorGram) and len(result.factor) == 8
    torch.testing.assert_close(result.diagonal(), exact.diagonal())
    # No approximation of that rank is better than its truncated eigendecomposition.
    best = torch.linalg.eigvalsh(exact)[:-8].square().sum().sqrt()
    assert torch.linalg.norm(result.factor.T @ result.factor - exact) < 2 * best


def test_accumulator_parts_layers_that_stop_sharing_and_skips_missing_ones():
    x, y = packed(rows_of(1, 5, 3)), packed(rows_of(2, 5, 3))
    mean = GramAccumulator()
    mean.add({"a": x, "b": x})
    mean.add({"a": x, "b": y, "c": y})
    result = mean.result()
    torch.testing.assert_close(result["a"].dense(), x.dense())
    torch.testing.assert_close(result["b"].dense(), (x.dense() + y.dense()) / 2)
    torch.testing.assert_close(result["c"].dense(), y.dense())


def test_accumulator_names_the_layer_that_does_not_fit():
    mean = GramAccumulator()
    mean.add({"fc": packed(rows_of(1, 5, 3))})
    with pytest.raises(ValueError, match="'fc'.*different sizes"):
        mean.add({"fc": packed(rows_of(1, 5, 4))})
    with pytest.raises(ValueError, match="'fc'.*packed Gram with a factored"):
        mean.add({"fc": factored(rows_of(1, 5, 3))})
    with pytest.raises(ValueError, match="no Grams"):
        GramAccumulator().result()
