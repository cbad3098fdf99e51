"""One hostile client or station of a small federation: the model ends about as good without it.

Every attack destroys the model, or decides it, when the defences are off; the last tests show that
the attacks are real.
"""

import sys
from pathlib import Path

import pytest
import torch
from flwr.app import MetricRecord
from helpers import assert_same_model, failures_of, last_model, lines_of, log_lines, run_small

import hfedatm.runtime.local as local
import hfedatm.runtime.stations as stations
from hfedatm.base.errors import UserError
from hfedatm.base.records import Task

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from attacks import ABSENT, ATTACKS, HONEST, hostile

SHAPES = {
    "client": {"stations": 1, "clients_per_station": 5},
    "station": {"stations": 5, "clients_per_station": 1},
}
OFF = {"bound_factor": 0, "claim_factor": 0, "least_agreement": 0, "max_fall": 0}
TRAINING = {"rounds": 3, "station_rounds": 1, "local_epochs": 4, "lambda": 1.0, "gram_min_rows": 1}
ROBUST = ("median", "trimmed-mean", "multi-krum", "geometric-median", "record")


def run(folder, attack, tier, name="run", **given) -> Path:
    with hostile(attack, tier):
        return run_small(folder, name, **{**SHAPES[tier], **TRAINING, **given})


def scores(folder) -> dict[str, float]:
    last = lines_of(folder)[-1]
    return {kind: last[kind]["accuracy"] for kind in ("unseen", "source")}


@pytest.fixture(scope="module")
def absent(tmp_path_factory):
    """The runs without the node."""
    return {t: run(tmp_path_factory.mktemp(t), ABSENT, t) for t in SHAPES}


@pytest.mark.parametrize("tier", SHAPES)
@pytest.mark.parametrize("attack", ATTACKS)
def test_the_model_is_as_good_as_without_the_node(tmp_path, absent, attack, tier):
    folder = run(tmp_path, attack, tier)
    assert len(lines_of(folder)) == 3
    for kind, wanted in scores(absent[tier]).items():
        assert scores(folder)[kind] >= wanted - 0.05, kind
    assert all(torch.isfinite(value).all() for value in last_model(folder).values())


@pytest.mark.parametrize("tier", SHAPES)
@pytest.mark.parametrize("rule", ROBUST)
@pytest.mark.parametrize("attack", ["update × −10", "claim at the limit, sign flip", "slow drift"])
def test_with_a_robust_rule_too(tmp_path, absent, attack, rule, tier):
    folder = run(tmp_path, attack, tier, robust_clients=rule, robust_stations=rule)
    for kind, wanted in scores(absent[tier]).items():
        assert scores(folder)[kind] >= wanted - 0.05, kind


@pytest.mark.parametrize("tier", SHAPES)
@pytest.mark.parametrize("honest_part", [0.2, 0.5])
def test_a_shift_as_far_as_the_bound_that_is_honest_in_part_does_little(
    tmp_path, absent, monkeypatch, honest_part, tier
):
    def shift(sent) -> None:
        def change(start, move):
            side = torch.arange(start.numel(), dtype=start.dtype).cos().sign().view(start.shape)
            length = move.norm() / start.numel() ** 0.5
            return start + honest_part * move + 2 * (1 - honest_part) * length * side

        sent.move(change)

    monkeypatch.setitem(ATTACKS, "shift", shift)
    folder = run(tmp_path, "shift", tier)
    for kind, wanted in scores(absent[tier]).items():
        assert scores(folder)[kind] >= wanted - 0.05, kind
    if honest_part == 0.2:  # too little to be taken for honest
        assert_same_model(folder, absent[tier])


@pytest.mark.parametrize("tier", SHAPES)
@pytest.mark.parametrize("attack", ["sign flip", "noise", "free rider", "largest float32", "NaN"])
def test_who_is_left_out_changes_nothing_and_is_named(tmp_path, absent, attack, tier):
    folder = run(tmp_path, attack, tier)
    assert_same_model(folder, absent[tier])
    named = {failure["node"] for failure in failures_of(folder)}
    assert named == {"station 0, client 0" if tier == "client" else "station 0"}


def test_the_log_says_in_one_line_who_was_left_out_and_why(tmp_path):
    with log_lines() as lines:
        run(tmp_path, "sign flip", "client")
    said = [line for line in lines if "left out" in line and "absent" not in line]
    assert len(said) == 3  # one a round
    assert all("station 0, client 0: agreement -" in line and "\n" not in line for line in said)


@pytest.mark.parametrize(
    "tier, attack",
    [
        ("client", "update × −10"),
        ("client", "claim at the limit, sign flip"),
        ("station", "claim at the limit, sign flip"),
    ],
)
def test_the_attack_is_real(tmp_path, absent, attack, tier):
    try:
        found = scores(run(tmp_path, attack, tier, **OFF))["source"]
    except (UserError, KeyError):  # not one round that changed the model, or none to evaluate
        found = 0.0
    assert found < scores(absent[tier])["source"] - 0.2


@pytest.mark.parametrize("tier", SHAPES)
def test_honest_runs_are_the_same_with_and_without_defences_where_nothing_is_cut(tmp_path, tier):
    wide = {"bound_factor": 100, "claim_factor": 100, "least_agreement": 0.01}
    for name, given in (("wide", wide), ("off", OFF)):
        run(tmp_path, HONEST, tier, name, **given)
    assert_same_model(tmp_path / "wide", tmp_path / "off")
    assert failures_of(tmp_path / "wide") == []


def test_a_cut_is_in_the_record_and_in_the_log(tmp_path):
    """One tensor of one client, a thousand times: too little to leave it out, enough to cut."""

    def far(sent) -> None:
        start = sent.received["0.bias"]
        sent.trained["0.bias"] = start + 1000 * (sent.trained["0.bias"] - start)

    ATTACKS["one tensor"] = far
    try:
        with log_lines() as lines:
            folder = run(tmp_path, "one tensor", "client")
    finally:
        del ATTACKS["one tensor"]
    cuts = [cut for record in lines_of(folder) for cut in record["cuts"]]
    assert {cut["node"] for cut in cuts} == {"station 0, client 0"}
    assert all("0.bias" in cut["reason"] for cut in cuts)
    assert any("cut back: station 0, client 0" in line for line in lines)


# --- what nodes say of the model


def evaluating(monkeypatch, lie, node=0):
    """Let a station lie about its evaluation: ``lie(round, metrics)`` changes the numbers."""
    honest = stations.LocalStationsGrid

    class Lying(honest):
        def _work(self, message):
            reply = super()._work(message)
            if message.metadata.message_type == "evaluate" and message.metadata.dst_node_id == node:
                number = Task.from_record(message.content["task"]).round
                metrics = dict(reply.content["metrics"])
                lie(number, metrics)
                reply.content["metrics"] = MetricRecord(metrics)
            return reply

    monkeypatch.setattr(stations, "LocalStationsGrid", Lying)


def only(correct, examples, metrics):
    for name in list(metrics):
        if "/" in name:
            del metrics[name]
    metrics |= {"correct": correct, "num-examples": examples, "loss-sum": 0.0}


def test_no_station_decides_alone_which_model_is_the_best(tmp_path, monkeypatch):
    honest = run(tmp_path, HONEST, "station", "honest")
    best = max(lines_of(honest), key=lambda r: r["source"]["accuracy"])["round"]
    assert best != 1  # or else the lie would change nothing

    def lie(number, metrics):
        only(1_000_000 if number == 1 else 0, 1_000_000, metrics)

    evaluating(monkeypatch, lie)
    lied = run(tmp_path, HONEST, "station", "lied")
    rounds = lines_of(lied)
    assert max(rounds, key=lambda r: r["source"]["score"])["round"] == best
    assert not any("taken_back" in record for record in rounds)  # nor takes one back


def test_counts_of_a_client_are_bounded_by_those_of_the_others(tmp_path, monkeypatch):
    app = local.client_app

    def lying(message, context):
        reply = app(message, context)
        if message.metadata.message_type == "evaluate" and message.metadata.dst_node_id == 0:
            metrics = dict(reply.content["metrics"])
            only(0, 1_000_000, metrics)
            reply.content["metrics"] = MetricRecord({**metrics, "loss": 1.0})
        return reply

    monkeypatch.setattr(local, "client_app", lying)
    folder = run(tmp_path, HONEST, "client")
    # Three of the seven parts that count are the liar's; unbounded, it would be all of them.
    assert lines_of(folder)[-1]["source"]["accuracy"] > 0.4


# --- a round that is taken back


def ruin(monkeypatch, rounds, factor=-1.0):
    """Let the server's merge return a model that is worth nothing in some rounds."""
    from server_app.rules.hfedatm import HFedATM

    merge = HFedATM.merge

    def ruined(self, updates, situation):
        merged = merge(self, updates, situation)
        if situation.round in rounds:
            tensors = [*merged.state.values(), *merged.average.values()]
            for value in {id(tensor): tensor for tensor in tensors}.values():
                value.mul_(factor)
        return merged

    monkeypatch.setattr(HFedATM, "merge", ruined)


@pytest.mark.parametrize("broadcast", ["merged", "average"])
def test_a_round_that_ruins_the_model_is_taken_back(tmp_path, monkeypatch, broadcast):
    ruin(monkeypatch, {3})
    given = TRAINING | {"rounds": 4, "broadcast": broadcast}
    with log_lines() as lines:
        folder = run_small(tmp_path, **given)
    rounds = lines_of(folder)
    assert ["taken_back" in record for record in rounds] == [False, False, True, False]
    assert rounds[2]["taken_back"].startswith("source accuracy fell from ")
    assert rounds[2]["source"] == rounds[1]["source"]
    assert rounds[2]["unseen"]["accuracy"] == rounds[1]["unseen"]["accuracy"]
    assert rounds[3]["source"]["accuracy"] >= rounds[1]["source"]["accuracy"] - 0.1
    (line,) = [line for line in lines if "TAKEN BACK" in line]
    assert line.startswith("round   3/4") and "source accuracy fell from" in line


def test_a_model_that_nobody_can_evaluate_is_taken_back(tmp_path, monkeypatch):
    ruin(monkeypatch, {2}, 1e30)
    rounds = lines_of(run_small(tmp_path, **TRAINING))
    assert rounds[1]["taken_back"] == "most stations could not evaluate the model"
    assert rounds[1]["source"] == rounds[0]["source"]
    assert rounds[2]["source"]["accuracy"] > rounds[0]["source"]["accuracy"]


def test_without_the_setting_it_stays(tmp_path, monkeypatch):
    ruin(monkeypatch, {3})
    folder = run_small(tmp_path, **TRAINING, max_fall=0)
    assert not any("taken_back" in record for record in lines_of(folder))
    assert lines_of(folder)[-1]["source"]["accuracy"] < 0.5


@pytest.mark.parametrize("every, stop", [(1, 2), (1, 3), (2, 3)])
def test_a_run_resumed_around_a_round_that_is_taken_back_ends_the_same(
    tmp_path, monkeypatch, every, stop
):
    ruin(monkeypatch, {4} if every == 2 else {3})
    given = TRAINING | {"rounds": 5, "evaluate_every": every}
    whole = run_small(tmp_path, "whole", **given)
    assert sum("taken_back" in record for record in lines_of(whole)) == 1

    from server_app.after_round import AfterRound

    keep = AfterRound.__call__

    def until(self, number, arrays):
        keep(self, number, arrays)
        if number == stop:
            raise KeyboardInterrupt

    monkeypatch.setattr(AfterRound, "__call__", until)
    with pytest.raises(KeyboardInterrupt):
        run_small(tmp_path, "parts", **given)
    monkeypatch.setattr(AfterRound, "__call__", keep)
    local.run_locally({"resume": str(tmp_path / "parts")})
    assert_same_model(tmp_path / "parts", whole)
    for one, other in zip(lines_of(tmp_path / "parts"), lines_of(whole), strict=True):
        assert one["source"] == other["source"] if "source" in other else "source" not in one
        assert one.get("taken_back") == other.get("taken_back")


# --- settings


@pytest.mark.parametrize(
    "given, said",
    [
        ({"secure_aggregation": True, "robust_clients": "median"}, "sees only a sum"),
        ({"station_start": "own", "robust_stations": "median"}, "station-start=own"),
        ({"robust_clients": "medain"}, "Did you mean 'median'"),
        ({"robust_stations": "helpers:tiny_net"}, "must be a subclass"),
    ],
)
def test_what_cannot_work_is_refused(tmp_path, given, said):
    with pytest.raises(UserError, match=said):
        run_small(tmp_path, **given)


def test_stations_with_their_own_starts_are_bounded_by_their_own_moves(tmp_path):
    """The distance of two starts is no move: nobody is cut for having another one."""
    folder = run_small(
        tmp_path, station_start="own", **SHAPES["station"], rounds=1, gram_min_rows=1
    )
    (record,) = lines_of(folder)
    assert record["cuts"] == [] and record["failures"] == []
