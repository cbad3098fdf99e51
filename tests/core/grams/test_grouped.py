"""Grams of convolutions in groups: one matrix per group, and merged by RegMean like any other."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from hfedatm_core import collect_grams, pack_grams, unpack_grams
from hfedatm_core.grams.grouped import GroupedGram
from hfedatm_core.grams.layer_moments import covariance_product, layer_matrix, output_moments
from hfedatm_core.grams.sums import GramAccumulator
from hfedatm_core.regmean.closed_form import regmean


@pytest.mark.parametrize("groups", [1, 2, 6])
def test_moments_are_those_of_the_outputs(groups: int) -> None:
    torch.manual_seed(groups)
    conv = nn.Conv2d(6, 12, 3, stride=2, padding=1, groups=groups).double()
    x = torch.randn(9, 6, 8, 8, dtype=torch.float64)
    gram = collect_grams(conv, [(x[:4], None), (x[4:], None)], full=True)[""]
    assert isinstance(gram, GroupedGram) == (groups > 1)
    outputs = conv(x).detach().transpose(0, 1).flatten(1)
    state = {f".{name}": value for name, value in conv.state_dict().items()}
    mean, second = output_moments(layer_matrix(state, ""), gram)
    torch.testing.assert_close(mean, outputs.mean(1))
    torch.testing.assert_close(second, outputs.square().mean(1))
    weight = conv.weight.detach().flatten(1)
    variance = (covariance_product(weight, gram) * weight).sum(1)
    torch.testing.assert_close(variance, outputs.var(1, correction=0))


def test_a_layer_without_a_bias_has_the_constant_too() -> None:
    layer = nn.Linear(4, 3, bias=False)
    assert collect_grams(layer, [(torch.randn(9, 4), None)], full=True)[""].dim == 5
    assert collect_grams(layer, [(torch.randn(9, 4), None)], bias=True)[""].dim == 4


@given(st.integers(1, 5), st.integers(0, 99))
def test_regmean_solves_every_group_by_itself(groups: int, seed: int) -> None:
    torch.manual_seed(seed)
    weights = [torch.randn(2 * groups, 4, dtype=torch.float64) for _ in range(3)]
    rows = [torch.randn(groups, 20, 4, dtype=torch.float64) for _ in range(3)]
    blocks = [r.transpose(1, 2) @ r / 20 for r in rows]
    merged = regmean(weights, [GroupedGram(b, 20) for b in blocks], ridge=1e-12)
    for group in range(groups):
        part = slice(2 * group, 2 * group + 2)
        left = sum(b[group] for b in blocks)
        right = sum(w[part] @ b[group] for w, b in zip(weights, blocks, strict=True))
        torch.testing.assert_close(merged[part], torch.linalg.solve(left, right.T).T)


def test_the_forms_agree_on_shrinking_pooling_and_order() -> None:
    torch.manual_seed(0)
    rows = torch.randn(3, 12, 5)
    gram = GroupedGram(rows.transpose(1, 2) @ rows / 12, 12)
    assert torch.equal(gram.permute([2, 0, 1]).blocks, gram.blocks[[2, 0, 1]])
    torch.testing.assert_close((gram + gram).blocks, gram.blocks)
    shrunk = gram.shrink(0.5)
    torch.testing.assert_close(shrunk.diagonal(), gram.diagonal())
    torch.testing.assert_close(shrunk.blocks[1, 0, 1], gram.blocks[1, 0, 1] / 2)
    assert gram.leading(4).dim == 4
    total = GramAccumulator()
    total.add({"a": gram}, 1.0)
    total.add({"a": gram * 3.0}, 1.0)
    mean = total.result()["a"]
    assert isinstance(mean, GroupedGram)
    torch.testing.assert_close(mean.blocks, gram.blocks * 2)
    back = unpack_grams(pack_grams({"a": gram}))["a"]
    assert isinstance(back, GroupedGram) and torch.equal(back.blocks, gram.blocks)


@pytest.mark.parametrize("blocks", [torch.ones(3, 3), torch.ones(2, 3, 4), torch.ones(0, 2, 2)])
def test_what_is_no_gram_of_groups_is_refused(blocks: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="groups × d × d"):
        GroupedGram(blocks)
