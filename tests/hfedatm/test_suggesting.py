"""Class counts by messages: a suggestion of stations, and what owners refuse."""

import json

import pytest
import torch
from helpers import (
    Saboteur,
    ask_client,
    log_lines,
    run_small,
    small_settings,
)
from test_assign import uneven

import hfedatm.runtime.local as local
from client_app.data import class_counts, shares_of
from hfedatm.base.counting import COUNTS
from hfedatm.base.errors import UserError
from hfedatm.base.records import record_to_state, state_to_record
from hfedatm.base.trust.checking import check
from hfedatm.base.trust.policy import Policy, PolicyRefusal
from hfedatm.cli.assign import read_counts
from hfedatm.runs import read_run
from hfedatm_core.data import eara

GIVEN = {"dataset": "test_assign:uneven", "station_assignment": "suggest"}


def suggestion(folder):
    return json.loads((folder / "summary.json").read_text())["suggestion"]


@pytest.mark.parametrize("tree", ["2x2", "2x2x2", "1x2x2x2"])
def test_the_counts_are_those_of_the_clients_whatever_the_tree(tmp_path, tree):
    given = {**GIVEN, "validation_fraction": 0.2}
    stations, clients = sizes(tree)
    shape = {"tiers": tree, "stations": stations, "clients_per_station": clients}
    folder = run_small(tmp_path, **given, **shape)
    settings = small_settings(**GIVEN, stations=stations, clients_per_station=clients)
    expected = [class_counts(settings, uneven(), share).tolist() for share in shares_of(settings)]
    names, classes, table = read_counts(folder / "class-counts.csv")
    assert names == [f"client {i}" for i in range(len(expected))]
    assert table == expected and len(classes) == len(expected[0])
    chosen = suggestion(folder)
    assert sorted(c for s in chosen["stations"] for c in s["clients"]) == list(range(len(table)))
    totals = [sum(s["divergence"] for s in chosen[key]) for key in ("stations", "now")]
    best = eara.assign(expected, [settings.clients_per_station] * settings.stations)
    least = eara.total_divergence(expected, best, settings.stations)
    assert totals[0] <= least + 1e-9 and totals[0] < totals[1]


def sizes(tree):
    *above, clients = map(int, tree.split("x"))
    return int(torch.tensor(above).prod()), clients


def test_nothing_is_trained_and_the_run_is_a_finished_one(tmp_path):
    with log_lines() as lines:
        folder = run_small(tmp_path, **GIVEN)
    assert not (folder / "last.safetensors").exists()
    run = read_run(folder)
    assert run.status == "finished" and not run.failed
    assert any("station 0: clients" in line and "KL to even classes" in line for line in lines)


def test_a_client_that_does_not_answer_is_left_out_by_name(tmp_path, monkeypatch):
    def broken(message, reply):
        raise RuntimeError("this client is broken")

    monkeypatch.setattr(local, "client_app", Saboteur(broken, {1}, "train.count"))
    with log_lines() as lines:
        folder = run_small(tmp_path, **GIVEN)
    assert read_counts(folder / "class-counts.csv")[0] == ["client 0", "client 2", "client 3"]
    assert any("station 0, client 1" in line and "broken" in line for line in lines)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda table: table - table.max() - 1,
        lambda table: table + 1000 * torch.tensor([1, -1] + [0] * (table.shape[1] - 2)),
        lambda table: table + 1,
        lambda table: table.float(),
        lambda table: table[:, :-1],
    ],
    ids=[
        "negative",
        "negative with the same total",
        "another total",
        "no whole numbers",
        "too few classes",
    ],
)
def test_counts_that_cannot_be_true_cost_that_client_only(tmp_path, monkeypatch, spoil):
    def lie(message, reply):
        table = record_to_state(reply.content[COUNTS])[COUNTS]
        reply.content[COUNTS] = state_to_record({COUNTS: spoil(table)})
        return reply

    monkeypatch.setattr(local, "client_app", Saboteur(lie, {2}, "train.count"))
    folder = run_small(tmp_path, **GIVEN)
    assert read_counts(folder / "class-counts.csv")[0] == ["client 0", "client 1", "client 3"]
    assert suggestion(folder)["unknown"] == 1


def test_an_owner_who_does_not_allow_class_counts_is_not_asked_in_vain():
    settings = small_settings(station_assignment="suggest", dataset="digits", model="lenet5")
    given = {"class-counts": True}

    def asked(**sections):
        check(Policy.model_validate(sections), settings, "count")

    with pytest.raises(PolicyRefusal, match=r"privacy\.class-counts"):
        asked()
    asked(privacy=given)
    with pytest.raises(PolicyRefusal, match=r"privacy\.least-mechanism"):
        asked(privacy=given | {"least-mechanism": "example"})
    with pytest.raises(PolicyRefusal, match=r"secure-sum\.required"):
        asked(privacy=given, **{"secure-sum": {"required": True}})
    settings = settings.model_copy(update={"secure_aggregation": True})
    with pytest.raises(PolicyRefusal, match=r"station-assignment.*secure-sum\.required"):
        asked(privacy=given, **{"secure-sum": {"required": True}})


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"secure_aggregation": True}, "exact class counts"),
        ({"task": "regression", "metrics": ""}, "station-assignment=mixed"),
    ],
)
def test_runs_that_may_not_ask_are_refused(tmp_path, given, words):
    with pytest.raises(UserError, match=words):
        run_small(tmp_path, **GIVEN | given)


def test_a_client_does_not_rely_on_the_server_to_refuse_such_a_run():
    assert COUNTS in ask_client(small_settings(**GIVEN), 0, None, "train.count")
    said = ask_client(small_settings(**GIVEN, secure_aggregation=True), 0, None, "train.count")
    assert COUNTS not in said and "exact class counts" in said["failure"]["reason"]


def test_the_command_asks_or_reads_a_file(hfedatm, tmp_path):
    for arguments in ((), ("a.csv",), ("--ask", "--stations", "2")):
        done = hfedatm("assign", *arguments)
        assert done.exit_code != 0
        assert "--ask" in f"{done.output} {done.exception}"
    folder = run_small(tmp_path, **GIVEN)
    done = hfedatm("assign", str(folder / "class-counts.csv"), "--stations", "2", "--json")
    assert done.exit_code == 0, done.output
    said = [one["divergence"] for one in json.loads(done.stdout)["stations"]]
    own = [one["divergence"] for one in suggestion(folder)["stations"]]
    assert sum(said) == pytest.approx(sum(own), abs=1e-9)
