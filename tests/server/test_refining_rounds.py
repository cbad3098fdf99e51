"""Refining in a federation: exact sums over the tree, bounded, checked, refused, resumed."""

import math

import pytest
import torch
from flwr.app import Message, RecordDict
from helpers import (
    SMALL,
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
from spoiling import UNBOUNDED, counting, raising, silent, spoilt, without
from torch import nn

import hfedatm.runtime.local as local
from client_app.data import client_data
from hfedatm.base.building import build_rule, trace_channels
from hfedatm.base.errors import UserError
from hfedatm.base.exchange import MOST_GROUPED, AskedLayers
from hfedatm.base.records import BadTask, record_to_state, state_to_record
from hfedatm_core import Answers, OwnedNetwork, collect_answers, fit_layers, refine
from server_app import refining
from server_app.rules.hfedatm import HFedATM


def depthwise(spec):
    """Convolutions, one of them depthwise, BatchNorms and Linear layers."""
    return nn.Sequential(
        *(nn.Conv2d(1, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU()),
        *(nn.Conv2d(4, 4, 3, groups=4), nn.BatchNorm2d(4), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, spec.num_classes)),
    )


LAYERS = ["0", "3", "7", "9"]
APART = {
    "model": "test_refining_rounds:depthwise",
    "station_start": "own",
    "station_assignment": "mixed",
    "rounds": 1,
    "station_rounds": 1,
    "gram_min_rows": 1,
    "gram_dtype": "float32",
    "diagnostics": False,
}
REFINE = {**APART, "rule_params": "refine=true"}
RELATED = {"station_start": "shared", "gram_layers": "all"}


@pytest.fixture
def sabotage(monkeypatch):
    def install(spoil, clients=(1,)):
        saboteur = Saboteur(spoil, set(clients), "train.refine")
        monkeypatch.setattr(local, "client_app", saboteur)
        return saboteur

    return install


@pytest.fixture
def merges(monkeypatch):
    """Return the stations' updates and the merged model, as the rule makes it."""
    seen = []
    merge = HFedATM.merge

    def watch(self, updates, situation):
        updates = list(updates)
        seen.append((updates, merge(self, iter(updates), situation)))
        return seen[-1][1]

    monkeypatch.setattr(HFedATM, "merge", watch)
    return seen


def network():
    return depthwise(tiny_data().spec)


def inputs_of(settings, clients):
    return torch.cat([client_data(settings, c, {}).train.inputs for c in clients])


# --- what it does


def directly(settings, updates, merged, clients=((0, 1), (2, 3))):
    """Refine as a machine that has all data would, every example counting the same."""
    model, graph = network(), trace_channels(settings, None, network(), tiny_data().spec)
    state, own = merged.state, network()
    for layer in LAYERS:
        model.load_state_dict(state)
        answers, sizes = [], []
        for update, some in zip(updates, clients, strict=True):
            own.load_state_dict(graph.permute(update.state, merged.permutations[update.name]))
            x = inputs_of(settings, some)
            answers.append(collect_answers(model, own, graph, [(x, None)], [layer]))
            sizes.append(len(x))
        share = len(answers) / sum(sizes)
        parts = [(a.grams, a.residuals, a.moments) for a in answers]
        weighted = [
            Answers(*({layer: part[layer] * (size * share)} for part in some))
            for some, size in zip(parts, sizes, strict=True)
        ]
        state = fit_layers(state, graph, weighted)
    return state


@pytest.mark.parametrize("sizes", [{}, UNEVEN], ids=["even", "uneven"])
def test_the_model_is_that_of_all_data_on_one_machine(tmp_path, merges, sizes):
    folder = run_small(tmp_path, "refined", **REFINE | sizes, **UNBOUNDED)
    [(updates, merged)] = merges
    found, settings = last_model(folder), small_settings(**REFINE | sizes)
    expected = directly(settings, updates, merged)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-3, atol=1e-4)
    assert any(not torch.allclose(found[n], merged.state[n], atol=1e-2) for n in found)
    [line] = lines_of(folder)
    examples = len(inputs_of(settings, range(4)))
    said = {"stations": 2, "examples": examples, "exchanges": 4, "asked": 4}
    assert line["refined"] == said


def watched(monkeypatch):
    """Note the type of every message to a client, and the records that it brings."""
    honest, seen = local.client_app, []

    def watch(message, context):
        kind, content = message.metadata.message_type, message.content
        brought = [name for name in ("model", "own", "changes") if name in content]
        seen.append((message.metadata.dst_node_id, kind, brought, content.get("changes")))
        return honest(message, context)

    monkeypatch.setattr(local, "client_app", watch)
    return seen


def test_both_models_go_down_once_and_then_only_fitted_layers(tmp_path, monkeypatch):
    seen = watched(monkeypatch)
    run_small(tmp_path, **REFINE)
    after = [(kind, brought) for client, kind, brought, _ in seen if client == 0][1:]
    later = [("train.refine", ["changes"])] * 3 + [("evaluate", ["changes"])]
    assert after == [("train.refine", ["model", "own"]), *later]
    brought = [changes for client, *_, changes in seen if client == 0 and changes is not None]
    fitted = [{name.split(".")[0] for name in changes} for changes in brought]
    assert fitted == [{"0", "1"}, {"3", "4"}, {"7"}, {"9"}]  # each layer with its norm


def test_an_exchange_may_fit_several_layers(tmp_path):
    folder = run_small(tmp_path, **REFINE | {"rule_params": "refine=true,refine_layers=3"})
    assert lines_of(folder)[0]["refined"]["exchanges"] == 2
    assert failures_of(folder) == []


def test_16_bits_on_the_way_change_little(tmp_path):
    exact = last_model(run_small(tmp_path, "exact", **REFINE))
    rounded = last_model(run_small(tmp_path, "rounded", **REFINE | {"gram_dtype": "float16"}))
    for name, value in exact.items():
        torch.testing.assert_close(rounded[name], value, rtol=0.05, atol=0.02)


def test_wide_layers_are_refined_by_factors(tmp_path):
    """A factor of the layer's full width loses nothing."""
    exact = last_model(run_small(tmp_path, "exact", **REFINE, **UNBOUNDED))
    given = REFINE | {"gram_max_dim": 40, "gram_rank": 65}
    factors = last_model(run_small(tmp_path, "factors", **given, **UNBOUNDED))
    assert not torch.equal(exact["7.weight"], factors["7.weight"])
    for name, value in exact.items():
        torch.testing.assert_close(factors[name], value, rtol=1e-2, atol=1e-3)


def test_only_the_round_that_merges_strangers_is_refined(tmp_path):
    plain = run_small(tmp_path, "plain", **APART)
    assert all("refined" not in line for line in lines_of(plain))
    two = run_small(tmp_path, "two", **REFINE | {"rounds": 2})
    assert ["refined" in line for line in lines_of(two)] == [True, False]


def test_the_scores_and_the_next_round_are_those_of_the_refined_model(tmp_path, monkeypatch):
    first = last_model(run_small(tmp_path, "one", **REFINE))
    honest, started = local.client_app, []

    def watch(message, context):
        if message.metadata.message_type == "train" and message.content["task"]["round"] == 2:
            started.append(record_to_state(message.content["model"]))
        return honest(message, context)

    monkeypatch.setattr(local, "client_app", watch)
    run_small(tmp_path, "two", **REFINE | {"rounds": 2})
    assert len(started) == 4
    assert all(torch.equal(sent[n], value) for sent in started for n, value in first.items())


def test_a_second_look_follows_and_finds_little_to_correct(tmp_path):
    refined = last_model(run_small(tmp_path, "refined", **REFINE, **UNBOUNDED))
    given = REFINE | {"rule_params": "refine=true,second_look=auto,look_passes=2"}
    folder = run_small(tmp_path, "both", **given, **UNBOUNDED)
    [line] = lines_of(folder)
    assert (line["refined"]["exchanges"], line["second_look"]["passes"]) == (4, 2)
    looked = last_model(folder)
    for name, value in refined.items():
        if "running" not in name:
            assert torch.equal(looked[name], value), name
    torch.testing.assert_close(
        looked["1.running_mean"], refined["1.running_mean"], atol=1e-4, rtol=0
    )


def test_a_resumed_run_ends_like_the_uninterrupted_one(tmp_path, monkeypatch):
    """The server stops in an exchange: the round is done again, with what nodes kept of it."""
    given = REFINE | {"rounds": 2, "gram_layers": "all"}
    whole = run_small(tmp_path, "whole", **given)
    assert all(line["refined"]["exchanges"] == 4 for line in lines_of(whole))
    fit, stopped, fitted = refining.fit_layers, tmp_path / "stopped", []

    def stop(*arguments):
        fitted.append(arguments)
        if len(fitted) == 7:  # in the third exchange of the second round
            raise KeyboardInterrupt
        return fit(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(refining, "fit_layers", stop)
        with pytest.raises(KeyboardInterrupt):
            run_small(tmp_path, "stopped", **given)
    local.run_locally({"resume": str(stopped)})
    assert_same_model(whole, stopped)


# --- who fails or lies


def with_value(part, value):
    def change(state):
        name = next(n for n in state if n.endswith(part))
        changed = state[name].clone()
        changed.view(-1)[0] = value
        return {**state, name: changed}

    return spoilt("answers", change)


def negative_variance(state):
    return {n: v * torch.tensor([[10.0], [1], [1]]) if "moments" in n else v
            for n, v in state.items()}  # fmt: skip


LIES = {
    "raises": (raising, "disk on fire"),
    "empty": (silent, "reply has no 'metrics'"),
    "no answers": (without("answers"), "reply has no 'answers' arrays"),
    "no Grams": (without("grams"), "reply has no 'grams' arrays"),
    "nan": (with_value("residual", math.nan), "values that are not finite"),
    "infinity": (with_value("moments", math.inf), "values that are not finite"),
    "huge": (with_value("residual", 1e16), "values beyond"),
    "beyond its errors": (with_value("residual", 1e4), "residuals beyond its errors"),
    "negative variance": (spoilt("answers", negative_variance), "a negative variance or error"),
    "negative error": (
        spoilt("answers", lambda s: {n: -v for n, v in s.items()}),
        "a negative variance",
    ),
    "shape": (spoilt("answers", lambda s: {n: v.T for n, v in s.items()}), "has shape"),
    "type": (spoilt("answers", lambda s: {n: v.half() for n, v in s.items()}), "has type"),
    "unknown layer": (
        spoilt("answers", lambda s: s | {"x/residual": torch.ones(1)}),
        "unknown tensors",
    ),
    "no example": (counting(0), "num-examples = 0 is not a plausible count"),
    "huge count": (counting(10**12), "is not a plausible count"),
}


@pytest.mark.parametrize("lie", LIES)
def test_who_fails_or_lies_is_named_once_and_the_others_answers_count(
    tmp_path, sabotage, merges, lie
):
    spoil, reason = LIES[lie]
    saboteur = sabotage(spoil)
    folder = run_small(tmp_path, "lie", **REFINE, **UNBOUNDED)
    [failure] = failures_of(folder)
    assert failure["node"] == "station 0, client 1" and reason in failure["reason"]
    [line] = lines_of(folder)
    assert (line["refined"]["exchanges"], line["refined"].get("reason", "")) == (4, "")
    # Who did not answer is not asked again, but evaluates like all others.
    asked = [kind for kind, client in saboteur.calls if client == 1]
    assert asked == ["train", "train.refine", "evaluate"]
    [(updates, merged)] = merges
    others = ((0,), (2, 3))
    expected = directly(small_settings(**REFINE), updates, merged, others)
    found = last_model(folder)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("change", ["skew", "indefinite"])
def test_grams_of_groups_that_cannot_be_are_refused(tmp_path, sabotage, change):
    def spoil(message, reply):
        state = record_to_state(reply.content["answers"])
        if "3/groups" not in state:
            return reply
        state["3/groups"][0, 0, 1] += 50.0
        if change == "indefinite":
            state["3/groups"][0, 1, 0] += 50.0
        content = {**reply.content, "answers": state_to_record(state)}
        return Message(RecordDict(content), reply_to=message)

    sabotage(spoil)
    [failure] = failures_of(run_small(tmp_path, **REFINE, **UNBOUNDED))
    assert "the Grams of 3 are not positive semi-definite" in failure["reason"]


def test_a_plausible_liar_moves_little(tmp_path, sabotage):
    """Client 1 of three reports what fits together, of a model a hundred times off."""
    given = REFINE | {"clients_per_station": 3}
    merged = last_model(run_small(tmp_path, "merged", **APART | {"clients_per_station": 3}))
    honest = last_model(run_small(tmp_path, "honest", **given))

    def lie(state):
        scale = torch.tensor([[100.0], [1e4], [1e4]], dtype=torch.float64)
        return {n: v * 100 if "residual" in n else v * scale if "moments" in n else v
                for n, v in state.items()}  # fmt: skip

    def far(state):
        return sum(float((state[n] - honest[n]).square().sum()) for n in honest
                   if n.endswith("weight")) ** 0.5  # fmt: skip

    saboteur = sabotage(spoilt("answers", lie))
    unbounded = last_model(run_small(tmp_path, "free", **given, **UNBOUNDED))
    lied = last_model(run_small(tmp_path, "lied", **given))
    assert ("train.refine", 1) in saboteur.calls
    assert far(lied) < 0.1 * far(unbounded)
    assert far(lied) < 2 * far(merged)


def test_without_enough_stations_the_merged_model_stays_as_it_is(tmp_path, sabotage):
    plain = run_small(tmp_path, "plain", **APART)
    sabotage(raising, clients=(0, 1))
    with log_lines() as lines:
        folder = run_small(tmp_path, "refined", **REFINE | {"station_quorum": 1.0})
    assert_same_model(plain, folder)
    why = "1 of 2 stations usable, 2 needed"
    assert lines_of(folder)[0]["refined"]["reason"] == why
    assert any(f"NOT REFINED: {why}" in line for line in lines)


def test_an_exchange_that_fails_leaves_the_layers_before_it_fitted(tmp_path, sabotage):
    calls = []

    def third_time(message, reply):
        calls.append(message)
        return reply if len(calls) <= 4 else raising(message, reply)

    sabotage(third_time, clients=(0, 1))
    with log_lines() as lines:
        folder = run_small(tmp_path, "stopped", **REFINE | {"station_quorum": 1.0})
    refined = lines_of(folder)[0]["refined"]
    assert (refined["exchanges"], refined["asked"]) == (2, 4)
    assert any("in 2 exchanges, NOT IN ALL 4: 1 of 2 stations" in line for line in lines)
    plain = last_model(run_small(tmp_path, "plain", **APART))
    found = last_model(folder)
    changed = {n.split(".")[0] for n in plain if not torch.equal(plain[n], found[n])}
    assert changed == {"0", "1", "3", "4"}
    source = lines_of(folder)[0]["source"]["domains"]
    assert sum(d["examples"] for d in source.values()) > 0


def test_what_cannot_be_fitted_stays_as_it_is(tmp_path, monkeypatch):
    def fail(*arguments):
        raise ValueError("singular")

    monkeypatch.setattr(refining, "fit_layers", fail)
    folder = run_small(tmp_path, "failed", **REFINE)
    assert "singular" in lines_of(folder)[0]["refined"]["reason"]
    assert_same_model(run_small(tmp_path, "plain", **APART), folder)


def test_a_station_that_lost_its_model_is_named(tmp_path, monkeypatch):
    from hfedatm.base.kept_model import KeptModel

    keep = KeptModel.keep_own

    def forget(self, model):
        if self._task.station != 1 or self._task.client >= 0:
            keep(self, model)

    monkeypatch.setattr(KeptModel, "keep_own", forget)
    folder = run_small(tmp_path, **REFINE)
    [failure] = failures_of(folder)
    assert failure["node"] == "station 1"
    assert "has not kept the model that its station trained" in failure["reason"]
    assert lines_of(folder)[0]["refined"]["stations"] == 1


# --- who may refuse, and what is refused before a run


def asked_of(settings, model=None, layer="9", **more):
    state = (model or network()).state_dict()
    width = state[f"{layer}.weight"][0].numel() + 1
    records = AskedLayers({layer: width}).to_records() | {"own": state_to_record(state)}
    return ask_client(settings, 0, state, "train.refine", records=records | more)


def test_answers_leave_only_if_the_owner_allows_it(policy):
    settings, own = small_settings(**REFINE), [SMALL["dataset"], APART["model"]]

    def asked(**privacy):
        policy(code={"allowed": own}, privacy=privacy)
        return asked_of(settings)

    assert "privacy.refine" in asked()["failure"]["reason"]
    assert "answers" in asked(refine=True)
    assert "privacy.refine" in asked(**{"second-look": True})["failure"]["reason"]
    for key, value in (("least-mechanism", "example"), ("least-gram-rows", 9)):
        assert key in asked(refine=True, **{key: value})["failure"]["reason"]
    policy(code={"allowed": own}, privacy={"refine": True}, secure_sum={"required": True})
    assert "secure-sum.required" in asked_of(settings)["failure"]["reason"]


@pytest.mark.parametrize(
    ("switch", "why"),
    [
        ({"privacy.mechanism": "example", "privacy.sigma": 3.0}, "by noise"),
        ({"secure_aggregation": True}, "allows only secure sums"),
    ],
    ids=["noise", "secure sums"],
)
def test_a_client_does_not_rely_on_the_server_to_refuse(switch, why):
    settings = small_settings(**APART, **switch)
    reply = asked_of(settings)
    assert "answers" not in reply and why in reply["failure"]["reason"]


def test_answers_of_few_rows_do_not_leave():
    reply = asked_of(small_settings(**REFINE | {"gram_min_rows": 1000}))
    assert "fewer than gram-min-rows = 1000" in reply["failure"]["reason"]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"secure_aggregation": True}, "allows only secure sums"),
        ({"privacy.mechanism": "example", "privacy.sigma": 3.0}, "by noise"),
        ({"station_start": "shared"}, "station-start=own"),
        ({"gram_layers": "linear"}, "did not share a start"),
        ({"server_rule": "hfedatm-no-fot"}, "server-rule=hfedatm"),
        ({"tiers": "2x2x2", "stations": 4, "station_start": "shared"}, "right below the server"),
        ({**RELATED, "rule_params": "refine=true,buffer=1"}, "leave out buffer"),
        ({**RELATED, "station_models": "0=lenet5"}, "leave out buffer and station-models"),
    ],
    ids=lambda value: list(value)[-1] if isinstance(value, dict) else "",
)
def test_what_refining_does_not_go_with_is_refused_with_the_cure(given, words):
    with pytest.raises(UserError, match=words):
        build_rule(small_settings(**REFINE | given))


@pytest.mark.parametrize(
    "asked",
    [
        AskedLayers({}),
        AskedLayers({"x": 3}),
        AskedLayers({"9": 16}),
        AskedLayers({"1": 2}),
        AskedLayers({"9": 17}, {"9": 2}),
        AskedLayers({"9": 17}, {"7": 2}),
        AskedLayers({"wide": 2**13 + 1}, {"wide": 2}),
    ],
    ids=["none", "unknown", "width", "norm", "groups", "groups of another", "too large"],
)
def test_impossible_layers_are_refused(asked):
    model = {**network().state_dict(), "wide.weight": torch.zeros(()).expand(2, 2**13)}
    assert 2 * (2**13 + 1) ** 2 > MOST_GROUPED
    with pytest.raises(BadTask, match="layers"):
        AskedLayers.of(RecordDict({**asked.to_records()}), model)


def test_an_own_model_of_another_shape_is_refused():
    settings, other = small_settings(**REFINE), {"0.weight": torch.zeros(1)}
    reply = asked_of(settings, own=state_to_record(other))
    assert "answers" not in reply and reply["failure"]["reason"]


def test_the_library_does_the_same_with_equal_shares(tmp_path, merges):
    """`refine` counts networks equally; here all have as many examples."""
    folder = run_small(tmp_path, **REFINE | {"dataset_params": "examples=48"}, **UNBOUNDED)
    [(updates, merged)] = merges
    settings = small_settings(**REFINE | {"dataset_params": "examples=48"})
    own = [inputs_of(settings, some) for some in ((0, 1), (2, 3))]
    assert len(own[0]) == len(own[1])
    parts = {u.name: OwnedNetwork(u.state, [(x, None)]) for u, x in zip(updates, own, strict=True)}
    expected, found = refine(merged, network(), parts), last_model(folder)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-3, atol=1e-4)
