"""The local loop: schedule, optimiser, divergence, data; and what the ClientApp answers."""

import math

import pytest
import torch
from helpers import SPEC, ask_client, small_settings, tiny_batches, tiny_data, tiny_net

from client_app.data import client_data
from client_app.methods.fedavg import FedAvg
from client_app.training import Diverged, make_optimizer, train_locally
from hfedatm.base.batches import Batches
from hfedatm.base.building import build_method, build_model
from hfedatm.base.errors import UserError
from hfedatm.base.evaluation import evaluate
from hfedatm.base.records import record_to_grams, record_to_state
from hfedatm.base.schedule import learning_rate
from hfedatm_core import collect_grams
from hfedatm_core.data import Domain


def test_cosine_spans_all_local_rounds_of_the_run():
    settings = small_settings(rounds=3, station_rounds=2, lr=0.4, schedule="cosine")
    rates = [learning_rate(settings, r, s) for r in (1, 2, 3) for s in (1, 2)]
    assert rates == pytest.approx([0.2 * (1 + math.cos(math.pi * k / 6)) for k in range(6)])
    assert rates[0] == 0.4 and rates[-1] > 0


def test_constant_schedule():
    settings = small_settings(lr=0.4, schedule="constant")
    assert learning_rate(settings, 2, 2) == 0.4


def test_optimizers_get_the_settings():
    model = tiny_net(SPEC)
    sgd = make_optimizer(
        model.parameters(), small_settings(momentum=0.3, weight_decay=0.1), lr=0.02
    )
    assert isinstance(sgd, torch.optim.SGD)
    assert {k: sgd.defaults[k] for k in ("lr", "momentum", "weight_decay")} == {
        "lr": 0.02, "momentum": 0.3, "weight_decay": 0.1,
    }  # fmt: skip
    adamw = make_optimizer(
        model.parameters(),
        small_settings(optimizer="adamw", momentum=0.8, weight_decay=0.1),
        lr=0.02,
    )
    assert isinstance(adamw, torch.optim.AdamW)
    assert adamw.defaults["betas"] == (0.8, 0.999)
    assert adamw.defaults["weight_decay"] == 0.1


def test_frozen_parameters_are_not_trained():
    model = tiny_net(SPEC)
    model[0].weight.requires_grad_(False)
    before = model[0].weight.clone()
    train_locally(model, FedAvg(), tiny_batches(1), small_settings(), lr=0.1)
    assert torch.equal(model[0].weight, before)


def test_divergence_is_an_error_that_says_what_to_do():
    model = tiny_net(SPEC)
    inputs, targets = tiny_batches(1)[0]
    with pytest.raises(Diverged, match=r"loss is nan in local epoch 1 at lr 0\.1: lower lr"):
        train_locally(model, FedAvg(), [(inputs * math.nan, targets)], small_settings(), lr=0.1)


def test_a_diverged_client_answers_with_its_error():
    settings = small_settings(lr=1e30)
    model = build_model(settings, SPEC, build_method(settings)).state_dict()
    reply = ask_client(settings, 0, model)
    assert "Diverged: the loss is" in reply.config_records["failure"]["reason"]
    assert not reply.array_records


def test_evaluate_counts_and_averages():
    model = tiny_net(SPEC)
    batches = tiny_batches(3, size=5)
    found = evaluate(model, batches)
    inputs, targets = (torch.cat(part) for part in zip(*batches, strict=True))
    logits = model(inputs)
    assert found.examples == 15
    assert found.correct == int((logits.argmax(1) == targets).sum())
    expected = torch.nn.functional.cross_entropy(logits, targets).item()
    assert found.loss == pytest.approx(expected, rel=1e-5)


def test_epochs_are_shuffled_anew_and_reproducibly():
    domain = Domain("d", torch.arange(10.0).reshape(10, 1, 1, 1), torch.arange(10))

    def epochs():
        batches = Batches(domain, SPEC, 4, torch.device("cpu"), seed=3)
        return [torch.cat([y for _, y in batches]).tolist() for _ in range(2)]

    first, second = epochs()
    assert sorted(first) == sorted(second) == list(range(10))
    assert first != second
    assert epochs() == [first, second]


def test_a_last_batch_of_one_is_left_out_of_training_only():
    domain = Domain("d", torch.zeros(9, 1, 1, 1), torch.arange(9))
    device = torch.device("cpu")
    assert [len(y) for _, y in Batches(domain, SPEC, 4, device, seed=0)] == [4, 4]
    assert [len(y) for _, y in Batches(domain, SPEC, 4, device)] == [4, 4, 1]


def test_clients_share_out_the_source_domains_and_never_the_target():
    settings = small_settings(validation_fraction=0.25)
    data = tiny_data()
    target = data.domains["c"].inputs.flatten(1)
    seen = []
    for client in range(settings.num_clients):
        own = client_data(settings, client, {})
        seen += [part.inputs.flatten(1) for part in (own.train, *own.validation)]
        assert sum(map(len, own.validation)) == 25
    rows = torch.cat(seen)
    assert len(rows) == 400 and len(torch.unique(rows, dim=0)) == 400
    assert not (torch.cdist(rows, target) == 0).any()


def test_a_client_beyond_the_shares_is_told_which_there_are():
    with pytest.raises(UserError, match="client 4: .* makes 4 shares, numbered from 0"):
        client_data(small_settings(), 4, {})


def test_train_reply_has_model_counts_and_grams_of_the_trained_model():
    settings = small_settings()
    model = build_model(settings, SPEC, build_method(settings))
    reply = ask_client(settings, 1, model.state_dict(), send_grams=True)
    trained = record_to_state(reply.array_records["model"])
    assert any(not torch.equal(trained[n], t) for n, t in model.state_dict().items())
    own = client_data(settings, 1, {})
    assert reply.metric_records["metrics"]["num-examples"] == len(own.train)
    model.load_state_dict(trained)
    expected = collect_grams(model, [(own.train.inputs, own.train.targets)])
    found = record_to_grams(reply.array_records["grams"])
    assert found.keys() == expected.keys() == {"4", "6"}
    for name, gram in expected.items():
        assert found[name].rows == len(own.train)
        torch.testing.assert_close(found[name].dense(), gram.dense(), rtol=1e-4, atol=1e-5)


def test_grams_are_not_sent_unless_asked_for():
    settings = small_settings()
    model = build_model(settings, SPEC, build_method(settings)).state_dict()
    assert "grams" not in ask_client(settings, 1, model).array_records


def test_a_gram_of_too_few_rows_is_refused():
    settings = small_settings(gram_min_rows=1000)
    model = build_model(settings, SPEC, build_method(settings)).state_dict()
    reason = ask_client(settings, 1, model, send_grams=True).config_records["failure"]["reason"]
    assert "90 rows, fewer than gram-min-rows = 1000" in reason


def test_training_does_not_depend_on_what_happened_before():
    settings = small_settings()
    model = build_model(settings, SPEC, build_method(settings)).state_dict()
    one = ask_client(settings, 1, model).array_records["model"]
    torch.manual_seed(123)
    torch.rand(17)
    ask_client(settings, 3, model)
    other = ask_client(settings, 1, model).array_records["model"]
    for name in one:
        assert torch.equal(record_to_state(one)[name], record_to_state(other)[name])
