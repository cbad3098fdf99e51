"""sFedHP: the smoothed norm, the steps of both models, and what stays on the client."""

import math

import pytest
import torch
import torch.nn.functional as F
from helpers import (
    SMALL,
    SPEC,
    ask_client,
    assert_resumes,
    last_model,
    lines_of,
    run_small,
    small_settings,
    tiny_batches,
    tiny_net,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from client_app.methods.fedavg import FedAvg
from hfedatm.base.building import build_method, build_model, build_rule
from hfedatm.base.errors import UserError
from hfedatm.base.memory import NodeMemory
from hfedatm.base.records import record_to_state
from hfedatm.contracts import Situation, Update
from hfedatm_core import ChannelGraph
from server_app.rules.sfedhp import SFedHP, smooth_l1, smooth_l1_gradient

RULE = {"server_rule": "sfedhp"}


@settings(max_examples=60)
@given(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=6), st.floats(1e-3, 10))
def test_the_smoothed_norm_is_near_the_l1_norm(values, rho):
    x = torch.tensor(values, dtype=torch.float64, requires_grad=True)
    norm = smooth_l1(x, rho)
    found, l1 = norm.detach(), sum(map(abs, values))
    assert l1 - len(values) * rho * math.log(2) - 1e-9 <= float(found) <= l1 + 1e-9
    small = [rho * math.log(math.cosh(v / rho)) for v in values if abs(v / rho) < 300]
    if len(small) == len(values):
        assert float(found) == pytest.approx(sum(small), rel=1e-6, abs=1e-9)
    (gradient,) = torch.autograd.grad(norm, x)
    assert torch.allclose(gradient, smooth_l1_gradient(x, rho), atol=1e-9)


def test_a_client_takes_the_steps_of_the_formulas():
    rule = SFedHP(lam=2.0, inner=2, rate=0.25, sparse=0.01, rho=0.05)
    method = rule.on_client(FedAvg())
    torch.manual_seed(0)
    model, kept = tiny_net(SPEC), tiny_net(SPEC).state_dict()
    phi = {n: p.detach().clone() for n, p in model.named_parameters()}
    theta = {n: kept[n].clone().requires_grad_() for n in phi}
    method.begin(model, {}, method.marked(kept))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches, shadow = tiny_batches(5), tiny_net(SPEC)
    for step, (inputs, targets) in enumerate(batches):
        optimizer.zero_grad()
        method.loss(model, inputs, targets).backward()
        optimizer.step()
        if step and step % 2 == 0:  # after every second step of theta, one of phi
            phi = {n: phi[n] - 0.25 * (phi[n] - theta[n].detach()) for n in phi}
        value = F.cross_entropy(torch.func.functional_call(shadow, theta, inputs), targets)
        for n, t in theta.items():
            value = value + 2.0 / 2 * ((t - phi[n]) ** 2).sum()
            if t.ndim > 1:
                value = value + 0.01 * 0.05 * torch.log(torch.cosh(t / 0.05)).sum()
        gradients = torch.autograd.grad(value, list(theta.values()))
        theta = {
            n: (t - 0.1 * g).detach().requires_grad_()
            for (n, t), g in zip(theta.items(), gradients, strict=True)
        }
    for n, p in model.named_parameters():
        assert torch.allclose(p, theta[n], atol=1e-5)
    method.finish(model, tiny_batches(1, seed=3))
    phi = {n: phi[n] - 0.25 * (phi[n] - theta[n].detach()) for n in phi}
    for n, p in model.named_parameters():
        assert torch.allclose(p, phi[n], atol=1e-5)  # this is sent
        assert torch.allclose(method.remember()[f"sfedhp.{n}"], theta[n], atol=1e-5)  # this stays
    ((inputs, targets),) = tiny_batches(1, seed=3)
    right = torch.func.functional_call(shadow, theta, inputs).argmax(1) == targets
    assert method.metrics()["personal-accuracy"] == pytest.approx(float(right.float().mean()))


def test_the_server_takes_one_step_to_the_mean():
    chosen = small_settings(**RULE)
    graph = ChannelGraph.trace(tiny_net(SPEC), (SPEC.example(),))
    old = {"w": torch.tensor([[1.0, -2.0]]), "b": torch.tensor([4.0]), "n": torch.tensor(3)}
    ones = [
        Update({"w": torch.full((1, 2), v), "b": torch.tensor([v]), "n": torch.tensor(3)}, {}, n)
        for v, n in ((1.0, 1), (5.0, 3))
    ]
    rule = SFedHP(step=0.5, sparse=0.1, rho=0.5)
    found = rule.merge(iter(ones), Situation(chosen, graph, old, 1)).state
    lr = chosen.lr * 0.5 * (1 + math.cos(math.pi * 1 / 4))  # the second of four station rounds
    wanted = [
        w + 0.5 * (4.0 - w) - 0.1 * lr * math.tanh(w / 0.5) for w in (1.0, -2.0)
    ]  # the mean of the stations is 4
    assert found["w"].tolist()[0] == pytest.approx(wanted, rel=1e-6)
    assert found["b"].tolist() == pytest.approx([4.0])
    assert int(found["n"]) == 3


def test_a_run_reports_personal_models_and_they_fit_their_clients(tmp_path):
    folder = run_small(tmp_path, **RULE, rounds=4, local_epochs=3)
    rounds = lines_of(folder)
    assert not any(line["failures"] for line in rounds)
    last = rounds[-1]["metrics"]
    assert 0.9 < last["personal-accuracy"] <= 1
    assert 0 <= last["near-zero"] <= 1


def test_more_weight_of_the_norm_makes_personal_models_sparser(tmp_path):
    shares = []
    for sparse in ("0", "0.05"):
        params = f"sparse={sparse},rho=0.001"
        folder = run_small(tmp_path, f"run-{sparse}", **RULE, rule_params=params, rounds=1)
        shares.append(lines_of(folder)[-1]["metrics"]["near-zero"])
    assert shares[0] < shares[1]


def test_the_personal_model_stays_on_the_client():
    chosen = small_settings(**RULE)
    method = build_method(chosen, SPEC)
    model = build_model(chosen, SPEC, method).state_dict()
    sent = record_to_state(ask_client(chosen, 0, model)["model"])
    kept = NodeMemory("run", "client-0").load(before=(2, 0))
    for name in ("4.weight", "6.bias"):
        assert not torch.equal(sent[name], kept[f"sfedhp.{name}"])
        # What is sent lies between the received and the personal model.
        way, whole = (
            (sent[name] - model[name]).norm(),
            (kept[f"sfedhp.{name}"] - model[name]).norm(),
        )
        assert 0 < way < whole


def test_no_score_leaves_if_the_owner_forbids_it(policy):
    chosen = small_settings(**RULE)
    model = build_model(chosen, SPEC, build_method(chosen, SPEC)).state_dict()
    own = [SMALL["dataset"], SMALL["model"]]
    policy(code={"allowed": own})
    assert "personal-accuracy" in ask_client(chosen, 0, model)["metrics"]
    policy(code={"allowed": own}, privacy={"evaluate": False})
    assert "personal-accuracy" not in ask_client(chosen, 0, model)["metrics"]


@pytest.mark.parametrize("method", ["fedsr", "fedprox"])
def test_works_around_methods_with_memory_and_losses_of_their_own(tmp_path, method):
    folder = run_small(tmp_path, **RULE, client_method=method)
    assert not any(line["failures"] for line in lines_of(folder))


def test_resumed_run_equals_the_uninterrupted_one(tmp_path, monkeypatch):
    whole = assert_resumes(tmp_path, monkeypatch, **RULE)
    assert all(bool(torch.isfinite(v).all()) for v in last_model(whole).values())


@pytest.mark.parametrize(
    ("given", "words"),
    [({"train_fn": "a:b"}, "train-fn"), ({"dp_sgd": True, "privacy.epsilon": 1.0}, "dp-sgd")],
)
def test_settings_it_does_not_go_with_are_refused(given, words):
    with pytest.raises(UserError, match=words):
        build_rule(small_settings(**RULE, **given))
