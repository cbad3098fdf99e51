"""Statistics of a merged model's BatchNorms: exact, poolable, and right for deep networks."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from hfedatm_core.averaging import weighted_mean
from hfedatm_core.norm_statistics import norm_moments, unchanged_moments, with_moments


def network(seed: int = 0) -> nn.Module:
    """Return a network of three BatchNorms whose running statistics are far from right."""
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Conv2d(4, 5, 3),
        nn.BatchNorm2d(5),
        nn.ReLU(),
        nn.Flatten(),
        nn.Dropout(0.5),
        nn.Linear(5 * 4 * 4, 6),
        nn.BatchNorm1d(6),
    ).double()
    for module in model:
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            nn.init.normal_(module.running_mean, 3.0)
            nn.init.uniform_(module.running_var, 4.0, 9.0)
            nn.init.uniform_(module.weight, 0.5, 2.0)
    return model


def images(count: int, seed: int = 1, shift: float = 0.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, 1, 8, 8, generator=generator, dtype=torch.float64) + shift


def corrected(model: nn.Module, moments: dict[str, torch.Tensor]) -> nn.Module:
    model = copy.deepcopy(model)
    state = model.state_dict()
    model.load_state_dict({**state, **with_moments(state, moments)})
    return model


def test_on_one_client_every_layer_gets_the_statistics_that_training_would_use():
    model, data = network(), images(50)
    moments, examples = norm_moments(model, [(data, None)])
    assert examples == 50 and set(moments) == {"1", "4", "9"}
    mended = corrected(model, moments)
    model.eval()
    for module in model:  # dropout off, every BatchNorm by its batch: a direct recomputation
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.train()
    torch.testing.assert_close(mended.eval()(data), model(data), rtol=1e-10, atol=1e-10)


@given(st.lists(st.integers(2, 9), min_size=1, max_size=4), st.integers(0, 99))
def test_pooled_moments_of_the_first_layer_are_those_of_the_united_examples(sizes, seed):
    model = network()
    parts = [images(n, seed + i, shift=float(i)) for i, n in enumerate(sizes)]
    found = [norm_moments(model, [(part, None)]) for part in parts]
    pooled = weighted_mean([moments for moments, _ in found], [n for _, n in found])
    mended = corrected(model, pooled)
    outputs = model[0](torch.cat(parts)).transpose(0, 1).flatten(1)
    torch.testing.assert_close(mended[1].running_mean, outputs.mean(1), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(
        mended[1].running_var, outputs.var(1, correction=0), rtol=1e-9, atol=1e-10
    )


def test_the_sums_over_batches_are_those_of_the_whole():
    model, data = network(), images(40)
    moments, examples = norm_moments(model, [(part, None) for part in data.split(13)])
    assert examples == 39  # the last batch has one example
    whole, _ = norm_moments(model, [(data[:39], None)])
    torch.testing.assert_close(moments["1"], whole["1"], rtol=1e-12, atol=1e-12)


def test_nothing_about_the_model_changes():
    model, data = network().train(), images(20)
    before = copy.deepcopy(model.state_dict())
    norm_moments(model, [(data, None)])
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(module.training for module in model.modules())
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_right_statistics_stay_as_they_are():
    model, data = network(), images(30)
    mended = corrected(model, norm_moments(model, [(data, None)])[0])
    again, _ = norm_moments(mended, [(data, None)])
    for name, like in unchanged_moments(again).items():
        torch.testing.assert_close(again[name], like, rtol=0, atol=1e-3)
    twice = corrected(mended, again)
    torch.testing.assert_close(twice.eval()(data), mended.eval()(data), rtol=1e-9, atol=1e-9)


def test_a_dead_channel_gets_no_negative_variance():
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    nn.init.zeros_(model[0].weight)
    mended = corrected(model, norm_moments(model, [(torch.randn(9, 3), None)])[0])
    assert (mended[1].running_var >= 0).all() and mended(torch.randn(4, 3)).isfinite().all()


def test_layers_without_statistics_or_without_a_call_are_left_out():
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
            self.untracked = nn.BatchNorm1d(3, track_running_stats=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.untracked(self.used(x))

    assert set(norm_moments(Net(), [(torch.randn(4, 3), None)])[0]) == {"used"}


def test_one_example_has_no_variance():
    with pytest.raises(ValueError, match="two examples"):
        norm_moments(network(), [(images(1), None)])
