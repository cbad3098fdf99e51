"""The ridge of a layer's correction: its estimates are right, and it learns nothing by heart."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hfedatm_core.apart.fitting import RIDGES, RidgeSystem, correction
from hfedatm_core.grams.gram import FactorGram, Gram
from hfedatm_core.grams.grouped import GroupedGram

SEEDS = st.integers(0, 2**16)
Sums = tuple[Gram, Tensor, float]


def draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def sums(u: Tensor, r: Tensor, form: str = "packed") -> Sums:
    gram = {
        "packed": lambda: Gram.from_dense(u.T @ u / len(u), len(u)),
        "factor": lambda: FactorGram(u / len(u) ** 0.5, rows=len(u)),
        "grouped": lambda: GroupedGram((u.T @ u / len(u))[None], len(u)),
    }[form]()
    return gram, r.T @ u / len(u), float(r.square().sum()) / len(u)


def left(u: Tensor, r: Tensor, change: Tensor | None) -> float:
    rest = r if change is None else r - u @ change.T
    return float(rest.square().sum()) / len(u)


@pytest.mark.parametrize("form", ["packed", "factor"])
@settings(max_examples=20)
@given(seed=SEEDS, rows=st.integers(4, 60), ridge=st.sampled_from(RIDGES))
def test_the_estimate_is_that_of_cross_validation(
    form: str, seed: int, rows: int, ridge: float
) -> None:
    u, r = draw(seed, rows, 12), draw(seed + 1, rows, 3)
    gram, missing, error = sums(u, r, form)
    shift = ridge * float(gram.diagonal().mean())
    system = RidgeSystem(gram, missing)
    change = system.solve(shift)
    assert change is not None
    dense = u.T @ u / rows
    exact = torch.linalg.solve(dense + shift * torch.eye(12).double(), missing.T).T
    torch.testing.assert_close(change, exact, rtol=1e-6, atol=1e-8)
    used = float(torch.linalg.solve(dense + shift * torch.eye(12).double(), dense).trace())
    here, estimate = left(u, r, change), system.left(change, shift, error)
    # The estimate divides by the share of free rows, whose trace is drawn.
    free = (here / estimate) ** 0.5
    assert free == pytest.approx(1 - used / rows, abs=used**0.5 / rows)


@settings(max_examples=10, deadline=None)
@given(seed=SEEDS, rows=st.sampled_from([100, 400]), noise=st.sampled_from([0.1, 1.0, 3.0]))
def test_on_new_inputs_the_choice_is_nearly_the_best(seed: int, rows: int, noise: float) -> None:
    """Also with fewer examples than the layer has inputs, where no error is left on them."""
    truth = draw(seed, 5, 150) / 150**0.5
    u, new = draw(seed + 1, rows, 150), draw(seed + 2, 1000, 150)
    gram, missing, error = sums(u, u @ truth.T + noise * draw(seed + 3, rows, 5))
    wanted = new @ truth.T
    found = left(new, wanted, correction(gram, missing, error))
    ridges = [left(new, wanted, correction(gram, missing, error, ridge)) for ridge in RIDGES]
    assert found <= 1.5 * min([*ridges, left(new, wanted, None)])


def test_what_depends_on_no_input_is_not_learnt_by_heart() -> None:
    u, r, new = draw(0, 60, 80), draw(1, 60, 5), draw(2, 500, 80)
    gram, missing, error = sums(u, r)
    by_heart = correction(gram, missing, error, 1e-3)
    assert by_heart is not None and left(u, r, by_heart) < 0.1 * error
    nothing = torch.zeros(500, 5).double()
    assert left(new, nothing, by_heart) > 20 * left(new, nothing, correction(gram, missing, error))


@settings(max_examples=20)
@given(seed=SEEDS)
def test_what_the_inputs_explain_is_learnt(seed: int) -> None:
    truth, u = draw(seed, 3, 8), draw(seed + 1, 200, 8)
    gram, missing, error = sums(u, u @ truth.T)
    change = correction(gram, missing, error)
    assert change is not None
    torch.testing.assert_close(change, truth, rtol=0.01, atol=0.01)


@pytest.mark.parametrize("form", ["packed", "factor"])
def test_a_layer_that_misses_nothing_stays(form: str) -> None:
    u = draw(0, 20, 6)
    assert correction(*sums(u, torch.zeros(20, 2).double(), form)) is None


def test_a_convolution_in_groups_gets_the_least_ridge() -> None:
    u, r = draw(0, 20, 6), draw(1, 20, 2)
    found, least = (
        correction(*sums(u, r, "grouped")),
        correction(*sums(u, r, "grouped"), RIDGES[-1]),
    )
    assert found is not None and least is not None and torch.equal(found, least)


def test_sums_that_say_nothing_are_no_correction() -> None:
    u, r = draw(0, 20, 6), draw(1, 20, 2)
    gram, missing, error = sums(u, r)
    assert correction(gram * 0.0, missing, error) is None
    assert correction(gram, missing * float("nan"), error) is None
    assert correction(gram, missing, 0.0) is None  # an error that the residuals contradict
    alone = Gram.from_dense(gram.dense(), 1)  # one row cannot tell
    assert correction(alone, missing, error) is None


@settings(max_examples=10)
@given(seed=SEEDS)
def test_rounding_does_not_change_the_choice_much(seed: int) -> None:
    u, truth, new = draw(seed, 60, 80).relu(), draw(seed + 1, 5, 80), draw(seed + 2, 500, 80).relu()
    gram, missing, error = sums(u, u @ truth.T + draw(seed + 3, 60, 5))
    rounded = Gram.from_arrays(gram.to_arrays("float16"))
    one, other = (correction(g, missing, error) for g in (gram, rounded))
    assert left(new, new @ truth.T, other) <= 1.1 * left(new, new @ truth.T, one)
