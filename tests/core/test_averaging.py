"""Weighted means of states."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hfedatm_core import MeanAccumulator, weighted_mean


def state(seed: int, dtype=torch.float64) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "conv.weight": torch.randn(3, 2, 3, 3, generator=generator, dtype=torch.float64).to(dtype),
        "scalar": torch.randn((), generator=generator, dtype=torch.float64).to(dtype),
        "bn.num_batches_tracked": torch.tensor(seed),
    }


@settings(max_examples=40)
@given(st.lists(st.tuples(st.integers(0, 99), st.floats(0.01, 1e4)), min_size=1, max_size=8))
def test_equals_the_formula(items):
    states = [state(seed) for seed, _ in items]
    weights = [weight for _, weight in items]
    mean = weighted_mean(states, weights)
    for key in ("conv.weight", "scalar"):
        wanted = sum(w * s[key] for s, w in zip(states, weights, strict=True)) / sum(weights)
        torch.testing.assert_close(mean[key], wanted, rtol=1e-12, atol=1e-12)
    steps = sum(w * seed for seed, w in items) / sum(weights)
    assert abs(int(mean["bn.num_batches_tracked"]) - steps) <= 0.5 + 1e-6


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_types_are_kept_and_equal_states_are_returned_exactly(dtype):
    mean = weighted_mean([state(7, dtype)] * 5, [1, 10, 3, 0.1, 7])
    for key, value in state(7, dtype).items():
        assert mean[key].dtype == value.dtype
        assert torch.equal(mean[key], value)


def test_half_precision_is_accumulated_in_float32():
    # In float16 steps of 1e-3 around 60000 (spacing 32) would vanish one by one.
    states = [{"w": torch.full((1,), 60000.0, dtype=torch.float16)}] + [
        {"w": torch.full((1,), 59000.0, dtype=torch.float16)} for _ in range(999)
    ]
    wanted = torch.tensor([59001.0]).to(torch.float16)
    assert torch.equal(weighted_mean(states, [1.0] * 1000)["w"], wanted)


def test_inputs_are_not_changed_and_zero_weight_counts_nothing():
    a, b = state(1), state(2)
    before = {key: value.clone() for key, value in a.items()}
    mean = weighted_mean([b, a, b], [0, 2, 0])
    assert all(torch.equal(mean[key], value) for key, value in before.items())
    assert all(torch.equal(a[key], value) for key, value in before.items())
    mean["conv.weight"].zero_()
    assert torch.equal(a["conv.weight"], before["conv.weight"])


def test_errors_name_state_tensor_and_both_shapes():
    good = state(1)
    mean = MeanAccumulator()
    mean.add(good)
    with pytest.raises(
        ValueError, match=r"station-3.*'conv.weight'.*\(3, 2, 5, 5\).*\(3, 2, 3, 3\)"
    ):
        mean.add(good | {"conv.weight": torch.zeros(3, 2, 5, 5)}, name="station-3")
    with pytest.raises(ValueError, match=r"state 1: tensor 'scalar'.*NaN"):
        mean.add(good | {"scalar": torch.tensor(float("nan"))})
    with pytest.raises(ValueError, match=r"missing \['scalar'\]"):
        mean.add({key: value for key, value in good.items() if key != "scalar"})
    with pytest.raises(ValueError, match=r"unexpected \['more'\]"):
        mean.add(good | {"more": torch.zeros(1)})
    with pytest.raises(ValueError, match="state 0.*infinity"):
        MeanAccumulator().add({"w": torch.tensor([float("inf")])})
    with pytest.raises(ValueError, match="weight"):
        mean.add(good, -1.0)
    assert torch.equal(mean.result()["scalar"], good["scalar"])  # none of those counted


def test_nothing_to_average():
    with pytest.raises(ValueError, match="no state"):
        weighted_mean([], [])
    with pytest.raises(ValueError, match="zero"):
        weighted_mean([state(1)], [0.0])
    with pytest.raises(ValueError):
        weighted_mean([state(1)], [1.0, 2.0])


def test_large_finite_values_are_no_infinity():
    big = {"w": torch.full((4,), 3e38)}  # their float32 sum overflows
    assert torch.equal(weighted_mean([big, big], [1, 1])["w"], big["w"])
