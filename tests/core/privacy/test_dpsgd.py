"""DP-SGD: models that cannot be private are named, steps are clipped and noised as stated."""

import pytest
import torch
from torch import nn

from hfedatm_core.privacy.dpsgd import (
    UnsupportedLayerError,
    check_opacus_model,
    fix_model,
    make_private,
    poisson_batches,
)
from hfedatm_core.privacy.noise import NoiseSource

pytestmark = pytest.mark.filterwarnings("ignore:Full backward hook is firing")


def with_batch_norm() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten())


def step(model, optimizer, inputs, targets):
    optimizer.zero_grad()
    nn.functional.mse_loss(model(inputs), targets).backward()
    optimizer.step()


def test_a_bad_layer_is_named_with_the_fix():
    model = nn.ModuleDict({"features": with_batch_norm(), "head": nn.Linear(4, 2)})
    with pytest.raises(UnsupportedLayerError, match=r"features\.1 \(BatchNorm2d\): fix-model=true"):
        check_opacus_model(model)
    check_opacus_model(nn.Sequential(nn.Conv2d(1, 2, 3), nn.GroupNorm(1, 2), nn.Linear(4, 2)))


def test_evaluation_mode_is_no_complaint():
    check_opacus_model(nn.Linear(2, 2).eval())


def test_the_fix_is_the_same_on_every_tier():
    torch.manual_seed(0)
    model = with_batch_norm().eval()
    first, second = fix_model(model), (torch.rand(5), fix_model(model))[1]
    assert isinstance(model[1], nn.BatchNorm2d)
    assert isinstance(first[1], nn.GroupNorm)
    assert not first.training
    assert list(first.state_dict()) == list(second.state_dict())
    for name, value in first.state_dict().items():
        assert torch.equal(value, second.state_dict()[name])
    assert torch.equal(first[0].weight, model[0].weight)


def test_gradients_are_clipped_and_noised():
    torch.manual_seed(0)
    sigma, clip, batch = 2.0, 0.5, 4
    model = nn.Linear(100, 50)
    start = {name: value.clone() for name, value in model.state_dict().items()}
    inputs, targets = torch.randn(batch, 100) * 100, torch.randn(batch, 50)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    private, optimizer = make_private(
        model, optimizer, sigma=sigma, clip=clip, expected_batch_size=batch, source=NoiseSource(0)
    )
    step(private, optimizer, inputs, targets)
    update = torch.cat([(start[n] - v).flatten() for n, v in model.state_dict().items()]) * batch
    # at most batch * clip of signal, the rest is noise of sigma * clip per parameter
    expected = sigma * clip * update.numel() ** 0.5
    assert float(update.norm()) == pytest.approx(expected, abs=batch * clip + 0.05 * expected)


def test_without_noise_one_example_moves_the_sum_by_at_most_the_clip():
    torch.manual_seed(0)
    clip, updates = 0.3, []
    inputs, targets = torch.randn(5, 8) * 10, torch.randn(5, 3)
    for keep in (slice(0, 5), slice(1, 5)):
        torch.manual_seed(1)
        model = nn.Linear(8, 3)
        before = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        private, optimizer = make_private(
            model, optimizer, sigma=0.0, clip=clip, expected_batch_size=1, source=NoiseSource()
        )
        step(private, optimizer, inputs[keep], targets[keep])
        updates.append(before - nn.utils.parameters_to_vector(model.parameters()).detach())
    distance = float((updates[0] - updates[1]).norm())
    assert 0.9 * clip < distance <= clip * 1.0001


def test_an_empty_batch_is_a_step_of_pure_noise():
    model = nn.Linear(8, 3)
    before = model.weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    private, optimizer = make_private(
        model, optimizer, sigma=1.0, clip=1.0, expected_batch_size=2, source=NoiseSource(1)
    )
    step(private, optimizer, torch.empty(0, 8), torch.empty(0, 3))
    moved = model.weight.detach() - before
    assert torch.isfinite(moved).all()
    assert float(moved.std()) == pytest.approx(0.5, rel=0.5)


def test_noise_does_not_follow_the_seed_of_the_run():
    weights = []
    for _ in range(2):
        torch.manual_seed(0)
        model = nn.Linear(8, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        private, optimizer = make_private(
            model, optimizer, sigma=1.0, clip=1.0, expected_batch_size=2, source=NoiseSource()
        )
        step(private, optimizer, torch.ones(2, 8), torch.ones(2, 3))
        weights.append(model.weight.detach().clone())
    assert not torch.equal(*weights)


def test_poisson_batches():
    batches = list(poisson_batches(200, 0.1, 500, NoiseSource(2)))
    sizes = torch.tensor([len(batch) for batch in batches], dtype=torch.float64)
    assert float(sizes.mean()) == pytest.approx(20, abs=5 * (18 / 500) ** 0.5)
    assert float(sizes.var()) == pytest.approx(18, rel=0.35)
    counts = torch.bincount(torch.cat(batches), minlength=200)
    assert counts.min() > 15
    assert all(len(batch) == 7 for batch in poisson_batches(7, 1.0, 3, NoiseSource()))
    with pytest.raises(ValueError, match="sample rate"):
        next(poisson_batches(5, 0.0, 1, NoiseSource()))
