"""A second look: statistics of the merged model from the clients, bounded, checked, and refused."""

import math
import os
import shutil
from pathlib import Path

import pytest
import torch
from helpers import (
    UNEVEN,
    Saboteur,
    ask_client,
    assert_same_model,
    failures_of,
    last_model,
    lines_of,
    log_lines,
    run_small,
    small_settings,
    tiny_data,
)
from spoiling import UNBOUNDED, counting, raising, silent, spoilt
from torch import nn

import hfedatm.runtime.local as local
from client_app.data import client_data
from hfedatm.base.records import record_to_state
from hfedatm.base.results import RunFolder
from hfedatm_core import forward


def norm_net(spec):
    """Two BatchNorms, the second behind a Linear layer."""
    return nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(36, 16),
        nn.BatchNorm1d(16),
        nn.ReLU(),
        nn.Linear(16, spec.num_classes),
    )


APART = {
    "model": "test_second_look:norm_net",
    "station_start": "own",
    "station_assignment": "mixed",
    "rounds": 1,
    "station_rounds": 1,
    "diagnostics": False,
}
LOOK = {**APART, "rule_params": "second_look=auto"}


@pytest.fixture
def sabotage(monkeypatch):
    def install(spoil, clients=(1,)):
        saboteur = Saboteur(spoil, set(clients), "train.look")
        monkeypatch.setattr(local, "client_app", saboteur)
        return saboteur

    return install


def all_training_inputs(settings):
    return torch.cat([client_data(settings, c, {}).train.inputs for c in range(4)])


# --- what it does


@pytest.mark.parametrize("uneven", [False, True])
def test_the_published_model_has_the_statistics_of_all_clients_examples(tmp_path, uneven):
    given = LOOK | (UNEVEN if uneven else {})
    folder = run_small(tmp_path, "look", **given, **UNBOUNDED)
    model = norm_net(tiny_data().spec)
    model.load_state_dict(last_model(folder))
    examples = all_training_inputs(small_settings(**given))
    sizes = {len(client_data(small_settings(**given), c, {}).train.inputs) for c in range(4)}
    assert (len(sizes) > 1) == uneven
    outputs = model[0](examples).transpose(0, 1).flatten(1).double()
    torch.testing.assert_close(
        model[1].running_mean.double(), outputs.mean(1), rtol=1e-5, atol=1e-6
    )
    torch.testing.assert_close(
        model[1].running_var.double(), outputs.var(1, correction=0), rtol=1e-5, atol=1e-6
    )
    [line] = lines_of(folder)
    found = {"stations": 2, "examples": len(examples), "passes": 1, "reason": ""}
    assert line["second_look"] == found


def test_two_passes_are_exact_for_both_norms_and_one_pass_is_not(tmp_path):
    examples = all_training_inputs(small_settings(**LOOK))
    errors = []
    for passes in (1, 2):
        given = LOOK | {"rule_params": f"second_look=auto,look_passes={passes}"}
        folder = run_small(tmp_path, str(passes), **given, **UNBOUNDED)
        model = norm_net(tiny_data().spec).eval()
        model.load_state_dict(last_model(folder))
        with torch.no_grad():
            inputs = model[:6](examples).double()  # of the second norm, as the model is used
        errors.append(float((model[6].running_mean.double() - inputs.mean(0)).abs().max()))
        variances = inputs.var(0, correction=0)
        if passes == 2:
            torch.testing.assert_close(
                model[6].running_var.double(), variances, rtol=1e-5, atol=1e-6
            )
        assert lines_of(folder)[0]["second_look"]["passes"] == passes
    assert errors[0] > 1e-3 > 1e-6 > errors[1]


def watched(monkeypatch):
    """Note the type of every message to a client, and the records that bring the model."""
    honest, seen = local.client_app, []

    def watch(message, context):
        kind, content = message.metadata.message_type, message.content
        brought = [name for name in ("model", "changes") if name in content]
        seen.append((message.metadata.dst_node_id, kind, brought, content.get("changes")))
        return honest(message, context)

    monkeypatch.setattr(local, "client_app", watch)
    return seen


def test_the_merged_model_goes_down_once_for_all_passes_and_the_evaluation(tmp_path, monkeypatch):
    seen = watched(monkeypatch)
    run_small(tmp_path, **LOOK | {"rule_params": "second_look=auto,look_passes=2"})
    after = [(kind, brought) for client, kind, brought, _ in seen if client == 0][1:]
    expected = [("train.look", ["model"]), ("train.look", ["changes"]), ("evaluate", ["changes"])]
    assert after == expected
    statistics = {f"{n}.running_{what}" for n in (1, 6) for what in ("mean", "var")}
    assert all(set(changes) == statistics for *_, changes in seen if changes is not None)


def test_without_an_evaluation_nobody_keeps_the_model(tmp_path):
    run_small(tmp_path, **LOOK | {"validation_fraction": 0.0})
    assert not list(Path(os.environ["HFEDATM_STATE"]).rglob("*-look"))


def test_who_did_not_look_is_sent_the_whole_model_to_evaluate(tmp_path, monkeypatch, sabotage):
    honest = run_small(tmp_path, "honest", **LOOK)
    sabotage(raising, clients=(1, 2, 3))  # client 1 of station 0, and all of station 1
    seen = watched(monkeypatch)
    folder = run_small(tmp_path, "failed", **LOOK)
    brought = {client: how for client, kind, how, _ in seen if kind == "evaluate"}
    assert brought == {0: ["changes"], 1: ["model"], 2: ["model"], 3: ["model"]}
    examples = [sum(d["examples"] for d in lines_of(f)[0]["source"]["domains"].values())
                for f in (honest, folder)]  # fmt: skip
    assert examples[0] == examples[1]  # all evaluated


def test_a_node_that_lost_the_model_is_named_and_the_others_evaluate(tmp_path, monkeypatch):
    honest = local.client_app

    def forgetful(message, context):
        if message.metadata.message_type == "evaluate" and message.metadata.dst_node_id == 2:
            [kept] = Path(os.environ["HFEDATM_STATE"]).rglob("client-2-look")
            shutil.rmtree(kept)
        return honest(message, context)

    monkeypatch.setattr(local, "client_app", forgetful)
    [failure] = failures_of(run_small(tmp_path, **LOOK))
    assert failure["node"] == "station 1, client 2"
    assert "has not kept the merged model of this round" in failure["reason"]


def test_changes_that_do_not_fit_the_model_are_refused():
    settings, model = small_settings(**LOOK), norm_net(tiny_data().spec).state_dict()
    ask_client(settings, 0, model, "train.look")
    for changes in ({"1.running_mean": torch.zeros(5)}, {"2.running_mean": torch.zeros(4)}):
        reply = ask_client(settings, 0, None, "evaluate", changes=changes)
        assert "changes: the model has no" in reply["failure"]["reason"]
    reply = ask_client(settings, 0, None, "evaluate", changes={"1.running_mean": torch.zeros(4)})
    assert reply["metrics"]["num-examples"] > 0
    later = ask_client(settings, 0, None, "evaluate", changes={}, round=2)
    assert "has not kept the merged model" in later["failure"]["reason"]


def test_a_pass_that_fails_leaves_the_statistics_of_the_pass_before(tmp_path, sabotage):
    one = run_small(tmp_path, "one", **LOOK)
    calls = []

    def second_time(message, reply):
        calls.append(message)
        return reply if len(calls) <= 2 else raising(message, reply)

    sabotage(second_time, clients=(0, 1))
    given = LOOK | {"rule_params": "second_look=auto,look_passes=3", "station_quorum": 1.0}
    with log_lines() as lines:
        folder = run_small(tmp_path, "two", **given)
    assert_same_model(one, folder)
    look = lines_of(folder)[0]["second_look"]
    assert (look["passes"], look["reason"]) == (1, "1 of 2 stations usable, 2 needed")
    assert any("second look by 2 stations, NO PASS 2: 1 of 2" in line for line in lines)


def test_only_statistics_change_and_the_scores_are_those_of_the_saved_model(tmp_path):
    plain = last_model(run_small(tmp_path, "plain", **APART))
    folder = run_small(tmp_path, "look", **LOOK)
    looked = last_model(folder)
    changed = {name for name in plain if not torch.equal(plain[name], looked[name])}
    assert changed == {f"{n}.running_{what}" for n in (1, 6) for what in ("mean", "var")}
    unseen = tiny_data().domains["c"]
    model = norm_net(tiny_data().spec).eval()
    model.load_state_dict(looked)
    with torch.no_grad():
        right = (forward(model, unseen.inputs).argmax(1) == unseen.targets).double().mean()
    assert lines_of(folder)[0]["unseen"]["accuracy"] == pytest.approx(float(right))


def test_the_stations_go_on_from_the_corrected_model(tmp_path, monkeypatch):
    started = []

    def watch(message, context):
        if message.metadata.message_type == "train":
            started.append((message.content["task"]["round"], message.content["model"]))
        return honest(message, context)

    honest = local.client_app
    first = last_model(run_small(tmp_path, "one", **LOOK | {"broadcast": "merged"}))
    monkeypatch.setattr(local, "client_app", watch)
    run_small(tmp_path, "two", **LOOK | {"broadcast": "merged", "rounds": 2})
    sent = [record_to_state(model) for number, model in started if number == 2]
    assert len(sent) == 4
    assert all(torch.equal(sent[0][name], value) for name, value in first.items())


def test_never_is_the_default_and_always_means_every_round(tmp_path):
    plain = run_small(tmp_path, "plain", **APART | {"rounds": 2})
    assert all("second_look" not in line for line in lines_of(plain))
    auto = run_small(tmp_path, "auto", **LOOK | {"rounds": 2})
    assert ["second_look" in line for line in lines_of(auto)] == [True, False]
    always = APART | {"rounds": 2, "rule_params": "second_look=always"}
    assert all("second_look" in line for line in lines_of(run_small(tmp_path, "all", **always)))


def test_it_needs_no_validation_examples(tmp_path):
    folder = run_small(tmp_path, **LOOK | {"validation_fraction": 0.0})
    assert lines_of(folder)[0]["second_look"]["stations"] == 2


def test_a_resumed_run_ends_like_the_uninterrupted_one(tmp_path, monkeypatch):
    given = LOOK | {"rounds": 3, "rule_params": "second_look=always", "broadcast": "merged"}
    whole = run_small(tmp_path, "whole", **given)
    save, stopped = RunFolder.save_round, tmp_path / "stopped"

    def stop(self, record, *rest):
        if record.round == 2:
            raise KeyboardInterrupt
        save(self, record, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "save_round", stop)
        with pytest.raises(KeyboardInterrupt):
            run_small(tmp_path, "stopped", **given)
    local.run_locally({"resume": str(stopped)})
    assert_same_model(whole, stopped)


# --- who fails or lies


def with_value(value):
    def change(state):
        state["1"][0, 0] = value
        return state

    return change


def negative_variance(state):
    state["1"][1, 2] = state["1"][0, 2] ** 2 - 0.1
    return state


LIES = {
    "raises": (raising, "disk on fire"),
    "empty": (silent, "reply has no 'metrics'"),
    "nan": (spoilt("statistics", with_value(math.nan)), "1 has values that are not finite"),
    "infinity": (spoilt("statistics", with_value(math.inf)), "1 has values that are not finite"),
    "huge": (spoilt("statistics", with_value(1e16)), "1 has values beyond"),
    "negative variance": (spoilt("statistics", negative_variance), "1 has a negative variance"),
    "wrong shape": (
        spoilt("statistics", lambda s: s | {"1": s["1"].T}),
        "1 has shape (4, 2), not (2, 4)",
    ),
    "wrong type": (
        spoilt("statistics", lambda s: s | {"1": s["1"].float()}),
        "1 has type torch.float32",
    ),
    "missing layer": (spoilt("statistics", lambda s: {"1": s["1"]}), "missing tensors ['6']"),
    "unknown layer": (spoilt("statistics", lambda s: s | {"7": s["1"]}), "unknown tensors ['7']"),
    "negative count": (counting(-3), "num-examples = -3 is not a plausible count"),
    "no example": (counting(0), "num-examples = 0 is not a plausible count"),
    "huge count": (counting(10**12), "is not a plausible count"),
}


@pytest.mark.parametrize("lie", LIES)
def test_who_fails_or_lies_is_named_and_the_others_statistics_count(tmp_path, sabotage, lie):
    spoil, reason = LIES[lie]
    sabotage(spoil)
    folder = run_small(tmp_path, "lie", **LOOK, **UNBOUNDED)
    [failure] = failures_of(folder)
    assert failure["node"] == "station 0, client 1" and reason in failure["reason"]
    assert lines_of(folder)[0]["second_look"]["reason"] == ""
    others = [client_data(small_settings(**LOOK), c, {}).train.inputs for c in (0, 2, 3)]
    state = last_model(folder)
    outputs = nn.functional.conv2d(torch.cat(others), state["0.weight"], state["0.bias"])
    torch.testing.assert_close(
        state["1.running_mean"], outputs.mean((0, 2, 3)), rtol=1e-4, atol=1e-5
    )


def test_a_plausible_liar_moves_little(tmp_path, sabotage):
    """Client 1 of three claims statistics a thousand times off; the bounds of updates hold."""
    given = LOOK | {"clients_per_station": 3, "gram_min_rows": 1}
    honest = last_model(run_small(tmp_path, "honest", **given))

    def lie(state):
        return {n: torch.stack([m[0] + 1e3, m[1] + 1e6 + 2e3 * m[0]]) for n, m in state.items()}

    sabotage(spoilt("statistics", lie))
    lied = last_model(run_small(tmp_path, "lied", **given))
    scale = honest["1.running_var"].sqrt()
    assert ((lied["1.running_mean"] - honest["1.running_mean"]).abs() < 2 * scale).all()
    assert (lied["1.running_var"] < 10 * honest["1.running_var"]).all()


def test_without_enough_stations_the_merged_model_stays_as_it_is(tmp_path, sabotage):
    plain = run_small(tmp_path, "plain", **APART)
    sabotage(raising, clients=(0, 1))
    with log_lines() as lines:
        folder = run_small(tmp_path, "look", **LOOK | {"station_quorum": 1.0})
    assert_same_model(plain, folder)
    why = "1 of 2 stations usable, 2 needed"
    assert lines_of(folder)[0]["second_look"]["reason"] == why
    assert any(f"NO SECOND LOOK: {why}" in line for line in lines)


# --- when there is none

NOISE = {"privacy.mechanism": "example", "privacy.sigma": 3.0}


@pytest.mark.parametrize(
    ("switch", "why"),
    [
        (NOISE, "hides the clients' data by noise"),
        ({"secure_aggregation": True}, "allows only secure sums"),
    ],
    ids=["noise", "secure sums"],
)
def test_privacy_switches_refuse_at_the_server_and_at_the_client(tmp_path, sabotage, switch, why):
    asked = sabotage(raising)
    with log_lines() as lines:
        folder = run_small(tmp_path, **LOOK, **switch)
    assert why in lines_of(folder)[0]["second_look"]["reason"]
    assert sum("NO SECOND LOOK" in line for line in lines) == 1
    assert "train.look" not in {kind for kind, _ in asked.calls}
    settings = small_settings(**LOOK, **switch)
    reply = ask_client(settings, 0, norm_net(tiny_data().spec).state_dict(), "train.look")
    assert "statistics" not in reply and why in reply["failure"]["reason"]


def test_statistics_of_few_examples_do_not_leave():
    settings = small_settings(**LOOK, gram_min_rows=1000)
    reply = ask_client(settings, 0, norm_net(tiny_data().spec).state_dict(), "train.look")
    assert "fewer than gram-min-rows = 1000" in reply["failure"]["reason"]


def test_a_model_without_batch_norm_says_so(tmp_path):
    folder = run_small(tmp_path, rounds=1, station_start="own", rule_params="second_look=auto")
    assert "no BatchNorm" in lines_of(folder)[0]["second_look"]["reason"]
