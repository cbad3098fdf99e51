"""Secure aggregation over messages: the sums are right and nothing else is seen."""

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.common import Array, ArrayRecord
from helpers import failures_of, last_model, lines_of, run_small, small_settings
from secure_station import (
    CLIENTS,
    PLAIN,
    SECURE,
    UNBOUNDED,
    Spied,
    gather,
    model_and_layers,
    silent,
)

from client_app.app import app as client_app
from hfedatm.base.masked_reply import flatten, mean_reply
from hfedatm.base.records import Task, record_to_grams, record_to_state, state_to_record
from hfedatm.runtime.in_process import InProcessGrid
from hfedatm_core.privacy.mechanisms.base import Mechanism
from hfedatm_core.secagg import FixedPoint
from station_app.hearing import TooFewClients

UNIFORM = small_settings(**SECURE)


def close(one, other, tolerance=2e-6):
    return all(torch.allclose(one[name], other[name], atol=tolerance, rtol=0) for name in other)


# --- the sums are right


@pytest.mark.parametrize("weights", ["uniform", "examples"])
def test_masked_sums_equal_plain_sums(weights):
    secure, model, metrics = gather(**{"gram-weights": weights})
    plain, expected, wanted = gather(**PLAIN, **{"gram-weights": weights})
    assert close(model, expected)
    assert metrics["loss"] == pytest.approx(wanted["loss"], abs=1e-6)
    assert (secure.num_examples, secure.num_clients) == (plain.num_examples, CLIENTS)
    assert secure.grams.keys() == plain.grams.keys()
    for name, gram in plain.grams.items():
        torch.testing.assert_close(secure.grams[name].triangle, gram.triangle, rtol=1e-5, atol=1e-6)
    assert secure.failures == []


def test_the_limit_of_examples_is_that_of_all_clients_together():
    strategy, *_ = gather(**{"max-examples": 80})
    assert strategy.num_examples > 80
    with pytest.raises(TooFewClients, match="not a plausible count"):
        gather(run="few", **{"max-examples": 10})


def test_quantisation_is_as_small_as_stated():
    app = Spied()
    gather(app, **PLAIN)
    replies = [reply.content for _, _, reply in app.seen]
    layout, vectors = flatten(replies[0], UNIFORM)[0], [flatten(r, UNIFORM)[1] for r in replies]
    exact = np.sum(vectors, axis=0)
    ring = FixedPoint()
    total = ring.decode(np.sum([ring.encode(v, CLIENTS) for v in vectors], axis=0))
    assert np.abs(total - exact).max() <= CLIENTS * 2.0**-33 + 1e-12
    mean = record_to_state(mean_reply(layout, total, CLIENTS)["model"])
    examples = exact[0]
    weights = np.array([v[0] for v in vectors])
    name = "4.weight"
    states = [record_to_state(r["model"])[name].double().numpy() for r in replies]
    by_hand = np.tensordot(weights, np.stack(states), 1) / examples
    half_a_float = np.abs(by_hand).max() * 2.0**-24
    bound = CLIENTS * 2.0**-33 / examples + half_a_float
    assert np.abs(mean[name].double().numpy() - by_hand).max() <= bound


def test_a_whole_run_ends_with_the_same_model(tmp_path):
    given = {"clients-per-station": 3, "rounds": 2, "gram-min-rows": 1} | UNBOUNDED
    plain = run_small(tmp_path, "plain", **given)
    secure = run_small(tmp_path, "secure", **given, **{"secure-aggregation": True})
    assert failures_of(secure) == []
    assert close(last_model(secure), last_model(plain), 1e-4)
    for one, other in zip(lines_of(plain), lines_of(secure), strict=True):
        assert other["clients"] == one["clients"]
        assert other["unseen"]["accuracy"] == pytest.approx(one["unseen"]["accuracy"], abs=0.011)


@pytest.mark.parametrize("given", [{"client-method": "fediir"}, {"gram-model": "station"}])
def test_what_is_shared_beforehand_or_measured_afterwards_is_summed_alike(tmp_path, given):
    given = given | {"rounds": 1} | UNBOUNDED
    plain = run_small(tmp_path, "plain", **given)
    secure = run_small(tmp_path, "secure", **given, **{"secure-aggregation": True})
    assert failures_of(secure) == []
    assert close(last_model(secure), last_model(plain), 1e-4)


def test_a_run_that_was_stopped_goes_on_although_its_clients_answered_already(
    tmp_path, monkeypatch
):
    given = {"clients-per-station": 3, "rounds": 2, "gram-min-rows": 1, "secure-aggregation": True}

    def stop(record, settings):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("server_app.after_round.round_line", stop)
        with pytest.raises(KeyboardInterrupt):
            run_small(tmp_path, "stopped", **given)
    run_small(tmp_path, "stopped", resume=str(tmp_path / "stopped"), **given)
    whole = run_small(tmp_path, "whole", **given)
    assert failures_of(tmp_path / "stopped") == []
    assert close(last_model(tmp_path / "stopped"), last_model(whole), 1e-4)


# --- and nothing else is seen


def test_no_reply_holds_anything_in_the_clear():
    app = Spied()
    gather(app)
    assert len(app.seen) == 6 * CLIENTS
    allowed = {
        "train": {"keys", "layout", "metrics"},
        "train.share": {"secure"},
        "train.check": {"secure"},
        "train.mask": {"masked"},
        "train.sign": {"secure"},
        "train.reveal": {"secure"},
    }
    for kind, _, reply in app.seen:
        assert set(reply.content) == allowed[kind]
        if kind == "train":
            assert set(reply.content["metrics"]) == {"seconds", "gram-seconds"}


def test_a_masked_vector_looks_like_noise():
    app = Spied()
    gather(app)
    masked = [r.content["masked"]["vector"].numpy() for kind, _, r in app.seen if "mask" in kind]
    for vector in masked:
        top = vector >> np.uint64(56)
        counts = np.bincount(top.astype(int), minlength=256)
        expected = vector.size / 256
        chi = ((counts - expected) ** 2 / expected).sum()
        assert chi < 255 + 6 * (2 * 255) ** 0.5
    again = Spied()
    gather(again, run="again")
    other = next(reply for kind, _, reply in again.seen if "mask" in kind).content["masked"]
    assert not np.array_equal(masked[0], other["vector"].numpy())


# --- clients that leave


@pytest.mark.parametrize("stage", ["train", "train.share", "train.check", "train.mask"])
def test_the_sum_of_those_who_stay_is_recovered(stage):
    strategy, model, _ = gather(Spied({(stage, 2): silent}))
    spy = Spied({("train", 2): silent})
    _, expected, _ = gather(spy, run="plain", **PLAIN)
    assert close(model, expected)
    assert strategy.num_clients == CLIENTS - 1
    assert [(f.node, f.reason) for f in strategy.failures] == [("client 2", "gone")]


@pytest.mark.parametrize("stage", ["train.sign", "train.reveal"])
def test_who_leaves_after_delivering_is_in_the_sum(stage):
    strategy, model, _ = gather(Spied({(stage, 2): silent}))
    _, expected, _ = gather(run="plain", **PLAIN)
    assert close(model, expected)
    assert (strategy.num_clients, strategy.failures) == (CLIENTS, [])


@pytest.mark.parametrize(
    "stage",
    ["train", "train.share", "train.check", "train.mask", "train.sign", "train.reveal"],
)
def test_below_the_threshold_there_is_no_sum(stage):
    app = Spied({(stage, client): silent for client in (0, 1, 3)})
    with pytest.raises(TooFewClients, match="threshold is 3"):
        gather(app)


# --- those who do not keep to the protocol


def test_a_spoilt_vector_is_noticed():
    def spoil(message, reply):
        vector = reply.content["masked"]["vector"].numpy() + np.uint64(12345)
        record = ArrayRecord({"vector": Array(vector)})
        return Message(RecordDict({"masked": record}), reply_to=message)

    with pytest.raises(TooFewClients, match="the secure sum is spoilt"):
        gather(Spied({("train.mask", 1): spoil}))


@pytest.mark.parametrize("change", ["shape", "layout"])
def test_a_reply_of_other_parts_is_left_out(change):
    def shape(message, reply):
        record = ArrayRecord({"vector": Array(np.zeros(3, dtype=np.uint64))})
        return Message(RecordDict({"masked": record}), reply_to=message)

    def layout(message, reply):
        content = RecordDict({**reply.content, "layout": ConfigRecord({"layout": "{}"})})
        return Message(content, reply_to=message)

    where = {"shape": ("train.mask", 1), "layout": ("train", 1)}[change]
    strategy, *_ = gather(Spied({where: {"shape": shape, "layout": layout}[change]}))
    assert [failure.node for failure in strategy.failures] == ["client 1"]
    assert strategy.num_clients == CLIENTS - 1


def test_a_client_does_not_answer_in_the_clear():
    settings = small_settings(**SECURE)
    state, _ = model_and_layers(settings)
    task = Task("train", settings, 1, station=0, station_round=1, client=0)
    content = RecordDict({"model": state_to_record(state), "task": task.to_record()})
    (reply,) = InProcessGrid(client_app, [0]).send_and_receive([Message(content, 0, "train")])
    assert list(reply.content) == ["failure"]
    assert "asked for a reply in the clear" in reply.content["failure"]["reason"]


@pytest.mark.parametrize("stage", ["share", "check", "mask", "sign", "reveal"])
def test_no_stage_is_answered_twice(stage):
    """Two answers with different lists of survivors would unmask one client."""
    asked: list[Message] = []

    def note(message, reply):
        asked.append(message)
        return reply

    gather(Spied({(f"train.{stage}", 0): note}))
    (reply,) = InProcessGrid(client_app, [0]).send_and_receive(
        [Message(asked[0].content, 0, f"train.{stage}")]
    )
    assert "client 0 is at stage 'finished'" in reply.content["failure"]["reason"]


def test_a_client_insists_on_the_threshold_its_noise_counts_on(monkeypatch):
    monkeypatch.setattr("station_app.secure.secure_threshold", lambda settings, asked: 2)
    # 2 of the 3 that are left is a sound threshold, but not the one agreed on
    spoil = {("train", 3): silent, ("train", 4): silent}
    with pytest.raises(TooFewClients, match="agreed threshold is 3"):
        gather(Spied(spoil))


# --- noise that is shared out


def test_shared_noise_is_smaller_by_the_root_of_the_threshold():
    """Local noise of k clients sums to sqrt(k) sigma; shared among t of them to sqrt(k/t) sigma."""
    given = {"privacy.mechanism": "example", "privacy.clip": 1.0, "gram-weights": "examples"}
    loud, quiet = given | {"privacy.sigma": 50.0}, given | {"privacy.sigma": 1e-6}

    def mean_gram(run, **how):
        settings = how | {"alpha": 1.0}
        strategy, *_ = gather(run=run, **settings)
        return strategy

    found = {}
    for name, how in (("local", PLAIN), ("secure", SECURE)):
        # without the repair, which is not linear
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Mechanism, "repaired", lambda _, gram: gram)
            noised, clean = mean_gram(name, **how, **loud), mean_gram(name + "0", **how, **quiet)
        gaps = [noised.grams[n].triangle - clean.grams[n].triangle for n in clean.grams]
        found[name] = float(torch.cat(gaps).std()) * clean.num_examples / 50.0
    assert found["local"] == pytest.approx(CLIENTS**0.5, rel=0.12)
    assert found["secure"] == pytest.approx((CLIENTS / 3) ** 0.5, rel=0.12)


def test_grams_are_found_in_the_reply_again():
    app = Spied()
    gather(app, **PLAIN)
    reply = app.seen[0][2].content
    layout, vector = flatten(reply, small_settings(**SECURE, **{"gram-weights": "examples"}))
    back = mean_reply(layout, vector, 1)
    assert layout.size == vector.size
    for name, gram in record_to_grams(reply["grams"]).items():
        torch.testing.assert_close(record_to_grams(back["grams"])[name].dense(), gram.dense())
    assert back["metrics"]["loss"] == pytest.approx(reply["metrics"]["loss"])
