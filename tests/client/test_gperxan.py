"""gPerXAN: mixed normalisation, guidance by the received classifier."""

import pytest
import torch
import torch.nn.functional as F
from helpers import SPEC, lines_of, run_small, small_settings, tiny_batches
from torch import nn

from client_app.methods.gperxan import GPerXAN, MixedNorm
from hfedatm.base.building import build_method, build_model, load_data
from hfedatm.base.errors import UserError
from hfedatm_core import ChannelGraph, align
from hfedatm_core.data import DataSpec


def net_with_norm(spec: DataSpec) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(spec.input_shape[0], 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(144, spec.num_classes),
    )


@pytest.mark.parametrize("training", [True, False])
def test_mix_is_between_batch_and_instance_normalisation(training):
    norm = nn.BatchNorm2d(3)
    x = torch.randn(5, 3, 4, 4) + 1
    mixed = MixedNorm(norm, 0.25).train(training)
    with torch.no_grad():
        batch = F.batch_norm(
            x, norm.running_mean.clone(), norm.running_var.clone(), training=training
        )
        assert torch.allclose(mixed(x), 0.25 * batch + 0.75 * F.instance_norm(x), atol=1e-5)


def test_every_batch_norm_is_replaced_and_its_share_is_learned():
    model = GPerXAN(batch_share=0.5).adapt(net_with_norm(SPEC))
    assert [type(m) for m in model][1] is MixedNorm
    model(tiny_batches(1)[0][0]).square().sum().backward()
    assert model[1].logit.grad.abs() > 0


def test_model_without_batch_norm_is_refused_with_the_cure():
    settings = small_settings(client_method="gperxan")
    with pytest.raises(UserError, match="batch_norm=true"):
        build_model(settings, load_data(settings).spec, build_method(settings))


def test_loss_adds_the_received_classifiers_error_and_that_classifier_stays_frozen():
    model = GPerXAN().adapt(net_with_norm(SPEC)).eval()
    (inputs, targets), *_ = tiny_batches(1)
    method = GPerXAN(guide=2.0)
    method.begin(model, {}, {})
    received = {n: p.detach().clone() for n, p in model[4].named_parameters()}
    with torch.no_grad():
        model[4].weight.add_(0.5)
    features = model[:4](inputs)
    guided = F.cross_entropy(F.linear(features, received["weight"], received["bias"]), targets)
    expected = F.cross_entropy(model(inputs), targets) + 2.0 * guided
    loss = method.loss(model, inputs, targets)
    assert torch.allclose(loss, expected)
    loss.backward()
    # The guide reaches the features but not the classifier that is trained.
    own = torch.autograd.grad(F.cross_entropy(model(inputs), targets), model[4].weight)[0]
    assert torch.allclose(model[4].weight.grad, own, atol=1e-6)


def test_alignment_keeps_the_function_of_a_mixed_model():
    torch.manual_seed(0)
    one, other = (GPerXAN().adapt(net_with_norm(SPEC)).eval() for _ in range(2))
    inputs = tiny_batches(1)[0][0]
    graph = ChannelGraph.trace(one, (inputs,))
    before = other(inputs)
    aligned = align(other.state_dict(), one.state_dict(), graph)
    assert aligned.moved["0"] > 0
    other.load_state_dict(aligned.state)
    assert torch.allclose(other(inputs), before, atol=1e-5)


@pytest.mark.parametrize("params", ["guide=-1", "batch_share=1"])
def test_bad_parameters_are_refused(params):
    with pytest.raises(UserError, match="guide must be"):
        build_method(small_settings(client_method="gperxan", client_params=params))


def test_run(tmp_path):
    folder = run_small(tmp_path, client_method="gperxan", model="test_gperxan:net_with_norm")
    rounds = lines_of(folder)
    assert len(rounds) == 2
    assert not any(record["failures"] for record in rounds)
