"""RegMean and refining solve for weights and biases together, and survive what has no solution."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from hfedatm_core import (
    Answers,
    ChannelGraph,
    Gram,
    OwnedNetwork,
    Update,
    collect_answers,
    collect_grams,
    fit_layers,
    merge,
    merge_apart,
    refine,
)

State = dict[str, Tensor]
SEEDS = st.integers(0, 2**16)


def linear(seed: int, bias: bool = True) -> tuple[nn.Module, ChannelGraph]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 2, bias=bias)).double()
    return model, ChannelGraph.trace(model, (torch.zeros(1, 3, dtype=torch.float64),))


def outputs(state: State, x: Tensor) -> Tensor:
    return nn.functional.linear(x, state["0.weight"], state.get("0.bias"))


@pytest.mark.parametrize("how", ["merge", "merge_apart"])
@pytest.mark.parametrize("bias", [True, False])
@settings(max_examples=10)
@given(seed=SEEDS)
def test_the_merged_layer_is_the_least_squares_solution(how: str, bias: bool, seed: int) -> None:
    """Inputs have means of their own, so that the best bias is not the mean of the biases."""
    updates, inputs, wanted = [], [], []
    for number in range(2):
        model, graph = linear(seed + number, bias)
        x = torch.randn(20, 3, dtype=torch.float64) + 3 * torch.randn(3).double()
        state = {name: value.clone() for name, value in model.state_dict().items()}
        grams = collect_grams(model, [(x, None)], bias=True, full=how == "merge_apart")
        updates.append(Update(state, grams))
        inputs.append(x)
        wanted.append(outputs(state, x))
    if how == "merge":
        merged = merge(updates, graph, ridge=1e-13).state
    else:
        merged = merge_apart(updates, graph, alpha=1.0, ridge=1e-13).state
    x, y = torch.cat(inputs), torch.cat(wanted)
    u = torch.cat([x, x.new_ones(len(x), 1)], 1) if bias else x
    best = u @ torch.linalg.lstsq(u, y, driver="gelsd").solution
    torch.testing.assert_close(outputs(merged, x), best, rtol=1e-6, atol=1e-6)


def spoiled(answers: Answers, part: str, value: float) -> Answers:
    """Return the answers with one number of one part replaced."""
    parts = {name: dict(getattr(answers, name)) for name in ("grams", "residuals", "moments")}
    if part == "grams":
        dense = parts[part]["0"].dense()
        dense[0, 1] = dense[1, 0] = value
        parts[part]["0"] = Gram.from_dense(dense, 9)
    else:
        parts[part]["0"] = parts[part]["0"].clone()
        parts[part]["0"][0, 0] = value
    return Answers(**parts)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("part", ["grams", "residuals", "moments"])
def test_a_layer_with_answers_that_are_not_finite_stays(part: str, value: float) -> None:
    (merged, graph), (own, _) = linear(0), linear(1)
    x = torch.randn(9, 3, dtype=torch.float64)
    good = collect_answers(merged, own, graph, [(x, None)])
    state = merged.state_dict()
    assert not torch.equal(fit_layers(state, graph, [good])["0.weight"], state["0.weight"])
    found = fit_layers(state, graph, [good, spoiled(good, part, value)])
    assert all(torch.equal(found[name], state[name]) for name in state)


def test_a_layer_whose_inputs_are_all_zero_stays() -> None:
    (merged, graph), (own, _) = linear(0, bias=False), linear(1, bias=False)
    x = torch.zeros(9, 3, dtype=torch.float64)
    found = fit_layers(
        merged.state_dict(), graph, [collect_answers(merged, own, graph, [(x, None)])]
    )
    assert torch.equal(found["0.weight"], merged.state_dict()["0.weight"])


def test_refining_needs_data() -> None:
    model, graph = linear(0)
    x = torch.randn(9, 3, dtype=torch.float64)
    state = model.state_dict()
    grams = collect_grams(model, [(x, None)], full=True)
    merged = merge_apart([Update(state, grams, name=name) for name in "ab"], graph)
    some, none = OwnedNetwork(state, [(x, None)]), OwnedNetwork(state, [])
    for parts in ({"a": none, "b": some}, {"a": some, "b": none}):
        with pytest.raises(ValueError, match="no data"):
            refine(merged, model, parts)
