"""FedSR against its formula, and where its class table lives."""

import copy
import shutil

import pytest
import torch
import torch.nn.functional as F
from helpers import SPEC, ask_client, small_settings, tiny_batches, tiny_data, tiny_net
from torch.distributions import Independent, Normal, kl_divergence

from client_app.methods.fedsr import FedSR, GaussianHead, gaussian_kl
from hfedatm.base.building import build_method, build_model
from hfedatm.base.memory import NodeMemory
from hfedatm.base.records import record_to_state
from hfedatm_core import ChannelGraph


def fedsr(**params):
    torch.manual_seed(1)
    method = FedSR(**params)
    model = method.adapt(tiny_net(SPEC))
    generator = torch.Generator().manual_seed(2)
    memory = {
        "mean": torch.randn(3, 16, generator=generator),
        "scale": torch.randn(3, 16, generator=generator),
    }
    method.begin(model, {}, memory)
    return method, model, memory


def test_kl_agrees_with_torch():
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(5, 7, generator=generator).double() for _ in range(2))
    s, t = (torch.rand(5, 7, generator=generator).double() + 0.1 for _ in range(2))
    expected = kl_divergence(Independent(Normal(a, s), 1), Independent(Normal(b, t), 1))
    torch.testing.assert_close(gaussian_kl(a, s, b, t), expected)


def test_loss_is_the_formula_with_the_noise_that_was_drawn():
    method, model, memory = fedsr(l2r=0.3, cmi=0.2)
    model.train()
    inputs, targets = tiny_batches(1)[0]
    torch.manual_seed(5)
    loss = method.loss(model, inputs, targets)

    features = model[:-1](inputs)
    head = model[-1]
    mu, sigma = head.mean(features), F.softplus(head.scale(features))
    torch.manual_seed(5)
    z = mu + sigma * torch.randn(8, 16)
    towards = Normal(memory["mean"][targets], F.softplus(memory["scale"][targets]))
    expected = (
        F.cross_entropy(head.classifier(z), targets)
        + 0.3 * z.square().sum(1).sqrt().mean()
        + 0.2 * kl_divergence(Normal(mu, sigma), towards).sum(1).mean()
    )
    torch.testing.assert_close(loss, expected)


def test_class_table_is_trained_with_the_model():
    method, model, memory = fedsr(cmi=1.0)
    inputs, targets = tiny_batches(1)[0]
    targets[:] = 1
    method.loss(model.train(), inputs, targets).backward()
    mean, scale = method.parameters()
    for table in (mean, scale):
        assert table.grad[1].abs().sum() > 0
        assert table.grad[[0, 2]].abs().sum() == 0, "only the rows of classes in the batch move"


def test_evaluation_uses_the_mean_or_averages_softmax_over_draws():
    torch.manual_seed(0)
    head = GaussianHead(torch.nn.Linear(6, 3), samples=0).eval()
    features = torch.randn(4, 6)
    torch.testing.assert_close(head(features), head.classifier(head.mean(features)))

    head.samples = 3
    torch.manual_seed(9)
    found = head(features)
    torch.manual_seed(9)
    mu, sigma = head.mean(features), F.softplus(head.scale(features))
    draws = [head.classifier(mu + sigma * torch.randn(4, 6)).softmax(1) for _ in range(3)]
    torch.testing.assert_close(found.exp(), sum(draws) / 3)


def test_table_never_leaves_the_client_and_survives_to_its_next_round():
    settings = small_settings(client_method="fedsr")
    model = build_model(settings, tiny_data().spec, build_method(settings)).state_dict()
    first = ask_client(settings, 0, model)
    sent = first.array_records["model"]
    assert set(sent) == set(model), "the reply holds the model's tensors and no other"
    assert set(first.array_records) == {"model"}

    kept = NodeMemory("run", "client-0").load(before=(1, 2))
    assert set(kept) == {"mean", "scale"}
    assert kept["mean"].shape == (3, 16)
    assert kept["mean"].abs().sum() > 0, "it has been trained"

    # The second round continues from the table: without it the result is another.
    with_memory = record_to_state(
        ask_client(settings, 0, model, station_round=2).array_records["model"]
    )
    shutil.rmtree(NodeMemory("run", "client-0").folder)
    without = record_to_state(
        ask_client(settings, 0, model, station_round=2).array_records["model"]
    )
    assert any(not torch.equal(with_memory[name], without[name]) for name in model)


def test_doing_a_round_again_starts_from_the_same_table():
    settings = small_settings(client_method="fedsr")
    model = build_model(settings, tiny_data().spec, build_method(settings)).state_dict()
    ask_client(settings, 0, model)
    once = record_to_state(ask_client(settings, 0, model, station_round=2).array_records["model"])
    again = record_to_state(ask_client(settings, 0, model, station_round=2).array_records["model"])
    for name in model:
        assert torch.equal(once[name], again[name]), name


def test_clients_do_not_share_a_table():
    settings = small_settings(client_method="fedsr")
    model = build_model(settings, tiny_data().spec, build_method(settings)).state_dict()
    ask_client(settings, 0, model)
    assert NodeMemory("run", "client-1").load(before=(9, 9)) == {}


@pytest.mark.parametrize("training", [True, False])
def test_adapted_model_has_the_shape_of_the_original(training):
    method = FedSR()
    model = method.adapt(copy.deepcopy(tiny_net(SPEC))).train(training)
    assert model(torch.randn(5, *SPEC.input_shape)).shape == (5, 3)


def test_reordered_channels_keep_what_is_trained():
    """Draws run only in training, and the class table is in the order of the representation."""
    method, model, _ = fedsr(l2r=0.3, cmi=0.2)
    model.double()
    graph = ChannelGraph.trace(model, SPEC.example().double())
    assert graph.groups
    orders = {group.name: torch.arange(group.size).flip(0) for group in graph.groups}
    reordered = graph.permute(copy.deepcopy(model.state_dict()), orders)
    inputs, targets = tiny_batches(1)[0]
    losses = []
    for state in (copy.deepcopy(model.state_dict()), reordered):
        model.train().load_state_dict(state)
        torch.manual_seed(5)
        losses.append(method.loss(model, inputs.double(), targets))
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-10, atol=1e-10)
