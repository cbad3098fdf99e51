"""Stations with models of their own width and depth, in one federation."""

from dataclasses import replace

import pytest
import torch
from helpers import (
    assert_same_model,
    failures_of,
    last_model,
    lines_of,
    run_small,
    small_settings,
    tiny_data,
)

import hfedatm.runtime.local as local
from hfedatm.base.admission import Admission
from hfedatm.base.building import build_method, build_model, build_rule
from hfedatm.base.errors import UserError
from hfedatm.base.index_maps import RECORD, StationMaps
from hfedatm.base.records import Task, record_to_state, state_to_record
from hfedatm.base.results import RunFolder
from hfedatm.base.station_fits import station_fits
from hfedatm.base.station_models import parse_station_models, settings_of
from hfedatm_core import Update, collect_grams, merge_apart
from hfedatm_core.channels.index_maps import IndexMap
from hfedatm_core.resizing.plans import Plan
from server_app.shapes import StationShapes
from station_app import station as station_module

WIDTHS = "0=helpers:tiny_net(width=6); 1=helpers:tiny_net(width=20)"
NARROW = "0=helpers:tiny_net(width=8)"
DEPTHS = "1=unlike_nets:residual_model(blocks=2,width=6)"


def shapes_of(**given):
    settings = small_settings(**given)
    spec = tiny_data().spec
    method, rule = build_method(settings, spec), build_rule(settings)
    model = build_model(settings, spec, method)
    return StationShapes(settings, station_fits(settings, spec, method, rule, model)), model


@pytest.fixture
def seen(monkeypatch):
    """Note the shapes that every station gets and sends, and the model in its task."""
    notes, run = [], station_module.run_station

    def noted(grid, content):
        task = Task.from_record(content["task"])
        reply = run(grid, content)
        if task.kind == "train":
            got, sent = (record_to_state(c["model"]) for c in (content, reply))
            notes.append((task, {n: tuple(v.shape) for n, v in got.items()}))
            assert {n: v.shape for n, v in got.items()} == {n: v.shape for n, v in sent.items()}
        return reply

    monkeypatch.setattr("hfedatm.runtime.local.run_station", noted)
    return notes


@pytest.mark.parametrize("rule", ["hfedatm", "avg"])
def test_stations_of_different_width_train_their_own_shape(tmp_path, seen, rule):
    more = {"rounds": 3, "local_epochs": 6, "lr": 0.1}
    folder = run_small(tmp_path, station_models=WIDTHS, server_rule=rule, **more)
    assert failures_of(folder) == []
    assert last_model(folder)["4.weight"].shape == (16, 36)
    widths = {task.station: shapes["4.weight"][0] for task, shapes in seen}
    assert widths == {0: 6, 1: 20} and len(seen) == 6
    assert {task.settings.model_params for task, _ in seen} == {"width=6", "width=20"}
    assert not any(task.settings.station_models for task, _ in seen)
    accuracies = [line["source"]["accuracy"] for line in lines_of(folder)]
    assert accuracies[-1] > 0.8, accuracies
    if rule == "hfedatm":
        layers = lines_of(folder)[-1]["merge"]["layers"]
        assert layers["6"]["how"] == layers["4"]["how"] == "regmean"


def test_stations_of_different_depth_train_together(tmp_path, seen):
    """The second block is trained by the only station that has it."""
    target = {"model": "unlike_nets:residual_model", "model_params": "blocks=2"}
    shallow = "0=unlike_nets:residual_model(blocks=1)"
    folder = run_small(tmp_path, station_models=shallow, **target, gram_layers="all")
    assert failures_of(folder) == []
    blocks = {
        task.station: {n.split(".")[1] for n in names if n.startswith("1.")} for task, names in seen
    }
    assert blocks == {0: {"0"}, 1: {"0", "1"}}
    assert float(last_model(folder)["1.1.bn2.weight"].abs().sum()) > 0  # it began as the identity
    again = run_small(tmp_path, "again", station_models=shallow, **target, gram_layers="all")
    assert_same_model(folder, again)


@pytest.fixture
def admitted(monkeypatch):
    """Note what the server admits, and the model that it had sent."""
    notes, add = {}, Admission.add

    def noted(self, update):
        if update.name.startswith("station"):
            notes[update.name] = update, self._updates.start
        add(self, update)

    monkeypatch.setattr(Admission, "add", noted)
    return notes


def test_a_narrow_stations_move_is_brought_up_and_not_its_network(tmp_path, admitted):
    """Channels that the station saw joined move alike, and stay different."""
    run_small(tmp_path, station_models=NARROW, rounds=1)
    fit = shapes_of(station_models=NARROW)[0]._fits[0].fit
    update, start = admitted["station 0"]
    (plan,) = (p for p in fit.plans.values() if p.sizes == (16, 8))
    one, other = plan.mass[:, 0].nonzero().flatten().tolist()
    weight, before = update.state["4.weight"], start["4.weight"]
    assert float((weight[one] - weight[other]).abs().max()) > 1e-2
    torch.testing.assert_close(weight[one] - before[one], weight[other] - before[other])
    assert float((weight[one] - before[one]).abs().max()) > 1e-3
    assert update.grams["6"].dim == 16  # brought up, too


def test_a_shallow_station_has_no_vote_on_a_block_that_it_lacks(tmp_path, admitted):
    target = {"model": "unlike_nets:residual_model", "model_params": "blocks=2"}
    shallow = "0=unlike_nets:residual_model(blocks=1)"
    run_small(tmp_path, station_models=shallow, **target, rounds=1, server_rule="avg")
    (update, start), (whole, _) = admitted["station 0"], admitted["station 1"]
    block = {name for name in start if name.startswith("1.1.")}
    assert update.absent == block and not whole.absent
    assert all(torch.equal(update.state[name], start[name]) for name in block)
    merged = last_model(tmp_path / "run")
    for name in block:
        torch.testing.assert_close(merged[name], whole.state[name])
    assert not torch.allclose(merged["0.0.weight"], whole.state["0.0.weight"])


def test_stations_with_the_targets_own_model_change_nothing(tmp_path):
    plain = run_small(tmp_path, "plain", rounds=1)
    named = run_small(tmp_path, "named", rounds=1, station_models="0-1=helpers:tiny_net(width=16)")
    assert_same_model(plain, named)


def test_a_resumed_run_equals_the_uninterrupted_one(tmp_path, monkeypatch):
    whole = run_small(tmp_path, "whole", station_models=WIDTHS)
    save = RunFolder.save_round

    def save_and_stop(self, record, *rest):
        save(self, record, *rest)
        raise KeyboardInterrupt

    monkeypatch.setattr(RunFolder, "save_round", save_and_stop)
    with pytest.raises(KeyboardInterrupt):
        run_small(tmp_path, "stopped", station_models=WIDTHS)
    monkeypatch.setattr(RunFolder, "save_round", save)
    local.run_locally({"resume": str(tmp_path / "stopped")})
    assert_same_model(whole, tmp_path / "stopped")


def test_a_reply_of_another_shape_costs_that_station_only(tmp_path, monkeypatch):
    """A narrow station that answers in the target's shape is left out, and the run goes on."""
    run = station_module.run_station

    def wrong(grid, content):
        reply = run(grid, content)
        task = Task.from_record(content["task"])
        if task.kind == "train" and task.station == 0:
            model = build_model(small_settings(), tiny_data().spec, build_method(small_settings()))
            reply["model"] = state_to_record(model.state_dict())
        return reply

    monkeypatch.setattr("hfedatm.runtime.local.run_station", wrong)
    folder = run_small(tmp_path, station_models=WIDTHS, rounds=1)
    [failure] = failures_of(folder)
    assert failure["node"] == "station 0" and "4.weight" in failure["reason"]
    assert lines_of(folder)[0]["stations"]["answered"] == 1


def test_the_first_model_does_what_a_shallow_station_can_compute():
    shapes, model = shapes_of(
        model="unlike_nets:residual_model",
        model_params="blocks=2,width=6",
        station_models="0=unlike_nets:residual_model(blocks=1,width=6)",
    )
    start = shapes.start(model.state_dict())
    assert not bool(start["1.1.bn2.weight"].any()) and bool(start["1.1.conv2.weight"].any())
    model.load_state_dict(start)
    shallow = build_model(
        small_settings(model="unlike_nets:residual_model", model_params="blocks=1,width=6"),
        tiny_data().spec,
        build_method(small_settings()),
    )
    shallow.load_state_dict({n: start[n] for n in shallow.state_dict()})
    inputs = torch.rand(5, 1, 8, 8)
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(inputs), shallow.eval()(inputs))


def test_what_nodes_keep_is_given_up_when_channels_of_another_shape_moved():
    """A map of the global model's channels does not fit, and the old order would be wrong."""
    shapes, model = shapes_of(station_models=WIDTHS)
    order = torch.arange(16).roll(1)
    maps = StationMaps({2: IndexMap({("4.weight", 0): order}), 5: IndexMap({("4.bias", 0): order})})
    given = {"model": state_to_record(model.state_dict()), RECORD: maps.to_record()}
    sent = shapes.records(0, given, "train", layers=False, apart=False)
    found = StationMaps.from_arrays(record_to_state(sent[RECORD]))
    assert not found.rounds and found.forgotten == 5
    assert "4.weight" in record_to_state(sent["model"])


# --- starts of their own


def wide_and_narrow(copies):
    """Return shapes, a narrow network, and a wide one that is it, split and permuted."""
    shapes, model = shapes_of(station_models=NARROW, station_start="own")
    fit = shapes._fits[0].fit
    torch.manual_seed(5)
    narrow = {n: torch.randn_like(v) for n, v in fit.station.model.state_dict().items()}
    mass = torch.zeros(16, 8, dtype=torch.float64)
    mass[torch.arange(16), torch.tensor(copies)] = 1.0
    (group,) = (g for g, sizes in fit.sizes.items() if sizes == (16, 8))
    return shapes, fit, model, narrow, fit.with_plans({group: Plan(mass)}).up(narrow)


@pytest.mark.parametrize(
    "copies",
    [
        [3, 1, 0, 2, 7, 5, 6, 4] * 2,
        [0, 1, 2, 3, 4, 5, 6, 7, *([3] * 8)],  # uneven: one channel has nine copies
        [7, 7, 7, 0, 1, 2, 3, 3, 4, 5, 6, 0, 0, 0, 0, 1],
    ],
    ids=["evenly", "one channel often", "in any numbers"],
)
def test_a_network_and_its_split_copy_merge_to_themselves(copies):
    """Only unbalanced transport can do this: channels have different numbers of copies."""
    shapes, fit, model, narrow, wide = wide_and_narrow(copies)
    inputs = torch.rand(200, 1, 8, 8)

    def update(name, network, state):
        network.load_state_dict(state)
        grams = collect_grams(network.eval(), [(inputs, None)], full=True)
        return Update(dict(network.state_dict()), grams, 100, name=name)

    large = update("station 1", model, wide)
    small = update("station 0", fit.station.model, narrow)
    expected = fit.station.model(inputs)
    sent = replace(small, state=fit.up(small.state), grams=fit.up_grams(small.grams))
    merged = merge_apart(shapes.matched([large, sent]), fit.target.graph)
    model.load_state_dict(merged.state)
    torch.testing.assert_close(model(inputs), expected, rtol=1e-3, atol=1e-3)
    shapes.use(shapes.plans(merged))
    fit.station.model.load_state_dict(shapes._fits[0].fit.down(merged.state))
    torch.testing.assert_close(fit.station.model(inputs), expected, rtol=1e-3, atol=1e-3)


def test_grams_come_back_as_they_went_up():
    _, fit, _, narrow, _ = wide_and_narrow([*range(8)] * 2)
    fit.station.model.load_state_dict(narrow)
    grams = collect_grams(fit.station.model.eval(), [(torch.rand(90, 1, 8, 8), None)], full=True)
    back = fit.down_grams(fit.up_grams(grams))
    assert back.keys() == grams.keys()
    for name, gram in grams.items():
        torch.testing.assert_close(back[name].dense(), gram.dense(), rtol=1e-5, atol=1e-6)


OWN = {
    "station_models": NARROW,
    "station_start": "own",
    "station_assignment": "mixed",
    "local_epochs": 6,
    "lr": 0.1,
    "rounds": 3,
}


def test_stations_with_starts_of_their_own_meet_and_train_on(tmp_path, seen):
    folder = run_small(tmp_path, **OWN)
    assert failures_of(folder) == []
    assert {task.station: shapes["4.weight"][0] for task, shapes in seen} == {0: 8, 1: 16}
    lines = lines_of(folder)
    assert lines[0]["merge"]["reference"] == "station 1"  # it lacks nothing of the target
    assert lines[0]["source"]["accuracy"] > 0.8, [line["source"] for line in lines]
    assert lines[-1]["source"]["accuracy"] > 0.9
    again = run_small(tmp_path, "again", **OWN)
    assert_same_model(folder, again)


def test_the_plans_that_transport_found_are_used_from_then_on(tmp_path, monkeypatch):
    """A station gets the model on the way on which its network came, not by joined neighbours."""
    asked, ask = [], StationShapes.records

    def noted(self, station, records, kind, *rest):
        found = ask(self, station, records, kind, *rest)
        if station == 0 and kind == "train":
            asked.append((self._fits[0].fit, records["model"], found["model"]))
        return found

    monkeypatch.setattr(StationShapes, "records", noted)
    run_small(tmp_path, **OWN | {"rounds": 2, "local_epochs": 2})
    (before, _, _), (fit, whole, own) = asked
    moved = [g for g, plan in fit.plans.items() if not torch.equal(plan.mass, before.plans[g].mass)]
    assert moved
    expected = before.with_plans(fit.plans).down(record_to_state(whole))
    neighbours = before.down(record_to_state(whole))
    found = record_to_state(own)
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert any(not torch.allclose(found[name], value) for name, value in neighbours.items())


def test_a_resumed_run_keeps_the_plans_that_transport_found(tmp_path):
    given = OWN | {"schedule": "constant", "local_epochs": 2}
    whole = run_small(tmp_path, "whole", **given)
    part = run_small(tmp_path, "part", **given | {"rounds": 1})
    local.run_locally({"resume": str(part), "rounds": 3})
    assert_same_model(whole, part)


def test_a_shallow_station_with_a_start_of_its_own(tmp_path):
    target = {"model": "unlike_nets:residual_model", "model_params": "blocks=2"}
    shallow = {"station_models": "0=unlike_nets:residual_model(blocks=1)", "station_start": "own"}
    folder = run_small(tmp_path, **target, **shallow, local_epochs=4, rounds=2)
    assert failures_of(folder) == []
    assert lines_of(folder)[0]["merge"]["reference"] == "station 1"


# --- mistakes


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("lenet5", "got 'lenet5'; write it like"),
        ("0=lenet5(width)", "station-models: '0=lenet5(width)':"),
        ("0=a; 0-1=b", "station 0 is named twice"),
        ("2=a", "'2' is no station of 0 to 1"),
        ("1-0=a", "'1-0' is no station of 0 to 1"),
    ],
)
def test_malformed_models_are_refused(text, says):
    with pytest.raises(UserError, match="station-models") as error:
        small_settings(station_models=text)
    assert says in str(error.value)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"station_models": "1=lenet5"}, "images of at least 16x16"),
        (
            {"station_models": "1=unlike_nets:residual_model"},
            "station 1: unlike_nets:residual_model() does not fit into helpers:tiny_net()",
        ),
        ({"station_models": WIDTHS, "server_rule": "mtgc"}, "server-rule 'mtgc' sends arrays"),
        ({"station_models": WIDTHS, "client_method": "fediir"}, "'fediir' averages arrays"),
        (
            {"station_models": WIDTHS, "station_start": "own"},
            "the target must be at least as wide and deep",
        ),
        (
            {"station_models": NARROW, "station_start": "own", "server_rule": "avg"},
            "matched by the Grams of all layers",
        ),
        ({"station_models": WIDTHS, "tiers": "2x1x2"}, "with tiers all stations"),
        (
            {
                "model": "unlike_nets:residual_model",
                "model_params": "blocks=2",
                "station_models": "0-1=unlike_nets:residual_model",
            },
            "no station has 1.1.bn1 of the target",
        ),
    ],
)
def test_what_cannot_be_matched_is_refused_before_round_1(tmp_path, given, says):
    with pytest.raises(UserError) as error:
        run_small(tmp_path, **given)
    assert says in str(error.value)
    assert not list(tmp_path.iterdir())


def test_settings_of_stations():
    assert parse_station_models("0,2-3=a:b(x=1,y=two); 1=c", 5) == {
        0: ("a:b", "x=1,y=two"),
        2: ("a:b", "x=1,y=two"),
        3: ("a:b", "x=1,y=two"),
        1: ("c", ""),
    }
    settings = small_settings(station_models=WIDTHS)
    assert settings_of(settings, 0).model_params == "width=6"
    assert settings_of(settings, None).model_params == ""
    assert settings_of(small_settings(), 0) == small_settings()
