"""Clients and stations that fail: left out, named with their error, and the run goes on."""

import contextlib
import math
import threading
from queue import Empty, SimpleQueue

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from helpers import (
    SMALL,
    Saboteur,
    assert_same_model,
    failures_of,
    last_model,
    lines_of,
    log_lines,
    run_small,
    small_settings,
)

import hfedatm.runtime.in_process as in_process
import hfedatm.runtime.local as local
from hfedatm.base.answering import reply_with_failure
from hfedatm.base.errors import UserError
from hfedatm.base.records import grams_to_record, record_to_state, state_to_record
from hfedatm.contracts import Method, Rule
from hfedatm_core import FactorGram, Gram, merge

GUILTY = 1  # of the clients 0 and 1 of station 0


def replying(**records):
    """Replace records of the honest reply; None removes one."""

    def spoil(message, reply):
        content = {**reply.content}
        for key, change in records.items():
            if change is None:
                content.pop(key, None)
            elif key in content:
                content[key] = change(content[key])
        return Message(RecordDict(content), reply_to=message)

    return spoil


def tensors(change):
    return lambda record: state_to_record(change(record_to_state(record)))


def with_nan(state):
    state["4.weight"][0, 0] = math.nan
    return state


def with_infinity(state):
    state["0.bias"][1] = -math.inf
    return state


def transposed(state):
    return {name: t.T if name == "4.weight" else t for name, t in state.items()}


def short(state):
    return {name: t for name, t in state.items() if name != "6.bias"}


def long(state):
    return {**state, "6.extra": torch.zeros(3)}


def doubled(state):
    return {name: t.double() for name, t in state.items()}


def garbage(record):
    arrays = {**record}
    arrays["4.weight"] = Array("float32", (16, 36), "numpy.ndarray", b"\x93NUMPY garbage")
    return ArrayRecord(arrays)


def pickled(record):
    arrays = {**record}
    arrays["4.weight"] = Array(np.zeros((16, 36), np.float32))
    arrays["4.weight"].data = b"\x80\x04cos\nsystem\n."
    return ArrayRecord(arrays)


def metrics(**changes):
    return lambda record: MetricRecord({**record, **changes})


def gram_of(width):
    def change(record):
        return grams_to_record({"4": Gram.from_dense(torch.eye(width)), "6": some_gram(16)})

    return change


def some_gram(width):
    return Gram.from_dense(torch.eye(width), rows=90)


def factored(record):
    return grams_to_record({"4": FactorGram(torch.ones(2, 36), rows=90), "6": some_gram(16)})


def indefinite(record):
    """Of an ordinary size, with entries that its diagonal does not allow."""
    matrix = 2 * torch.eye(36) - 1
    return grams_to_record({"4": Gram.from_dense(matrix, rows=90), "6": some_gram(16)})


def gram_nan(record):
    arrays = {name: array.numpy().copy() for name, array in record.items()}
    arrays["0/triangle"][0] = math.nan
    return ArrayRecord({name: Array(value) for name, value in arrays.items()})


def raising(message, reply):
    raise RuntimeError("disk on fire")


def exiting(message, reply):
    raise SystemExit(3)


FAULTS = {
    "raises": (raising, "RuntimeError: disk on fire"),
    "exits": (exiting, "SystemExit: 3"),
    "nan": (replying(model=tensors(with_nan)), "4.weight has values that are not finite"),
    "infinity": (replying(model=tensors(with_infinity)), "0.bias has values that are not finite"),
    "wrong shape": (
        replying(model=tensors(transposed)),
        "4.weight has shape (36, 16), not (16, 36)",
    ),
    "missing tensor": (replying(model=tensors(short)), "missing tensors ['6.bias']"),
    "extra tensor": (replying(model=tensors(long)), "unknown tensors ['6.extra']"),
    "wrong type": (
        replying(model=tensors(doubled)),
        "0.weight has type torch.float64, not torch.float32",
    ),
    "garbage bytes": (replying(model=garbage), "4.weight cannot be read"),
    "a pickle": (replying(model=pickled), "4.weight cannot be read"),
    "no model": (replying(model=None), "reply has no 'model' arrays"),
    "no metrics": (replying(metrics=None), "reply has no 'metrics'"),
    "no Grams": (replying(grams=None), "reply has no 'grams' arrays"),
    "narrow Gram": (replying(grams=gram_of(35)), "grams: 4 is 35 wide, not 36"),
    "Gram in another form": (replying(grams=factored), "grams: 4 has the wrong form"),
    "indefinite Gram": (
        replying(grams=indefinite),
        "grams: 4 is not positive semi-definite, as every Gram is",
    ),
    "Gram with NaN": (replying(grams=gram_nan), "grams cannot be read: Gram of layer '4'"),
    "huge count": (
        replying(metrics=metrics(**{"num-examples": 10**15})),
        "num-examples = 1000000000000000 is not a plausible count (1 to 1e+06",
    ),
    "negative count": (
        replying(metrics=metrics(**{"num-examples": -3})),
        "num-examples = -3 is not a plausible count",
    ),
    "half a count": (
        replying(metrics=metrics(**{"num-examples": 1.5})),
        "num-examples = 1.5 is not a plausible count",
    ),
    "NaN loss": (replying(metrics=metrics(loss=math.nan)), "loss = nan is not a finite number"),
    "list for a loss": (replying(metrics=metrics(loss=[1.0, 2.0])), "loss = [1.0, 2.0] is not a"),
    "no loss": (
        replying(metrics=lambda r: MetricRecord({"num-examples": r["num-examples"]})),
        "metrics: loss missing",
    ),
    "empty reply": (lambda message, reply: Message(RecordDict(), reply_to=message), "reply has no"),
}


@pytest.fixture
def sabotage(monkeypatch):
    def install(spoil, clients=(GUILTY,), message_type="train"):
        saboteur = Saboteur(spoil, set(clients), message_type)
        monkeypatch.setattr(local, "client_app", saboteur)
        return saboteur

    return install


@pytest.mark.parametrize("fault", FAULTS)
def test_a_failing_client_is_left_out_and_named(tmp_path, sabotage, fault):
    spoil, reason = FAULTS[fault]
    sabotage(spoil)
    with log_lines() as lines:
        folder = run_small(tmp_path, rounds=1, station_rounds=1)
    [failure] = failures_of(folder)
    assert failure["node"] == "station 0, client 1"
    assert reason in failure["reason"]
    assert any("left out: station 0, client 1" in line and reason in line for line in lines)
    [record] = lines_of(folder)
    assert record["clients"]["answered"] == 3
    assert record["stations"] == {"asked": 2, "answered": 2}
    assert "kept" not in record
    assert all(torch.isfinite(t).all() for t in last_model(folder).values())


def test_what_a_failing_client_sent_has_no_influence(tmp_path, sabotage):
    """The result is that of a station whose client 1 answered nothing at all."""
    sabotage(replying(model=tensors(with_nan)))
    one = run_small(tmp_path, "nan", rounds=1)
    sabotage(raising)
    other = run_small(tmp_path, "silent", rounds=1)
    assert_same_model(one, other)


def test_a_late_client_is_left_out(tmp_path, sabotage, monkeypatch):
    began, end = threading.Event(), threading.Event()

    def late(message, reply):
        began.set()
        end.wait()
        return reply

    class Answers(SimpleQueue):
        """The time is up when the late client is at it, and never for another."""

        def get(self, timeout):
            assert timeout == 3
            while not began.is_set():
                with contextlib.suppress(Empty):
                    return super().get(timeout=0.01)
            began.clear()
            raise Empty

    monkeypatch.setattr(in_process, "SimpleQueue", Answers)
    sabotage(late)
    folder = run_small(tmp_path, rounds=1, station_rounds=1, client_timeout=3)
    end.set()
    reasons = {f["node"]: f["reason"] for f in failures_of(folder)}
    assert reasons == {"station 0, client 1": "no reply within 3 s"}


def test_a_reply_that_is_too_large_is_dropped(tmp_path, sabotage):
    def large(message, reply):
        extra = ArrayRecord({"x": Array(np.zeros(400_000, np.float32))})
        return Message(RecordDict({**reply.content, "junk": extra}), reply_to=message)

    sabotage(large)
    folder = run_small(tmp_path, rounds=1, station_rounds=1)
    [failure] = failures_of(folder)
    assert "reply of 1.6 MB is larger than the 0.3 MB that one of this model" in failure["reason"]


def test_a_client_that_fails_before_the_round_is_left_out_of_the_average(tmp_path, sabotage):
    sabotage(raising, message_type="train.prepare")
    folder = run_small(tmp_path, rounds=1, station_rounds=1, client_method="fediir")
    [failure] = failures_of(folder)
    assert failure["node"] == "station 0, client 1" and "disk on fire" in failure["reason"]
    assert lines_of(folder)[0]["clients"]["answered"] == 4, "it may still train"


def test_a_client_that_cannot_evaluate_is_left_out_of_the_score(tmp_path, sabotage):
    sabotage(raising, message_type="evaluate")
    folder = run_small(tmp_path, rounds=1, station_rounds=1)
    [failure] = failures_of(folder)
    assert failure["node"] == "station 0, client 1"
    assert 0 <= lines_of(folder)[0]["source"]["accuracy"] <= 1


def test_a_client_that_fails_every_step_is_named_once_in_a_round(tmp_path, monkeypatch):
    def failing(message, context):
        if message.metadata.dst_node_id == GUILTY:
            return reply_with_failure(message, ValueError("gone"))
        return honest(message, context)

    honest = local.client_app
    monkeypatch.setattr(local, "client_app", failing)
    folder = run_small(tmp_path, rounds=2, station_rounds=1, client_method="fediir")
    for record in lines_of(folder):
        assert record["failures"] == [{"node": "station 0, client 1", "reason": "ValueError: gone"}]


def test_a_station_under_its_quorum_is_left_out_with_its_clients_errors(tmp_path, sabotage):
    sabotage(raising)
    folder = run_small(tmp_path, rounds=1, station_rounds=1, client_quorum=1.0)
    [record] = lines_of(folder)
    assert record["stations"] == {"asked": 2, "answered": 1}
    [failure] = record["failures"]
    assert failure["node"] == "station 0"
    assert "TooFewClients: 1 of 2 clients answered, 2 are needed" in failure["reason"]
    assert "client 1: RuntimeError: disk on fire" in failure["reason"]
    assert [s["name"] for s in record["per_station"]] == ["station 1"]


def test_too_few_stations_keep_the_old_model_and_the_run_goes_on(tmp_path, sabotage):
    sabotage(raising, clients=(0, 1))
    with log_lines() as lines, pytest.raises(UserError, match="no round changed the model"):
        run_small(tmp_path, station_quorum=1.0)
    folder = tmp_path / "run"
    records = lines_of(folder)
    assert [r["round"] for r in records] == [1, 2]
    assert all(r["kept"] == "1 of 2 stations usable, 2 needed" for r in records)
    assert sum("MODEL KEPT: 1 of 2 stations usable, 2 needed" in line for line in lines) == 2
    fresh = run_small(tmp_path, "fresh", rounds=1, server_rule=__name__ + ":Unchanged")
    assert_same_model(folder, fresh)


def test_nothing_usable_keeps_the_old_model_and_says_so(tmp_path, sabotage):
    sabotage(raising, clients=range(4))
    with pytest.raises(UserError, match="no round changed the model; round 1: 0 of 2 stations"):
        run_small(tmp_path, rounds=1, station_rounds=1)
    folder = tmp_path / "run"
    [record] = lines_of(folder)
    assert record["kept"] == "0 of 2 stations usable, 1 needed"
    assert {f["node"] for f in record["failures"]} == {"station 0", "station 1"}
    assert (folder / "summary.json").is_file()


def test_a_failed_round_is_made_up_for_by_the_next(tmp_path, sabotage):
    calls = []

    def second_round_only(message, reply):
        calls.append(1)
        if 4 < len(calls) <= 8:  # each round is one answer of four clients
            raise RuntimeError("not today")
        return reply

    sabotage(second_round_only, clients=range(4))
    folder = run_small(tmp_path, station_rounds=1, rounds=3)
    one, two, three = lines_of(folder)
    assert "kept" in two and "kept" not in one and "kept" not in three
    assert three["failures"] == [] and three["clients"]["answered"] == 4


def test_the_quorum_counts_stations_that_have_not_connected(tmp_path, monkeypatch):
    monkeypatch.setattr(local.LocalStationsGrid, "get_node_ids", lambda self: [0])
    with pytest.raises(UserError, match="1 of 4 stations usable, 2 needed$"):
        run_small(tmp_path, stations=4, clients_per_station=1, gram_min_rows=1, rounds=1)
    assert lines_of(tmp_path / "run")[0]["stations"] == {"asked": 4, "answered": 1}
    enough = {"stations": 4, "clients_per_station": 1, "gram_min_rows": 1, "station_quorum": 0.25}
    run_small(tmp_path, "enough", rounds=1, **enough)


def test_a_run_of_which_nobody_takes_part_in_round_1_ends_there(tmp_path, sabotage):
    def never(message, reply):
        raise RuntimeError("not today")

    sabotage(never, clients=range(4))
    with pytest.raises(UserError, match=r"no round changed the model; .*RuntimeError: not today"):
        run_small(tmp_path, rounds=50)
    assert len(lines_of(tmp_path / "run")) == 1
    assert (tmp_path / "run" / "summary.json").is_file()


class Unchanged(Rule):
    """Returns the model it started from."""

    def merge(self, updates, situation):
        merged = merge(updates, situation.graph, fot=False, regmean=False)
        merged.state.update(situation.previous)
        return merged


class Poisoned(Unchanged):
    def merge(self, updates, situation):
        merged = super().merge(updates, situation)
        merged.state["4.weight"] = merged.state["4.weight"] * math.nan
        return merged


class Impatient(Unchanged):
    """Gives up after the first station."""

    def merge(self, updates, situation):
        next(iter(updates))
        raise ValueError("too slow for me")


@pytest.mark.parametrize(
    "rule, why",
    [
        ("Poisoned", "merge: 4.weight of the merged model is not finite"),
        ("Impatient", "merge: too slow for me"),
    ],
)
def test_a_merge_that_fails_keeps_the_old_model(tmp_path, rule, why):
    with pytest.raises(UserError, match=f"no round changed the model; round 1: {why}"):
        run_small(tmp_path, server_rule=f"{__name__}:{rule}")
    folder = tmp_path / "run"
    records = lines_of(folder)
    assert [r["kept"] for r in records] == [why, why]
    assert records[0]["failures"] == [{"node": "server", "reason": why}]
    fresh = run_small(tmp_path, "fresh", rounds=1, server_rule=__name__ + ":Unchanged")
    assert_same_model(folder, fresh)


class Grumpy(Method):
    """A plug-in whose loss fails, though not with the first batch."""

    calls = 0

    def loss(self, model, inputs, targets):
        self.calls += 1
        if self.calls > 1:
            raise ArithmeticError("I do not like these numbers")
        return super().loss(model, inputs, targets)


def test_an_error_in_a_users_method_reaches_the_person_with_its_place(tmp_path):
    with pytest.raises(UserError, match="no round changed the model"):
        run_small(tmp_path, rounds=1, client_method=__name__ + ":Grumpy")
    reasons = [f["reason"] for f in failures_of(tmp_path / "run")]
    assert len(reasons) == 2
    for reason in reasons:
        assert "ArithmeticError: I do not like these numbers (loss, test_faults.py:" in reason


def test_the_small_federation_has_no_failures_of_its_own(tmp_path):
    """Else the tests above would prove nothing."""
    folder = run_small(tmp_path)
    assert failures_of(folder) == []
    assert len(lines_of(folder)) == SMALL["rounds"]
    assert small_settings().num_clients == 4
