"""FedHiSyn: groups by speed, hops around the ring, and who is skipped."""

import itertools

import numpy as np
import pytest
import torch
from flwr.app import Error, Message, RecordDict
from helpers import (
    SMALL,
    Saboteur,
    ask_client,
    assert_same_model,
    failures_of,
    last_model,
    lines_of,
    run_small,
    small_settings,
)
from hypothesis import given, settings
from hypothesis import strategies as st

import hfedatm.runtime.local as local
from hfedatm.base.building import build_method, build_model, build_rule, load_data
from hfedatm.base.errors import UserError
from hfedatm.base.records import Task, record_to_state, state_to_record
from hfedatm.contracts import Update
from server_app.rules.fedhisyn import (
    FedHiSyn,
    RingStation,
    grouped_by_time,
    hops_of,
    simulated_time,
)

RULE = {"server_rule": "fedhisyn"}
SEED = next(s for s in range(99) if simulated_time(s, 1, 9) < 2 and simulated_time(s, 2, 9) > 8)


def squares(groups, times):
    return sum(
        float(((np.array([times[c] for c in g]) - np.mean([times[c] for c in g])) ** 2).sum())
        for g in groups
    )


@settings(max_examples=60)
@given(st.lists(st.floats(0.1, 100), min_size=1, max_size=6), st.integers(1, 3))
def test_groups_are_the_best_k_means_of_the_times(values, count):
    times = dict(enumerate(values))
    found = grouped_by_time(times, count)
    assert sorted(c for group in found for c in group) == sorted(times)
    assert len(found) == min(count, len(set(values)))
    in_order = [times[c] for group in found for c in group]
    assert in_order == sorted(in_order)
    every = itertools.product(range(count), repeat=len(values))
    best = min(squares([[c for c in times if a[c] == g] for g in set(a)], times) for a in every)
    assert squares(found, times) == pytest.approx(best, rel=1e-6, abs=1e-9)


@settings(max_examples=60)
@given(st.lists(st.floats(1e-6, 1e9), min_size=1, max_size=8), st.integers(1, 4), st.integers(0, 5))
def test_hops_are_bounded_whatever_times_are_claimed(values, groups, ahead):
    times = dict(enumerate(values))
    for group in grouped_by_time(times, groups):
        hops = hops_of(group, times, ahead)
        assert 1 <= hops <= 1 + ahead
        assert hops * max(times[c] for c in group) <= max(values) * (1 + 1e-6)


def test_simulated_times_depend_on_seed_and_client_alone():
    times = [simulated_time(3, client, 10.0) for client in range(50)]
    assert times == [simulated_time(3, client, 10.0) for client in range(50)]
    assert times != [simulated_time(4, client, 10.0) for client in range(50)]
    assert min(times) >= 1 and max(times) <= 10 and max(times) > 2 * min(times)


class Clients:
    """Clients that multiply the received number by ten and add their own; some fail at a hop."""

    def __init__(self, fails=()):
        self.fails, self.sent, self.pushed = set(fails), [], []

    def send(self, messages):
        self.pushed.append([message.metadata.dst_node_id for message in messages])
        for message in messages:
            client = message.metadata.dst_node_id
            task = Task.from_record(message.content["task"])
            received = int(record_to_state(message.content["model"])["w"])
            self.sent.append((client, task.hop, received, message.metadata.group_id))
            if (client, task.hop) in self.fails:
                yield Message(Error(1, "gone"), reply_to=message)
            else:
                model = state_to_record({"w": torch.tensor(10 * received + client)})
                yield Message(RecordDict({"model": model}), reply_to=message)

    def hear(self, replies):
        usable = (reply for reply in replies if not reply.has_error())
        return {
            r.metadata.src_node_id: Update(
                record_to_state(r.content["model"]),
                metrics={"seconds": 10.0 * r.metadata.src_node_id},
            )
            for r in usable
        }


def ring(clients, times, station=None, **options):
    """Return the last model of every client, None for one that failed."""
    station = station or RingStation(FedHiSyn(**options))
    chosen = small_settings(**RULE)
    station.begin(Task("train", chosen, 1), {}, {}, {"seconds.7": torch.tensor(7.0)})
    station.times = lambda asked: {c: times[c] for c in asked}
    task = Task("train", chosen, 1, station_round=1)
    messages = [
        Message(
            RecordDict(
                {
                    "model": state_to_record({"w": torch.tensor(0)}),
                    "task": task.but(client=c).to_record(),
                }
            ),
            c,
            "train",
        )
        for c in times
    ]
    replies = list(station.gather(messages, clients.send, clients.hear))
    assert sorted(r.metadata.src_node_id for r in replies) == sorted(times)
    return {
        r.metadata.src_node_id: None
        if r.has_error()
        else int(record_to_state(r.content["model"])["w"])
        for r in replies
    }


def test_models_go_around_the_ring_of_fast_clients_while_the_slow_one_trains():
    clients = Clients()
    times = {1: 1.0, 2: 1.1, 3: 1.2, 9: 4.0}
    found = ring(clients, times, groups=2)
    # Three hops fit into the time of client 9: every model of the ring has been at 1, 2 and 3.
    assert found == {1: 231, 2: 312, 3: 123, 9: 9}
    assert {group for _, hop, _, group in clients.sent if hop == 2} == {"hop-2"}
    # All trained the station's model first, client 9 included: it works while the others hop.
    assert clients.pushed == [[1, 2, 3, 9], [1, 2, 3], [1, 2, 3]]
    assert clients.sent[-1][0] == 9  # and is waited for last


def test_the_times_of_a_round_are_kept_for_the_next():
    """Also of a client that does not hop, and of one that was away before."""
    station = RingStation(FedHiSyn(groups=2, speeds="measured"))
    ring(Clients(fails={(3, 0)}), {1: 1.0, 2: 1.1, 3: 1.2, 9: 4.0}, station)
    kept = {name: float(seconds) for name, seconds in station.remember().items()}
    assert kept == {"seconds.1": 10, "seconds.2": 20, "seconds.9": 90, "seconds.7": 7}
    simulated = RingStation(FedHiSyn(groups=2, speeds="simulated"))
    ring(Clients(), {1: 1.0, 9: 4.0}, simulated)
    assert simulated.remember() == {}


def test_ahead_bounds_the_hops():
    times = {1: 1.0, 2: 1.0, 9: 50.0}
    assert ring(Clients(), times, groups=2, ahead=0) == {1: 1, 2: 2, 9: 9}
    assert ring(Clients(), times, groups=2, ahead=1) == {1: 21, 2: 12, 9: 9}


def test_a_client_that_drops_out_is_skipped():
    clients = Clients(fails={(2, 1)})
    times = {1: 1.0, 2: 1.1, 3: 1.2, 9: 4.0}
    found = ring(clients, times, groups=2)
    assert found[2] is None and found[9] == 9
    # In the third hop client 3 follows client 1: both trained what the other had trained.
    assert {c: received for c, hop, received, _ in clients.sent if hop == 2} == {1: 23, 3: 31}
    assert found == {1: 231, 2: None, 3: 313, 9: 9}
    everyone = ring(Clients(fails={(c, 0) for c in (1, 2, 3)}), times, groups=2)
    assert everyone == {1: None, 2: None, 3: None, 9: 9}


def test_one_group_without_hops_is_the_mean(tmp_path):
    mean = run_small(tmp_path, "mean", server_rule="avg")
    ring = run_small(tmp_path, "ring", **RULE, rule_params="groups=1,ahead=0")
    left, right = last_model(mean), last_model(ring)
    assert all(torch.allclose(left[name], right[name], atol=1e-6) for name in left)


def test_a_run_hops_and_counts_the_bytes(tmp_path):
    plain = lines_of(run_small(tmp_path, "plain", **RULE, rule_params="ahead=0"))
    folder = run_small(tmp_path, "hops", **RULE, rule_params="spread=100")
    rounds = lines_of(folder)
    assert not any(line["failures"] for line in rounds)
    assert rounds[0]["bytes_up"]["clients"] > plain[0]["bytes_up"]["clients"]
    again = run_small(tmp_path, "again", **RULE, rule_params="spread=100")
    assert_same_model(folder, again)


def test_measured_times_are_kept_by_the_station(tmp_path):
    station = RingStation(FedHiSyn(speeds="measured"))
    task = Task("train", small_settings(**RULE), 2)
    station.begin(task, {}, {}, {"seconds.0": torch.tensor(2.0), "seconds.1": torch.tensor(0.0)})
    assert station.times([0, 1, 7]) == {0: 2.0, 1: 1e-6, 7: 2.0}
    assert station.remember().keys() == {"seconds.0", "seconds.1"}
    folder = run_small(tmp_path, **RULE, rule_params="speeds=measured", rounds=2)
    assert not any(line["failures"] or line.get("kept") for line in lines_of(folder))


@pytest.mark.parametrize("spoilt", ["nan", "silent", "late"])
def test_a_hostile_reply_costs_that_client_alone(tmp_path, monkeypatch, spoilt):
    def spoil(message, reply):
        hop = Task.from_record(message.content["task"]).hop
        if spoilt == "silent" or (spoilt == "late" and hop):
            return Message(Error(0, "gone"), reply_to=message)
        if spoilt == "nan":
            state = record_to_state(reply.content["model"])
            reply.content["model"] = state_to_record(
                {n: v * float("nan") for n, v in state.items()}
            )
        return reply

    saboteur = Saboteur(spoil, {1})
    monkeypatch.setattr(local, "client_app", saboteur)
    # Client 1 hops: with this seed it is not among the slowest of its station.
    folder = run_small(tmp_path, **RULE, rule_params="spread=100", clients_per_station=3, seed=SEED)
    assert {f["node"].split(", ")[-1] for f in failures_of(folder)} == {"client 1"}
    assert not any(line.get("kept") for line in lines_of(folder))
    assert all(bool(torch.isfinite(v).all()) for v in last_model(folder).values())


def test_memory_of_a_method_goes_on_from_hop_to_hop(policy):
    chosen = small_settings(**RULE, client_method="fedsr")
    spec = load_data(chosen).spec
    method = build_method(chosen, spec)
    model = build_model(chosen, spec, method).state_dict()
    first = record_to_state(ask_client(chosen, 0, model)["model"])
    once = record_to_state(ask_client(chosen, 0, first, hop=1)["model"])
    ask_client(chosen, 0, model)  # the station repeats the round from its start
    again = record_to_state(ask_client(chosen, 0, first, hop=1)["model"])
    assert all(torch.equal(once[name], again[name]) for name in once)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"secure_aggregation": True}, "secure-aggregation"),
        ({"dp_sgd": True, "privacy.epsilon": 1.0}, "dp-sgd"),
    ],
)
def test_settings_it_does_not_go_with_are_refused(given, words):
    with pytest.raises(UserError, match=words):
        build_rule(small_settings(**RULE, **given))


def test_a_model_goes_to_other_clients_only_if_the_owner_allows_it(policy):
    chosen = small_settings(**RULE)
    spec = load_data(chosen).spec
    model = build_model(chosen, spec, build_method(chosen, spec)).state_dict()
    own = [SMALL["dataset"], SMALL["model"]]
    policy(code={"allowed": own})
    assert build_rule(chosen).measures
    assert "privacy.model-to-peers" in ask_client(chosen, 0, model)["failure"]["reason"]
    policy(code={"allowed": own}, privacy={"model-to-peers": True})
    assert "model" in ask_client(chosen, 0, model)
