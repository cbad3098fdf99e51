"""FedRC of Guo, Tang and Lin: who belongs to which cluster, and what each model learns."""

import math

import pytest
import torch
import torch.nn.functional as F
from helpers import (
    SMALL,
    SPEC,
    Saboteur,
    ask_client,
    assert_resumes,
    failures_of,
    last_model,
    lines_of,
    log_lines,
    run_small,
    small_settings,
    tiny_batches,
    tiny_data,
    tiny_net,
)
from hypothesis import given, settings
from hypothesis import strategies as st

import hfedatm.runtime.local as local
from client_app.methods.fedavg import FedAvg
from hfedatm.base.building import build_method, build_model, build_rule
from hfedatm.base.errors import UserError
from hfedatm.base.records import record_to_state, state_to_record
from hfedatm_core.data import Domain, DomainData
from server_app.rules.fedrc_clusters import Clustered, ClusterModels, memberships

RULE = {"server_rule": "fedrc-clusters"}


def two_concepts(data_dir: str | None = None) -> DomainData:
    """Return the tiny data, where the places mean other classes in domain b."""
    data = tiny_data()
    b = data.domains["b"]
    turned = Domain("b", b.inputs, (b.targets + 1) % SPEC.num_classes)
    return DomainData(data.spec, {**data.domains, "b": turned})


def clustered(clusters=2):
    method = Clustered(FedAvg())
    method.clusters = clusters
    torch.manual_seed(0)
    return method, method.adapt(tiny_net(SPEC))


shares_of = st.lists(st.floats(0.05, 1.0), min_size=3, max_size=3)


@settings(max_examples=60)
@given(
    st.lists(shares_of, min_size=2, max_size=4),
    st.lists(st.floats(0.01, 0.99), min_size=2, max_size=4),
    st.integers(0, 2),
)
def test_membership_is_bayes_with_the_share_of_the_class(rows, chances, target):
    count = min(len(rows), len(chances))
    shares = torch.tensor(rows[:count], dtype=torch.float64)
    shares = shares / shares.sum(1, keepdim=True)
    omega = torch.full((count,), 1.0 / count, dtype=torch.float64)
    p = torch.tensor(chances[:count], dtype=torch.float64)
    found = memberships(-p.log()[:, None], omega, shares, torch.tensor([target]))[:, 0]
    parts = [
        float(omega[k]) * chances[k] / float(shares[k, target]) for k in range(count)
    ]  # omega I
    for k in range(count):
        assert float(found[k]) == pytest.approx(parts[k] / sum(parts), rel=1e-9)


def test_clients_whose_classes_differ_are_not_kept_apart_for_that():
    # Cluster 0 has seen class 0 nine times as often, and so predicts it nine times as often.
    shares = torch.tensor([[0.9, 0.1], [0.1, 0.9]])
    losses = -shares.log()[:, [0, 1]]  # models that know nothing but how frequent classes are
    even = memberships(losses, torch.tensor([0.5, 0.5]), shares, torch.tensor([0, 1]))
    assert torch.allclose(even, torch.full((2, 2), 0.5))


def test_the_gradient_of_a_model_is_that_of_its_share_of_the_examples():
    method, model = clustered()
    assert isinstance(model, ClusterModels)
    model.shares.copy_(torch.tensor([[0.3, 0.1, 0.1], [0.1, 0.2, 0.2]]))
    omega = torch.tensor([0.7, 0.3])
    method.begin(model, {}, method.marked({"omega": omega}))
    ((inputs, targets),) = tiny_batches(1)
    method.loss(model, inputs, targets).backward()
    with torch.no_grad():
        p = torch.stack([m(inputs).softmax(1)[range(len(targets)), targets] for m in model.models])
        share = torch.tensor([[0.3, 0.1, 0.1], [0.1, 0.2, 0.2]])
        joint = omega[:, None] * p / (share / share.sum(1, keepdim=True))[:, targets]
        gamma = joint / joint.sum(0)
    for k, one in enumerate(model.models):
        each = F.cross_entropy(one(inputs), targets, reduction="none")
        wanted = torch.autograd.grad((gamma[k] * each).mean(), list(one.parameters()))
        for p, w in zip(one.parameters(), wanted, strict=True):
            assert torch.allclose(p.grad, w, atol=1e-6)
    assert method.metrics()["cluster-0"] == pytest.approx(float(gamma[0].mean()), rel=1e-5)
    counted = torch.stack([gamma[:, targets == c].sum(1) for c in range(3)], 1) / len(targets)
    assert torch.allclose(model.shares, counted, atol=1e-6)
    assert float(model.shares.sum()) == pytest.approx(1.0, rel=1e-5)


def test_examples_belong_to_clusters_by_the_received_models_whatever_is_trained_since():
    """In evaluation mode: neither dropout nor the statistics of a batch decide."""
    method = Clustered(FedAvg())
    method.clusters = 2
    torch.manual_seed(0)
    net = torch.nn.Sequential(
        torch.nn.Flatten(),
        torch.nn.BatchNorm1d(64),
        torch.nn.Dropout(0.5),
        torch.nn.Linear(64, SPEC.num_classes),
    )
    model = method.adapt(net).train()
    ((inputs, targets),) = tiny_batches(1)
    method.begin(model, {}, {})
    found = []
    for _ in range(2):
        before = method._sums.clone()
        method.loss(model, inputs, targets)
        found.append(method._sums - before)
        with torch.no_grad():
            for p in model.parameters():
                p.add_(torch.randn_like(p))
    assert torch.equal(*found)


def test_the_published_network_is_the_mixture_of_the_clusters():
    _, model = clustered(3)
    model.shares.copy_(torch.tensor([[0.2, 0.1, 0.1], [0.1, 0.1, 0.1], [0.1, 0.1, 0.1]]))
    inputs, _ = tiny_batches(1)[0]
    mixed = sum(
        w * m(inputs).softmax(1) for w, m in zip((0.4, 0.3, 0.3), model.models, strict=True)
    )
    assert torch.allclose(model(inputs).exp(), mixed, atol=1e-6)


def test_models_start_with_one_body_and_different_classifiers():
    _, model = clustered()
    one, other = (m.state_dict() for m in model.models)
    same = {name: torch.equal(one[name], other[name]) for name in one}
    assert same == {name: not name.startswith("6.") for name in one}


def test_clients_of_two_concepts_end_in_different_clusters(tmp_path):
    given = RULE | {"rounds": 8, "local_epochs": 3, "batch_size": 16, "validation_fraction": 0}
    folder = run_small(tmp_path, **given, dataset="test_fedrc_clusters:two_concepts")
    last = lines_of(folder)[-1]
    # Station 0 holds domain a, station 1 domain b, whose classes mean something else.
    one, other = (station["cluster-0"] for station in last["per_station"])
    assert abs(one - other) > 0.5
    assert not last["failures"]


def test_one_cluster_is_the_mean(tmp_path):
    mean = last_model(run_small(tmp_path, "mean", server_rule="avg"))
    found = last_model(run_small(tmp_path, "one", **RULE, rule_params="clusters=1"))
    for name, value in mean.items():
        assert torch.allclose(found[f"models.0.{name}"], value, atol=1e-5)


def test_the_shares_at_the_server_are_those_of_all_examples(tmp_path):
    shares = last_model(run_small(tmp_path, **RULE))["shares"]
    assert float(shares.sum()) == pytest.approx(1.0, rel=1e-5)
    assert torch.allclose(shares.sum(0), torch.full((3,), 1 / 3), atol=0.02)  # even classes


def test_resumed_run_equals_the_uninterrupted_one(tmp_path, monkeypatch):
    assert_resumes(tmp_path, monkeypatch, **RULE)


def spoiling(change):
    def spoil(message, reply):
        state = record_to_state(reply.content["model"])
        state["shares"] = change(state["shares"])
        reply.content["model"] = state_to_record(state)
        return reply

    return spoil


def test_shares_that_cannot_be_harm_nobody(tmp_path, monkeypatch):
    monkeypatch.setattr(local, "client_app", Saboteur(spoiling(lambda s: s * math.nan), {1}))
    folder = run_small(tmp_path, "nan", **RULE)
    assert {f["node"].split(", ")[-1] for f in failures_of(folder)} == {"client 1"}
    monkeypatch.setattr(local, "client_app", Saboteur(spoiling(lambda s: s - 1e9), {1}))
    folder = run_small(tmp_path, "negative", **RULE, bound_factor=0, least_agreement=0)
    assert all(bool(torch.isfinite(v).all()) for v in last_model(folder).values())
    assert not any(line.get("kept") for line in lines_of(folder))
    assert all(math.isfinite(line["loss"]) for line in lines_of(folder))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"train_fn": "a:b"}, "train-fn"),
        ({"dp_sgd": True, "privacy.epsilon": 1.0}, "dp-sgd"),
        ({"task": "regression"}, "classes"),
        ({"client_method": "fedprox"}, "client-method=fedavg"),
    ],
)
def test_settings_it_does_not_go_with_are_refused(given, words):
    with pytest.raises(UserError, match=words):
        chosen = small_settings(**RULE, **given)
        build_rule(chosen).on_client(build_method(chosen))


def test_shares_of_classes_leave_only_if_the_owner_allows_it(policy):
    chosen = small_settings(**RULE)
    method = build_method(chosen, SPEC)
    model = build_model(chosen, SPEC, method).state_dict()
    own = [SMALL["dataset"], SMALL["model"]]
    policy(code={"allowed": own})
    refused = ask_client(chosen, 0, model)
    assert "privacy.class-counts" in refused["failure"]["reason"]
    policy(code={"allowed": own}, privacy={"class-counts": True})
    assert "model" in ask_client(chosen, 0, model)
    policy(code={"allowed": own}, privacy={"class-counts": True, "least-mechanism": "example"})
    assert "least-mechanism" in ask_client(chosen, 0, model)["failure"]["reason"]


def test_the_run_says_what_clients_send(tmp_path):
    with log_lines() as lines:
        run_small(tmp_path, **RULE, rounds=1)
    assert any("clients also send: class counts" in line for line in lines)


def test_the_old_name_of_the_other_rule_still_works_and_is_told():
    with log_lines() as lines:
        assert small_settings(server_rule="fedrc").server_rule == "fedrc-weights"
    assert lines == ["server-rule=fedrc is deprecated; it is called fedrc-weights"]
