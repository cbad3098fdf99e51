"""FedIIR: the shared gradient, its way up the tree, the penalty and its gradient."""

import pytest
import torch
import torch.nn.functional as F
from flwr.app import ConfigRecord
from helpers import (
    SPEC,
    ask_client,
    failures_of,
    last_model,
    run_small,
    small_settings,
    tiny_batches,
    tiny_data,
    tiny_net,
)

from client_app.data import client_data
from client_app.methods.fediir import FedIIR
from hfedatm.base.building import build_method, build_model
from hfedatm.base.records import record_to_state, state_to_record
from hfedatm.runtime.local import local_stations
from hfedatm_core import ChannelGraph
from hfedatm_core.data import batches
from server_app.rules.avg import Avg
from server_app.strategy import HFedATMStrategy

HEAD = ("6.weight", "6.bias")


def mean_gradient(model, inputs, targets):
    """Return the classifier's gradient of the mean cross-entropy over all examples at once."""
    head = [model.get_parameter(name) for name in HEAD]
    return dict(
        zip(HEAD, torch.autograd.grad(F.cross_entropy(model(inputs), targets), head), strict=True)
    )


def all_examples(settings, clients):
    parts = [client_data(settings, client, {}) for client in clients]
    loaded = [next(batches(p.train, p.spec, len(p.train))) for p in parts]
    return torch.cat([x for x, _ in loaded]), torch.cat([y for _, y in loaded])


def test_a_client_shares_the_gradient_of_its_mean_loss():
    settings = small_settings(client_method="fediir", batch_size=7)
    model = build_model(settings, SPEC, build_method(settings))
    reply = ask_client(settings, 2, model.state_dict(), "train.prepare")
    inputs, targets = all_examples(settings, [2])
    assert reply.metric_records["metrics"]["num-examples"] == len(targets)
    shared = record_to_state(reply.array_records["shared"])
    for name, expected in mean_gradient(model.eval(), inputs, targets).items():
        torch.testing.assert_close(shared[name], expected, rtol=1e-4, atol=1e-6)


def test_averaged_up_both_tiers_it_is_the_mean_over_all_examples():
    # 2 + 2 clients of unequal size: a mean of means would be wrong.
    settings = small_settings(
        client_method="fediir", server_rule="avg", **{"lambda": 0.3}, dataset_params="examples=157"
    )
    method = build_method(settings)
    data = tiny_data(examples=157)
    model = build_model(settings, data.spec, method)
    sizes = [len(client_data(settings, c, {}).train) for c in range(4)]
    assert len(set(sizes)) > 1
    template = {name: torch.zeros_like(model.get_parameter(name)) for name in HEAD}
    graph = ChannelGraph.trace(model, (data.spec.example(),))
    strategy = HFedATMStrategy(settings, Avg(), method, graph, {}, template)
    arrays = state_to_record(model.state_dict())
    strategy.configure_train(1, arrays, ConfigRecord(), local_stations(settings))

    inputs, targets = all_examples(settings, range(4))
    for name, expected in mean_gradient(model.eval(), inputs, targets).items():
        torch.testing.assert_close(strategy.memory.shared[name], expected, rtol=1e-4, atol=1e-6)


def test_moving_average_starts_from_the_first_and_then_smooths():
    method = FedIIR(ema=0.9)
    one, two = {"w": torch.tensor([1.0])}, {"w": torch.tensor([11.0])}
    assert method.blend({}, one)["w"].item() == 1.0
    assert method.blend(one, two)["w"].item() == pytest.approx(0.9 * 1 + 0.1 * 11)


def prepared(gamma):
    torch.manual_seed(0)
    model = tiny_net(SPEC, width=5).double()
    method = FedIIR(gamma=gamma)
    generator = torch.Generator().manual_seed(1)
    average = {
        name: torch.randn(model.get_parameter(name).shape, generator=generator).double()
        for name in HEAD
    }
    method.begin(model, average, {})
    inputs, targets = tiny_batches(1)[0]
    return method, model, average, inputs.double(), targets


def test_penalty_is_the_squared_distance_of_the_classifier_gradients():
    method, model, average, inputs, targets = prepared(gamma=0.5)
    own = mean_gradient(model, inputs, targets)
    distance = sum((own[name] - average[name]).square().sum() for name in HEAD)
    expected = F.cross_entropy(model(inputs), targets) + 0.5 * distance
    torch.testing.assert_close(method.loss(model, inputs, targets), expected)


def test_gradient_goes_through_the_penalty():
    """Against central differences in double precision, for every tensor of the network."""
    method, model, _, inputs, targets = prepared(gamma=2.0)
    parameters = list(model.parameters())
    found = torch.autograd.grad(method.loss(model, inputs, targets), parameters)
    generator = torch.Generator().manual_seed(3)
    for parameter, gradient in zip(parameters, found, strict=True):
        direction = torch.randn(parameter.shape, generator=generator).double()
        direction /= direction.norm()
        start, step, values = parameter.detach().clone(), 1e-5, []
        for sign in (1, -1):
            parameter.data = start + sign * step * direction
            values.append(float(method.loss(model, inputs, targets)))
        parameter.data = start
        slope = (values[0] - values[1]) / (2 * step)
        assert float((gradient * direction).sum()) == pytest.approx(slope, rel=1e-5, abs=1e-8)


def test_level_decides_who_averages_and_is_checked():
    assert FedIIR().sharing == "global"
    assert FedIIR(level="station").sharing == "station"
    with pytest.raises(ValueError, match="'global' or 'station', got 'town'"):
        FedIIR(level="town")


@pytest.mark.parametrize("level", ["global", "station"])
def test_both_levels_run_and_differ_from_fedavg(tmp_path, level):
    plain = run_small(tmp_path, "plain", rounds=1, server_rule="avg")
    iir = run_small(
        tmp_path, "iir", rounds=1, server_rule="avg", client_method="fediir",
        client_params=f"gamma=5,level={level}",
    )  # fmt: skip
    assert failures_of(iir) == []
    one, other = last_model(plain), last_model(iir)
    assert any(not torch.equal(one[name], other[name]) for name in one)
