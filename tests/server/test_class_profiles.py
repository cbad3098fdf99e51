"""Class profiles in a federation: what leaves, who may refuse, who lies, and what they are for."""

import math

import pytest
import torch
from helpers import (
    SMALL,
    SPEC,
    Saboteur,
    ask_client,
    failures_of,
    last_model,
    lines_of,
    log_lines,
    run_small,
    small_settings,
    tiny_net,
)
from hypothesis import given
from hypothesis import strategies as st
from spoiling import UNBOUNDED, spoilt, without
from test_second_look import APART, norm_net

import hfedatm.runtime.local as local
from client_app.data import client_data
from hfedatm.base.building import build_rule, trace_channels
from hfedatm.base.class_profiles import ProfileBounds, ProfileShapes, tensors_to_profiles
from hfedatm.base.errors import UserError
from hfedatm.base.records import BadTask, record_to_state
from hfedatm_core import Update, collect_profiles
from hfedatm_core.profiles import Profiles
from hfedatm_core.robust.held import HeldUpdates
from server_app.rules.hfedatm import HFedATM

PROFILED = {**APART, "rule_params": "profiles=true"}


@pytest.fixture
def merged(monkeypatch):
    """Return the updates that the rule is given."""
    seen = []
    merge = HFedATM.merge

    def watch(self, updates, situation):
        seen.extend(updates)
        return merge(self, iter(seen), situation)

    monkeypatch.setattr(HFedATM, "merge", watch)
    return seen


# --- what it does


def test_a_station_has_the_class_means_of_its_clients_examples(tmp_path, merged):
    """Nothing is learnt, so that all clients of a station measure one model."""
    given = PROFILED | {"model": "helpers:tiny_net", "lr": 1e-30}
    run_small(tmp_path, **given, **UNBOUNDED)
    settings = small_settings(**given)
    for number, update in enumerate(merged):
        model = tiny_net(SPEC)
        model.load_state_dict(update.state)
        own = [client_data(settings, 2 * number + c, {}).train for c in range(2)]
        batch = (torch.cat([d.inputs for d in own]), torch.cat([d.targets for d in own]))
        graph = trace_channels(settings, None, model, SPEC)
        expected = collect_profiles(model, graph, [batch], SPEC.num_classes)
        for name, mean in expected.means.items():
            torch.testing.assert_close(update.profiles.means[name], mean, rtol=1e-4, atol=1e-5)


def test_off_by_default_and_only_in_the_round_that_matches(tmp_path, monkeypatch):
    honest, sent = local.client_app, []

    def watch(message, context):
        reply = honest(message, context)
        sent.append((message.content["task"]["round"], "profiles" in reply.content))
        return reply

    monkeypatch.setattr(local, "client_app", watch)
    run_small(tmp_path, "plain", **APART)
    assert not any(profiles for _, profiles in sent)
    sent.clear()
    with log_lines() as lines:
        run_small(tmp_path, "two", **PROFILED | {"rounds": 2, "station_rounds": 2})
    assert {number for number, profiles in sent if profiles} == {1}
    assert sum(profiles for _, profiles in sent) == 4  # in the last station round only
    assert any("clients also send: class profiles" in line for line in lines)


def test_profiles_may_be_measured_at_the_station_model(tmp_path, merged):
    folder = run_small(tmp_path, **PROFILED | {"gram_model": "station"})
    assert all(update.profiles is not None for update in merged)
    assert failures_of(folder) == [] and "merge" in lines_of(folder)[0]


def test_a_class_with_few_examples_does_not_leave():
    model = norm_net(SPEC).state_dict()
    few = small_settings(**PROFILED)
    sizes = torch.bincount(client_data(few, 0, {}).train.targets, minlength=3)
    least = int(sizes.sort().values[1])  # at least one class has fewer, unless all are equal
    chosen = small_settings(
        **APART, rule_params=f"profiles=true,profile_examples={int(sizes.max()) + 1}"
    )
    reply = ask_client(chosen, 0, model, send_grams=True)
    nothing = tensors_to_profiles(record_to_state(reply["profiles"]))
    assert nothing.counts.sum() == 0 and all(not mean.any() for mean in nothing.means.values())
    some = small_settings(**APART, rule_params=f"profiles=true,profile_examples={least}")
    reply = ask_client(some, 0, model, send_grams=True)
    found = tensors_to_profiles(record_to_state(reply["profiles"]))
    assert found.counts.tolist() == [float(n) if n >= least else 0.0 for n in sizes]


# --- who may refuse


def test_profiles_leave_only_if_the_owner_allows_it(policy):
    chosen, model = small_settings(**PROFILED), norm_net(SPEC).state_dict()
    own = [SMALL["dataset"], APART["model"]]

    def asked(**privacy):
        policy(code={"allowed": own}, privacy=privacy)
        return ask_client(chosen, 0, model, send_grams=True)

    assert "privacy.class-profiles" in asked()["failure"]["reason"]
    allowed = {"class-profiles": True}
    assert "profiles" in asked(**allowed)
    assert (
        "least-class-examples"
        in asked(**allowed, **{"least-class-examples": 17})["failure"]["reason"]
    )
    assert "profiles" in asked(**allowed, **{"least-class-examples": 16})
    assert (
        "least-mechanism" in asked(**allowed, **{"least-mechanism": "example"})["failure"]["reason"]
    )
    policy(code={"allowed": own}, privacy=allowed, secure_sum={"required": True})
    assert "failure" in ask_client(chosen, 0, model, send_grams=True)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"secure_aggregation": True}, "allows only secure sums"),
        ({"privacy.mechanism": "example", "privacy.sigma": 3.0}, "by noise"),
        ({"dp_sgd": True, "privacy.sigma": 3.0, "fix_model": True}, "by noise"),
        ({"station_start": "shared"}, "station-start=own"),
        ({"tiers": "2x2x2", "stations": 4, "station_start": "shared"}, "right below the server"),
        ({"gram_layers": "linear"}, "did not share a start"),
        ({"server_rule": "hfedatm-no-fot"}, "server-rule=hfedatm"),
        ({"task": "multi-label"}, "needs classes"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_profiles_do_not_go_with_is_refused_with_the_cure(given, words):
    with pytest.raises(UserError, match=words):
        build_rule(small_settings(**PROFILED | given))


# --- who fails or lies


def first_group(change):
    def changed(state):
        name = next(n for n in state if n != "counts")
        return state | {name: change(state[name])}

    return spoilt("profiles", changed)


LIES = {
    "none": (without("profiles"), "reply has no 'profiles' arrays"),
    "nan": (first_group(lambda m: m * math.nan), "not finite"),
    "huge": (first_group(lambda m: m + 1e16), "values beyond"),
    "shape": (first_group(lambda m: m[:, :2]), "has shape"),
    "type": (first_group(lambda m: m.double()), "has type"),
    "unknown group": (
        spoilt("profiles", lambda s: s | {"group/x": torch.zeros(1)}),
        "unknown tensors",
    ),
    "negative count": (
        spoilt("profiles", lambda s: s | {"counts": s["counts"] - 1000}),
        "negative",
    ),
    "too many": (
        spoilt("profiles", lambda s: s | {"counts": s["counts"] + 1000}),
        "more examples than",
    ),
    "empty class": (
        spoilt("profiles", lambda s: s | {"counts": s["counts"] * 0}),
        "without examples",
    ),
}


@pytest.mark.parametrize("lie", LIES)
def test_who_lies_is_named_and_left_out(tmp_path, monkeypatch, lie):
    spoil, reason = LIES[lie]
    monkeypatch.setattr(local, "client_app", Saboteur(spoil, {1}))
    [failure] = failures_of(run_small(tmp_path, **PROFILED))
    assert failure["node"] == "station 0, client 1" and reason in failure["reason"]


def profiles(size, count):
    return Profiles({"g": torch.full((3, 2, 4), float(size))}, torch.tensor([count, count]))


@given(st.floats(0.1, 1e6), st.floats(1, 1e6), st.integers(3, 6))
def test_one_node_counts_at_most_the_factors(size, count, nodes):
    bounds = ProfileBounds(bound_factor=2, claim_factor=3)
    updates = [Update({}, name=str(n), num_examples=10**9, profiles=profiles(1, 10.0))
               for n in range(nodes - 1)]  # fmt: skip
    updates.append(Update({}, name="odd", num_examples=10**9, profiles=profiles(size, count)))
    for update in updates:
        bounds.note(update.name, update.profiles)
    odd = bounds.cut(updates[-1])
    assert float(odd.means["g"][0, 0, 0]) == pytest.approx(min(size, 2.0), rel=1e-5)
    assert float(odd.counts[0]) == pytest.approx(min(count, 30.0), rel=1e-5)
    for update in updates[:-1]:
        same = bounds.cut(update)
        assert torch.equal(same.means["g"], update.profiles.means["g"])
        assert torch.equal(same.counts, update.profiles.counts)


def test_a_node_never_counts_more_class_examples_than_examples():
    bounds = ProfileBounds(0, 0)
    update = Update({}, name="a", num_examples=5, profiles=profiles(1, 10.0))
    bounds.note("a", update.profiles)
    assert float(bounds.cut(update).counts.sum()) == pytest.approx(5.0)


# --- what holds them


def test_updates_on_disk_keep_their_profiles():
    held = HeldUpdates(memory=0)
    given = [Update({"w": torch.ones(2)}, name=str(n), profiles=profiles(n, 2.0)) for n in range(2)]
    for update in [*given, Update({"w": torch.ones(2)}, name="none")]:
        held.add(update)
    *found, none = held
    assert none.profiles is None
    for update, back in zip(given, found, strict=True):
        assert torch.equal(back.profiles.means["g"], update.profiles.means["g"])
        assert torch.equal(back.profiles.counts, update.profiles.counts)


@pytest.mark.parametrize(
    "change",
    [
        {"classes": 0},
        {"classes": "3"},
        {"groups": ["a", "a"]},
        {"groups": "ab"},
        {"channels": [4]},
        {"channels": [4, -1]},
        {"places": [4, 10**6]},
    ],
    ids=str,
)
def test_a_server_cannot_ask_for_impossible_profiles(change):
    record = ProfileShapes({"a": (4, 4), "b": (2, 1)}, 3).to_record()
    assert ProfileShapes.from_record(record) == ProfileShapes({"a": (4, 4), "b": (2, 1)}, 3)
    record.update(change)
    with pytest.raises(BadTask, match="profiles"):
        ProfileShapes.from_record(record)


def test_profiles_change_the_match_and_nothing_else_that_is_sent(tmp_path):
    """The same stations are merged, so what differs comes from the match."""
    plain = run_small(tmp_path, "plain", **APART)
    with_profiles = run_small(tmp_path, "profiles", **PROFILED)
    one, other = (lines_of(f)[0]["per_station"] for f in (plain, with_profiles))
    assert [s["loss"] for s in one] == [s["loss"] for s in other]
    assert all(b["bytes_up"] > a["bytes_up"] for a, b in zip(one, other, strict=True))
    left, right = last_model(plain), last_model(with_profiles)
    assert any(not torch.equal(left[name], right[name]) for name in left)
