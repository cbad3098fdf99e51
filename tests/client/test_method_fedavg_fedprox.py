"""FedAvg and FedProx against computations by hand."""

import pytest
import torch
import torch.nn.functional as F
from helpers import SPEC, small_settings, tiny_batches, tiny_net

from client_app.methods.fedavg import FedAvg
from client_app.methods.fedprox import FedProx
from client_app.training import train_locally


def gradients(model, inputs, targets):
    loss = F.cross_entropy(model(inputs), targets)
    return torch.autograd.grad(loss, list(model.parameters()))


def test_fedavg_epoch_is_plain_gradient_descent():
    torch.manual_seed(0)
    model = tiny_net(SPEC)
    expected = [p.detach().clone() for p in model.parameters()]
    batches = tiny_batches(2)
    by_hand = tiny_net(SPEC)
    losses = []
    for inputs, targets in batches:
        for p, value in zip(by_hand.parameters(), expected, strict=True):
            p.data.copy_(value)
        losses.append(F.cross_entropy(by_hand(inputs), targets).item())
        steps = gradients(by_hand, inputs, targets)
        expected = [value - 0.1 * g for value, g in zip(expected, steps, strict=True)]

    settings = small_settings(lr=0.1, momentum=0.0)
    loss = train_locally(model, FedAvg(), batches, settings, lr=0.1)

    for p, value in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(p.detach(), value, rtol=1e-6, atol=1e-7)
    assert loss == pytest.approx(sum(losses) / 2, rel=1e-6)


def test_fedprox_gradient_is_that_of_cross_entropy_plus_the_pull():
    torch.manual_seed(0)
    model, mu = tiny_net(SPEC).double(), 0.7
    method = FedProx(mu=mu)
    method.begin(model, {}, {})
    anchor = [p.detach().clone() for p in model.parameters()]
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p))
    inputs, targets = tiny_batches(1)[0]
    inputs = inputs.double()

    found = torch.autograd.grad(method.loss(model, inputs, targets), list(model.parameters()))

    plain = gradients(model, inputs, targets)
    for g, ce, p, start in zip(found, plain, model.parameters(), anchor, strict=True):
        torch.testing.assert_close(g, ce + mu * (p.detach() - start), rtol=1e-10, atol=1e-12)


def test_fedprox_anchor_is_the_received_model_and_does_not_move():
    model = tiny_net(SPEC)
    method = FedProx(mu=1.0)
    method.begin(model, {}, {})
    inputs, targets = tiny_batches(1)[0]
    at_anchor = float(method.loss(model, inputs, targets))
    assert at_anchor == pytest.approx(float(F.cross_entropy(model(inputs), targets)))
    with torch.no_grad():
        next(model.parameters()).add_(1.0)
    moved = method.loss(model, inputs, targets) - F.cross_entropy(model(inputs), targets)
    count = next(model.parameters()).numel()
    assert float(moved) == pytest.approx(0.5 * count, rel=1e-5)


def test_fedprox_refuses_a_negative_strength():
    with pytest.raises(ValueError, match="mu must be at least 0, got -1"):
        FedProx(mu=-1)
