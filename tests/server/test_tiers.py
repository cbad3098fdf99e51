"""Trees of stations in one process: equal to flat runs, faults and quorums at every level."""

import io
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from helpers import (
    SMALL,
    UNEVEN,
    Saboteur,
    assert_same_model,
    failures_of,
    last_model,
    lines_of,
    log_lines,
    run_small,
    small_settings,
)
from rich.console import Console

import hfedatm.runtime.local as local
from hfedatm.base import tiers
from hfedatm.base.errors import UserError
from hfedatm.base.resolving import as_config, resolve
from hfedatm.cli.watch import describe, view
from hfedatm.contracts import Method, Rule, Situation
from hfedatm.preflight import examine
from hfedatm.report.page import render
from hfedatm.runs import read_run
from hfedatm.runtime.opening import check
from hfedatm_core import Merged, Update, merge
from server_app.rules.hfedatm import HFedATM
from server_app.strategy import HFedATMStrategy

FREE = {"bound_factor": 0, "claim_factor": 0, "least_agreement": 0, "max_fall": 0}
ONE = {"rounds": 1, "station_rounds": 1, "gram_min_rows": 1}
ONCE = {"station_rounds": 1, "rounds": 2}


def run_tree(folder, name, tree, **given):
    """Run the small federation on a tree."""
    values = {k: v for k, v in SMALL.items() if k not in ("stations", "clients-per-station")}
    values |= {key.replace("_", "-"): value for key, value in given.items()}
    local.run_locally(values | {"tiers": tree, "output": str(folder), "run-name": name})
    return folder / name


def close(one, other, tolerance=1e-6):
    left, right = last_model(one), last_model(other)
    return all(
        torch.allclose(left[n].double(), right[n].double(), rtol=tolerance, atol=tolerance)
        for n in left
    )


# --- settings


def test_two_numbers_are_the_ordinary_settings(tmp_path):
    given = {k: v for k, v in SMALL.items() if k not in ("stations", "clients-per-station")}
    settings = resolve(given | {"tiers": "2x2"})
    assert as_config(settings) == as_config(small_settings())
    one = run_small(tmp_path, "flat", rounds=1)
    assert_same_model(one, run_tree(tmp_path, "tiers", "2x2", rounds=1))


def test_the_numbers_of_a_tree():
    s = resolve({"tiers": "3x4x5", "station-rounds": "2x3"})
    assert (s.stations, s.clients_per_station, s.num_clients) == (12, 5, 60)
    assert [tiers.children(s, level) for level in (0, 1, 2)] == [3, 4, 5]
    assert [tiers.clients_below(s, level) for level in (0, 1, 2)] == [60, 20, 5]
    assert list(tiers.places(s, 1, 2)) == [8, 9, 10, 11]
    assert tiers.path(s, 2, 9) == (2, 9)
    assert (tiers.rounds_at(s, 1), tiers.rounds_at(s, 2), tiers.local_rounds(s)) == (2, 3, 6)
    assert tiers.rounds_at(resolve({"tiers": "3x4x5", "station-rounds": 2}), 1) == 1


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"tiers": "2xtwo"}, "tiers: got '2xtwo'"),
        ({"tiers": "2x0x2"}, "tiers: got '2x0x2'"),
        ({"tiers": "7"}, "stations and clients"),
        ({"tiers": "x".join("1" * 9)}, "1 to 8 numbers"),
        ({"tiers": "2x2x2", "stations": 3}, "stations: got 3, and tiers=2x2x2 makes it 4"),
        ({"tiers": "2x2x2", "station-rounds": "2x2x2"}, "inner-rounds: got '2x2'"),
        ({"station-rounds": "2x1"}, "inner-rounds: got '2'"),
        ({"tiers": "2x2x2", "station-start": "own"}, "station-start: got 'own'"),
        ({"tiers": "2x2x2", "gram-layers": "all"}, "gram-layers: got 'all'"),
    ],
)
def test_a_wrong_tree_is_refused_by_its_key(given, words):
    with pytest.raises(UserError, match="tiers|rounds|stations|gram") as refused:
        resolve(given)
    assert words in str(refused.value)


@dataclass
class Below(Rule):
    """A rule of a user's own with a part at the clients, which says nothing of trees."""

    def on_client(self, method: Method) -> Method:
        """Return the method as it is."""
        return method

    def merge(self, updates: Iterable[Update], situation: Situation) -> Merged:
        """Average."""
        return merge(updates, fot=False, regmean=False)


def test_a_rule_with_a_part_below_that_says_nothing_of_trees_is_refused_by_name():
    given = {k: v for k, v in SMALL.items() if k not in ("stations", "clients-per-station")}
    given |= {"tiers": "2x2x1", "server-rule": "test_tiers:Below"}
    with pytest.raises(
        UserError, match="server-rule: test_tiers:Below has a part at each station or client"
    ):
        check(resolve(given))


@pytest.mark.parametrize("reference", ["first", "medoid"])
def test_a_channel_order_that_stations_cannot_know_is_refused(reference):
    given = {k: v for k, v in SMALL.items() if k not in ("stations", "clients-per-station")}
    with pytest.raises(UserError, match="choose previous"):
        check(resolve(given | {"tiers": "2x2x1", "reference": reference}))


# --- the same model as the flat run


@pytest.mark.parametrize("rule", ["hfedatm", "avg", "hfedatm-no-fot", "hfedatm-no-regmean"])
def test_a_tree_gives_the_model_of_its_lowest_stations_under_one_server(tmp_path, rule):
    given = {**FREE, **ONCE, "server_rule": rule}
    flat = run_small(
        tmp_path, "flat", stations=4, clients_per_station=1, reference="previous", **given
    )
    deep = run_tree(tmp_path, "deep", "2x2x1", **given)
    deeper = run_tree(tmp_path, "deeper", "2x1x2x1", **given)
    assert close(flat, deep) and close(flat, deeper)
    [one, other] = (lines_of(folder)[-1] for folder in (flat, deep))
    assert one["source"]["accuracy"] == other["source"]["accuracy"]
    assert one["source"]["domains"] == other["source"]["domains"]
    assert one["bytes_up"]["clients"] == other["bytes_up"]["clients"]
    assert other["bytes_up"]["stations"] > one["bytes_up"]["stations"]


@dataclass
class Plain(Rule):
    """A rule of a user's own, which knows nothing of trees."""

    needs_grams: ClassVar[bool] = True

    def merge(self, updates: Iterable[Update], situation: Situation) -> Merged:
        """Merge by RegMean, without alignment."""
        return merge(updates, fot=False)


def test_a_rule_of_ones_own_merges_the_servers_children(tmp_path):
    given = {**FREE, **ONCE, "server_rule": "test_tiers:Plain", "rounds": 1}
    folder = run_tree(tmp_path, "own", "2x2x1", **given)
    found = lines_of(folder)[0]["merge"]
    assert list(found["stations"]) == ["station 0", "station 1"]
    assert {layer["how"] for name, layer in found["layers"].items() if name != "0"} == {"regmean"}


def test_a_round_counts_the_stations_of_every_level(tmp_path):
    with log_lines() as lines:
        found = lines_of(run_tree(tmp_path, "run", "2x1x2x1", rounds=1, **FREE))[0]
    counts = [(2, 2), (2, 2), (4, 4)]
    assert [(t["asked"], t["answered"]) for t in found["tiers"]] == counts
    assert found["clients"] == {"answered": 4}
    assert any("2x1x2x1" in line for line in lines)


def test_shared_arrays_are_averaged_through_all_levels(tmp_path):
    given = {**FREE, **ONCE, **UNEVEN, "client_method": "fediir", "server_rule": "avg"}
    given |= {"client_params": "gamma=5"}
    flat = run_small(tmp_path, "flat", stations=4, clients_per_station=1, **given)
    assert close(flat, run_tree(tmp_path, "deep", "2x2x1", **given))


def test_a_second_look_goes_through_all_levels(tmp_path):
    look = {"model": "test_second_look:norm_net", "rule_params": "second_look=always,look_passes=2"}
    given = {**FREE, **ONCE, **look, **UNEVEN}
    flat = run_small(
        tmp_path, "flat", stations=4, clients_per_station=1, reference="previous", **given
    )
    deep = run_tree(tmp_path, "deep", "2x2x1", **given)
    assert close(flat, deep, 1e-5)
    found = [lines_of(folder)[0]["second_look"] for folder in (flat, deep)]
    assert found[0]["examples"] == found[1]["examples"] and not failures_of(deep)


def test_inner_rounds_train_on_from_the_regional_mean(tmp_path):
    given = {**FREE, "rounds": 1, "server_rule": "avg"}
    once = run_tree(tmp_path, "once", "2x2x1", station_rounds="1x1", **given)
    twice = run_tree(tmp_path, "twice", "2x2x1", station_rounds="2x1", **given)
    lowest = run_tree(tmp_path, "lowest", "2x2x1", station_rounds="1x2", **given)
    assert not close(once, twice) and not close(twice, lowest, 1e-5)
    steady = {**FREE, "server_rule": "avg", "schedule": "constant", "client_method": "fedavg"}
    region = run_tree(tmp_path, "region", "1x4x1", station_rounds="2x1", rounds=1, **steady)
    sent = [lines_of(folder)[0]["bytes_up"]["clients"] for folder in (once, region)]
    assert sent[1] == 2 * sent[0]


def test_in_every_inner_round_all_levels_refer_to_the_model_of_the_server(tmp_path, monkeypatch):
    """Otherwise the products that they pass up would not be additive."""
    sent, seen = [], []
    ask, combine = HFedATMStrategy.configure_train, HFedATM.combine

    def asked(self, *given):
        messages = ask(self, *given)
        sent.append(self._reference)
        return messages

    def noted(self, updates, situation):
        seen.append((situation.level, situation.round, situation.previous))
        return combine(self, updates, situation)

    monkeypatch.setattr(HFedATMStrategy, "configure_train", asked)
    monkeypatch.setattr(HFedATM, "combine", noted)
    run_tree(tmp_path, "run", "2x1x2x1", station_rounds="2x2x1", rounds=2, **FREE)
    assert sorted({(level, round) for level, round, _ in seen}) == [(1, 1), (1, 2), (2, 1), (2, 2)]
    assert len(seen) == 2 * (2 * 2 + 2 * 4)
    for _, round, model in seen:
        assert all(torch.equal(model[name], value) for name, value in sent[round - 1].items())
    assert any(not torch.equal(sent[0][name], value) for name, value in sent[1].items())


def test_a_secure_sum_stays_at_the_lowest_tier(tmp_path):
    given = {**FREE, "rounds": 1, "station_rounds": 1, "secure_aggregation": True}
    plain = run_tree(tmp_path, "plain", "2x1x2", **{**given, "secure_aggregation": False})
    secure = run_tree(tmp_path, "secure", "2x1x2", **given)
    assert close(plain, secure, 1e-3)


# --- what people see


def test_the_report_and_the_watch_show_every_level(tmp_path, monkeypatch):
    folder = run_with(monkeypatch, tmp_path, {4, 5}, "2x2x2")
    page = render([read_run(folder)])
    assert 'aria-label="The tree of the run, 2x2x2"' in page
    for words in ("2 stations", "4 stations", "3 answered", "8 clients", "6 answered"):
        assert words in page
    state = describe(read_run(folder))
    assert state["tiers"] == [{"asked": 2, "answered": 2}, {"asked": 4, "answered": 3}]
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(view(read_run(folder)))
    shown = console.export_text()
    assert "stations, level 2" in shown and "2/2 3/4" in shown
    assert "failing: station 1, station 2" in shown


def test_the_check_counts_what_every_level_sends(tmp_path):
    given = {k: v for k, v in SMALL.items() if k not in ("stations", "clients-per-station")}
    flat = examine(small_settings(stations=4, clients_per_station=1))
    deep = examine(resolve(given | {"tiers": "2x2x1"}))
    assert deep["tree"] == "2x2x1" and "station of stations" in deep["memory"]
    assert deep["bytes_up_per_round"]["clients"] == flat["bytes_up_per_round"]["clients"]
    assert deep["bytes_up_per_round"]["stations"] > flat["bytes_up_per_round"]["stations"]
    sent = lines_of(run_tree(tmp_path, "run", "2x2x1", rounds=1))[0]["bytes_up"]["stations"]
    assert sent == pytest.approx(deep["bytes_up_per_round"]["stations"], rel=0.3)


# --- faults


def away(message, reply):
    raise RuntimeError("this client is broken")


def run_with(monkeypatch, folder, broken, tree, **given):
    monkeypatch.setattr(local, "client_app", Saboteur(away, broken))
    return run_tree(folder, "run", tree, **{**FREE, **ONE, **given})


def test_a_client_that_fails_is_named_by_its_path(tmp_path, monkeypatch):
    folder = run_with(monkeypatch, tmp_path, {5}, "2x2x2")
    [failure] = failures_of(folder)
    assert failure["node"] == "station 1, station 2, client 5"
    assert "this client is broken" in failure["reason"]
    assert lines_of(folder)[0]["clients"]["answered"] == 7


def test_a_station_below_its_quorum_is_dropped_by_its_path(tmp_path, monkeypatch):
    folder = run_with(monkeypatch, tmp_path, {4, 5}, "2x2x2")
    [failure] = failures_of(folder)
    assert failure["node"] == "station 1, station 2"
    assert "0 of 2 clients answered" in failure["reason"]
    record = lines_of(folder)[0]
    assert [t["answered"] for t in record["tiers"]] == [2, 3]
    assert "kept" not in record


def test_a_region_below_its_quorum_is_dropped_in_one_line(tmp_path, monkeypatch):
    folder = run_with(monkeypatch, tmp_path, {4, 5, 6, 7}, "2x2x2")
    [failure] = failures_of(folder)
    assert failure["node"] == "station 1"
    assert "0 of 2 stations answered, 1 are needed: station 2" in failure["reason"]
    record = lines_of(folder)[0]
    assert [t["answered"] for t in record["tiers"]] == [1, 2] and "kept" not in record


def test_a_region_needs_its_own_quorum(tmp_path, monkeypatch):
    with pytest.raises(UserError, match="no round changed the model"):
        run_with(monkeypatch, tmp_path, {4, 5}, "2x2x2", station_quorum=0.6)
    record = lines_of(tmp_path / "run")[0]
    assert [f["node"] for f in record["failures"]] == ["station 1"]
    assert record["kept"].startswith("1 of 2 stations usable")


def test_a_resumed_tree_is_the_uninterrupted_one(tmp_path, monkeypatch):
    whole = run_tree(tmp_path, "whole", "2x2x1", rounds=3, station_rounds="2x1")
    run_tree(tmp_path, "part", "2x2x1", rounds=2, station_rounds="2x1", schedule="constant")
    steady = run_tree(
        tmp_path, "steady", "2x2x1", rounds=3, station_rounds="2x1", schedule="constant"
    )
    local.run_locally({"resume": str(tmp_path / "part"), "rounds": 3})
    assert_same_model(steady, tmp_path / "part")
    assert not close(whole, steady)
    with pytest.raises(UserError, match="tiers"):
        local.run_locally({"resume": str(tmp_path / "part"), "tiers": "1x2x2"})
