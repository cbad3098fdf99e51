"""A station's rounds, against direct computation from what its clients sent."""

import gc
import tracemalloc

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from helpers import ask_client, small_settings, tiny_data

from hfedatm.base.building import build_method, build_model
from hfedatm.base.records import (
    Task,
    grams_to_record,
    layers_to_record,
    record_to_failures,
    record_to_grams,
    record_to_state,
    state_to_record,
)
from hfedatm.base.streaming import StreamingGrid
from hfedatm_core import Gram
from hfedatm_core.robust import held
from station_app.hearing import TooFewClients
from station_app.station import run_station
from station_app.strategy import StationStrategy

LAYERS = {"fc": 3}


class Clients(StreamingGrid):
    """Clients that answer ``answer(message)`` when their reply is asked for."""

    def __init__(self, answer, clients=(0, 1)):
        self.answer, self.clients, self.messages = answer, list(clients), []

    def get_node_ids(self):
        return self.clients

    def push_messages(self, messages):
        start = len(self.messages)
        self.messages += messages
        return [str(i) for i in range(start, len(self.messages))]

    def pull_messages(self, message_ids):
        raise NotImplementedError

    def wait_for(self, message_id, sent_at, timeout):
        message = self.messages[int(message_id)]
        return Message(self.answer(message), reply_to=message)


def reply(state, examples, grams=None, **metrics):
    content = RecordDict({"model": state_to_record(state)})
    content["metrics"] = MetricRecord({"num-examples": examples, "loss": 1.0, **metrics})
    if grams:
        content["grams"] = grams_to_record(grams)
    return content


def weights(client):
    generator = torch.Generator().manual_seed(client)
    return {"fc.weight": torch.randn(2, 3, generator=generator), "fc.bias": torch.ones(2) * client}


def gram(client, rows=5):
    x = torch.randn(rows, 3, generator=torch.Generator().manual_seed(100 + client))
    return Gram.from_dense(x.T @ x / rows, rows=rows)


def task_of(message):
    return Task.from_record(message.content["task"])


def run(grid, settings, layers=LAYERS, kind="train"):
    content = RecordDict(
        {
            "task": Task(kind, settings, round=1, station=0).to_record(),
            "model": state_to_record(weights(50)),
            "layers": layers_to_record(layers),
        }
    )
    return run_station(grid, content)


def test_the_station_model_is_the_example_weighted_mean():
    examples = {0: 10, 1: 30}
    grid = Clients(lambda m: reply(weights(c := task_of(m).client), examples[c], {"fc": gram(c)}))
    found = run(grid, small_settings(station_rounds=1))
    state = record_to_state(found.array_records["model"])
    for name in state:
        expected = 0.25 * weights(0)[name] + 0.75 * weights(1)[name]
        torch.testing.assert_close(state[name], expected)
    metrics = found.metric_records["metrics"]
    assert (metrics["num-examples"], metrics["num-clients"]) == (40, 2)


@pytest.mark.parametrize("weighting, shares", [("uniform", (0.5, 0.5)), ("examples", (0.25, 0.75))])
def test_grams_are_averaged_and_shrunk(weighting, shares):
    examples = {0: 10, 1: 30}
    grid = Clients(lambda m: reply(weights(c := task_of(m).client), examples[c], {"fc": gram(c)}))
    settings = small_settings(station_rounds=1, alpha=0.6, gram_weights=weighting)
    found = record_to_grams(run(grid, settings).array_records["grams"])["fc"].dense()
    mean = shares[0] * gram(0).dense() + shares[1] * gram(1).dense()
    expected = 0.6 * mean + 0.4 * torch.diag(torch.diag(mean))
    torch.testing.assert_close(found, expected)


def test_loss_is_the_example_weighted_mean():
    def answer(message):
        client = task_of(message).client
        return reply(weights(client), 10 + 20 * client, {"fc": gram(client)}, loss=float(client))

    found = run(Clients(answer), small_settings(station_rounds=1))
    assert found.metric_records["metrics"]["loss"] == pytest.approx(30 / 40)


def test_every_station_round_sends_the_current_station_model():
    def answer(message):
        received = record_to_state(message.content["model"])
        trained = {name: value + 1.0 + task_of(message).client for name, value in received.items()}
        grams = {"fc": gram(0)} if task_of(message).send_grams else None
        return reply(trained, 10, grams)

    grid = Clients(answer)
    found = run(grid, small_settings(station_rounds=3))
    sent = [record_to_state(m.content["model"])["fc.bias"][0].item() for m in grid.messages]
    assert sent == [50.0, 50.0, 51.5, 51.5, 53.0, 53.0]
    final = record_to_state(found.array_records["model"])["fc.bias"]
    torch.testing.assert_close(final, torch.full((2,), 54.5))
    tasks = [task_of(m) for m in grid.messages]
    assert [t.station_round for t in tasks] == [1, 1, 2, 2, 3, 3]
    assert [t.send_grams for t in tasks] == [False] * 4 + [True] * 2


def test_a_rule_without_grams_asks_for_none():
    grid = Clients(lambda m: reply(weights(0), 10))
    found = run(grid, small_settings(server_rule="avg"), layers={})
    assert not any(task_of(m).send_grams for m in grid.messages)
    assert "grams" not in found.array_records
    assert found.metric_records["metrics"]["gram-bytes-up"] == 0


def test_bytes_up_count_all_rounds_and_the_grams_apart():
    grid = Clients(lambda m: reply(weights(0), 10, {"fc": gram(0)} if m.content else None))
    found = run(grid, small_settings(station_rounds=2)).metric_records["metrics"]
    one = reply(weights(0), 10, {"fc": gram(0)})
    each = sum(record.count_bytes() for record in one.array_records.values())
    assert found["bytes-up"] == 4 * each
    assert found["gram-bytes-up"] == 2 * one.array_records["grams"].count_bytes()


class TestQuorum:
    def answer(self, bad):
        def of(message):
            client = task_of(message).client
            if client in bad:
                return RecordDict({"failure": ConfigRecord({"reason": f"client {client} is ill"})})
            return reply(weights(client), 10, {"fc": gram(client)})

        return of

    def test_enough_answers_leave_the_failed_out_and_name_them(self):
        grid = Clients(self.answer({2}), range(4))
        found = run(grid, small_settings(station_rounds=1, client_quorum=0.75))
        expected = sum(weights(c)["fc.weight"] for c in (0, 1, 3)) / 3
        torch.testing.assert_close(
            record_to_state(found.array_records["model"])["fc.weight"], expected
        )
        [failure] = record_to_failures(found.config_records["failures"])
        assert (failure.node, failure.reason) == ("client 2", "client 2 is ill")

    def test_too_few_answers_fail_the_station_with_every_reason(self):
        grid = Clients(self.answer({1, 2}), range(4))
        with pytest.raises(TooFewClients) as caught:
            run(grid, small_settings(station_rounds=1, client_quorum=0.75))
        assert str(caught.value) == (
            "2 of 4 clients answered, 3 are needed: "
            "client 1: client 1 is ill; client 2: client 2 is ill"
        )

    def test_the_quorum_counts_clients_that_have_not_connected(self):
        """Two of five are there: both answer, and three are needed."""
        half = small_settings(station_rounds=1, client_quorum=0.5, clients_per_station=5)
        with pytest.raises(TooFewClients) as caught:
            run(Clients(self.answer(set())), half)
        assert str(caught.value) == "2 of 5 clients answered, 3 are needed: 3 have not connected"
        run(Clients(self.answer(set()), range(3)), half)

    def test_even_without_a_quorum_somebody_must_answer(self):
        grid = Clients(self.answer({0, 1}))
        with pytest.raises(TooFewClients, match="0 of 2 clients answered, 1 are needed"):
            run(grid, small_settings(station_rounds=1, client_quorum=0.0))

    def test_a_station_without_clients_says_so(self):
        with pytest.raises(TooFewClients, match="it has no clients"):
            run(Clients(self.answer(set()), ()), small_settings())


class TestDraw:
    def drawn(self, fraction, station_round, clients=range(10), seed=0):
        settings = small_settings(client_fraction=fraction, station_rounds=9, seed=seed)
        strategy = StationStrategy(Task("train", settings, round=1, station=0), {})
        grid = Clients(None, clients)
        arrays = state_to_record(weights(0))
        messages = strategy.configure_train(station_round, arrays, ConfigRecord(), grid)
        return [m.metadata.dst_node_id for m in messages]

    def test_the_share_is_drawn_anew_each_round_and_by_seed(self):
        first, second = self.drawn(0.3, 1), self.drawn(0.3, 2)
        assert len(first) == len(second) == 3
        assert first != second
        assert first == self.drawn(0.3, 1)
        assert first != self.drawn(0.3, 1, seed=1)

    def test_all_or_at_least_one(self):
        assert self.drawn(1.0, 1) == list(range(10))
        assert len(self.drawn(0.01, 1)) == 1

    def test_everyone_evaluates(self):
        strategy = StationStrategy(Task("evaluate", small_settings(client_fraction=0.1), round=1))
        grid = Clients(None, range(10))
        arrays = state_to_record(weights(0))
        assert len(strategy.configure_evaluate(1, arrays, ConfigRecord(), grid)) == 10


def test_evaluation_adds_up_counts_also_of_clients_without_validation_examples():
    answers = {0: (3, 4, 0.5), 1: (1, 6, 1.0), 2: (0, 0, 0.0)}

    def answer(message):
        correct, count, loss = answers[task_of(message).client]
        metrics = MetricRecord({"correct": correct, "num-examples": count, "loss": loss})
        return RecordDict({"metrics": metrics})

    found = run(Clients(answer, range(3)), small_settings(), kind="evaluate")
    metrics = found.metric_records["metrics"]
    assert (metrics["correct"], metrics["num-examples"], metrics["loss-sum"]) == (4, 10, 8.0)
    assert record_to_failures(found.config_records["failures"]) == []


@pytest.mark.parametrize(
    "metrics",
    [
        {"num-examples": 5, "loss": 1.0},
        {"num-examples": 5, "correct": 6, "loss": 1.0},
        {"num-examples": -5, "correct": 0, "loss": 1.0},
        {"num-examples": 5, "correct": 1},
    ],
)
def test_impossible_evaluations_are_left_out(metrics):
    def answer(message):
        good = {"correct": 2, "num-examples": 4, "loss": 1.0}
        return RecordDict({"metrics": MetricRecord(metrics if task_of(message).client else good)})

    found = run(Clients(answer), small_settings(), kind="evaluate")
    assert found.metric_records["metrics"]["num-examples"] == 4
    [failure] = record_to_failures(found.config_records["failures"])
    assert failure.node == "client 1" and failure.reason.startswith("metrics: ")


def test_memory_does_not_grow_with_the_number_of_clients(monkeypatch):
    """Replies of 1 MB each: what a station holds at its peak is the same for 3 and for 24."""
    monkeypatch.setattr(held, "MEMORY", 2_000_000)  # a part of the usual, to need fewer clients
    size = 256 * 1024

    def answer(message):
        return RecordDict(
            {
                "model": ArrayRecord([np.full(size, 1.0, dtype=np.float32)]),
                "metrics": MetricRecord({"num-examples": 1, "loss": 0.0}),
            }
        )

    def peak(clients):
        grid = Clients(answer, range(clients))
        settings = small_settings(server_rule="avg", station_rounds=1)
        strategy = StationStrategy(Task("train", settings, round=1, station=0))
        arrays = ArrayRecord([np.zeros(size, dtype=np.float32)])
        messages = strategy.configure_train(1, arrays, ConfigRecord(), grid)
        gc.collect()
        tracemalloc.start()
        try:
            strategy.aggregate_train(1, grid.send_and_receive(messages))
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    peak(2)  # whatever is loaded on first use
    few, many = peak(3), peak(24)
    assert many - few < 4 * size, f"{few} bytes with 3 clients, {many} with 24"


def test_with_real_clients_the_station_averages_what_they_send_alone():
    settings = small_settings(station_rounds=1)
    model = build_model(settings, tiny_data().spec, build_method(settings)).state_dict()

    def answer(message):
        task = task_of(message)
        return ask_client(
            settings, task.client, record_to_state(message.content["model"]),
            send_grams=task.send_grams,
        )  # fmt: skip

    content = RecordDict(
        {
            "task": Task("train", settings, round=1, station=0).to_record(),
            "model": state_to_record(model),
            "layers": layers_to_record({"4": 36, "6": 16}),
        }
    )
    found = run_station(Clients(answer), content)
    alone = [ask_client(settings, c, model, send_grams=True) for c in (0, 1)]
    counts = [r.metric_records["metrics"]["num-examples"] for r in alone]
    states = [record_to_state(r.array_records["model"]) for r in alone]
    for name, value in record_to_state(found.array_records["model"]).items():
        mean = (counts[0] * states[0][name] + counts[1] * states[1][name]) / sum(counts)
        torch.testing.assert_close(value, mean, rtol=1e-5, atol=1e-6)
    grams = [record_to_grams(r.array_records["grams"]) for r in alone]
    for name, value in record_to_grams(found.array_records["grams"]).items():
        mean = (grams[0][name].dense() + grams[1][name].dense()) / 2
        expected = 0.75 * mean + 0.25 * torch.diag(torch.diag(mean))
        torch.testing.assert_close(value.dense(), expected, rtol=1e-5, atol=1e-6)
