"""FedGMA, FedGA and a station by itself: their formulas, and runs in which they change nothing."""

from types import SimpleNamespace

import pytest
import torch
from helpers import assert_same_model, last_model, lines_of, run_small, small_settings
from hypothesis import given, settings
from hypothesis import strategies as st

from hfedatm.base.building import build_rule
from hfedatm.base.errors import UserError
from hfedatm.contracts import Situation
from hfedatm_core import ChannelGraph, Update
from server_app.rules.fedga import FedGA, adjusted
from server_app.rules.fedgma import FedGMA
from server_app.rules.one_station import OneStation

moves = st.lists(st.integers(-3, 3), min_size=4, max_size=4)
stations = st.lists(st.tuples(moves, st.integers(1, 50)), min_size=1, max_size=5)


def situation(previous, round=1, rounds=4):
    return Situation(SimpleNamespace(rounds=rounds), ChannelGraph(), previous, round)


def update(number, state, examples, loss=1.0):
    return Update(state, num_examples=examples, name=f"station {number}", metrics={"loss": loss})


# --- FedGMA


@settings(max_examples=60)
@given(stations, st.floats(0, 1), st.sampled_from([0.5, 1.0]))
def test_a_weight_moves_by_the_mean_times_the_agreement_of_the_signs(found, tau, lr):
    start = torch.tensor([0.5, -1.0, 2.0, 0.0], dtype=torch.float64)
    previous = {"w": start, "bn.running_mean": start, "steps": torch.tensor(3)}
    states = [start + torch.tensor(move, dtype=torch.float64) for move, _ in found]
    merged = FedGMA(tau=tau, server_lr=lr).merge(
        (
            update(n, {"w": x, "bn.running_mean": x, "steps": torch.tensor(5)}, found[n][1])
            for n, x in enumerate(states)
        ),
        situation(previous),
    )
    total = sum(examples for _, examples in found)
    for i in range(4):
        mean = sum(examples * move[i] for move, examples in found) / total
        agreement = abs(sum((move[i] > 0) - (move[i] < 0) for move, _ in found)) / len(found)
        mask = 1.0 if agreement >= tau else agreement
        expected = float(start[i]) + lr * mask * mean
        assert float(merged.state["w"][i]) == pytest.approx(expected, abs=1e-9)
        assert float(merged.state["bn.running_mean"][i]) == pytest.approx(float(start[i]) + mean)
    assert int(merged.state["steps"]) == 5


def test_without_a_threshold_fedgma_is_averaging(tmp_path):
    masked = last_model(run_small(tmp_path, "fedgma", server_rule="fedgma", rule_params="tau=0"))
    avg = last_model(run_small(tmp_path, "avg", server_rule="avg"))
    damped = last_model(run_small(tmp_path, "damped", server_rule="fedgma", rule_params="tau=1"))
    assert all(torch.allclose(masked[name], avg[name], atol=1e-5) for name in avg)
    assert any(not torch.allclose(damped[name], avg[name], atol=1e-4) for name in avg)


def test_fedgma_needs_one_start():
    with pytest.raises(UserError, match="station-start=shared"):
        build_rule(small_settings(server_rule="fedgma", station_start="own"))


# --- FedGA

names = st.sampled_from(["a", "b", "c", "d"])
weights = st.dictionaries(names, st.floats(0.1, 100), min_size=1)
gaps = st.dictionaries(names, st.floats(-10, 10))


@settings(max_examples=100)
@given(weights, gaps, st.floats(0, 1))
def test_weights_stay_shares_and_follow_the_gaps(before, found, step):
    after = adjusted(before, found, step)
    assert sum(after.values()) == pytest.approx(sum(before.values()))
    assert all(weight >= 0 for weight in after.values())
    known = sorted((gap, name) for name, gap in found.items() if name in before)
    if len(known) > 1 and known[0][0] < known[-1][0]:
        low, high = known[0][1], known[-1][1]
        assert after[high] * before[low] >= after[low] * before[high] * (1 - 1e-9)


def test_the_adjustment_by_hand():
    # gaps 0.1, 0.3, 0.8 around their mean 0.4, divided by 0.4: -0.75, -0.25, 1
    found = adjusted({"a": 0.5, "b": 0.25, "c": 0.25}, {"a": 0.1, "b": 0.3, "c": 0.8}, 0.2)
    assert found == pytest.approx({"a": 0.35, "b": 0.2, "c": 0.45})
    # a weight that would be negative is zero, and the others are divided by their sum
    found = adjusted({"a": 0.1, "b": 0.9}, {"a": 0.0, "b": 1.0}, 0.5)
    assert found == pytest.approx({"a": 0.0, "b": 1.0})
    assert adjusted({"a": 2.0, "b": 1.0}, {"a": 0.3, "b": 0.3}, 1.0) == {"a": 2.0, "b": 1.0}


def test_fedga_averages_by_examples_then_by_adjusted_weights_and_remembers_them():
    rule, one = FedGA(weight_step=0.2), torch.ones(1, dtype=torch.float64)
    previous = {"w": 0 * one}
    models = {0: 1.0, 1: 5.0}

    def merge(rule, round):
        some = (update(n, {"w": x * one}, [30, 10][n], loss=0.5) for n, x in models.items())
        return float(rule.merge(some, situation(previous, round)).state["w"])

    assert merge(rule, 1) == pytest.approx((30 * 1 + 10 * 5) / 40)
    rule.judged({"station 0": 0.7, "station 1": 1.1, "station 9": 4.0})
    # the gaps 0.2 and 0.6 lie at -1 and +1; in round 1 of 4 the step is 0.2 * 3/4 of all weights
    share = 10 / 40 + 0.15
    again = FedGA(weight_step=0.2)
    again.restore(rule.remember())
    for one_rule in (rule, again):
        assert merge(one_rule, 2) == pytest.approx((1 - share) * 1 + share * 5)


def test_without_a_step_fedga_is_averaging_to_the_last_bit(tmp_path):
    ga = run_small(tmp_path, "fedga", server_rule="fedga", rule_params="weight_step=0")
    assert_same_model(ga, run_small(tmp_path, "avg", server_rule="avg"))


def test_a_run_tells_fedga_the_losses_of_its_stations(tmp_path, monkeypatch):
    told = []
    monkeypatch.setattr(FedGA, "judged", lambda self, losses: told.append(losses))
    lines = lines_of(run_small(tmp_path, server_rule="fedga"))
    assert len(told) == 2
    for losses, line in zip(told, lines, strict=True):
        assert losses.keys() == {"station 0", "station 1"}
        # both stations hold equally many validation examples, so the mean is that of all
        assert sum(losses.values()) / 2 == pytest.approx(line["source"]["loss"], rel=0.05)


def test_fedga_needs_validation():
    with pytest.raises(UserError, match="validation-fraction"):
        build_rule(small_settings(server_rule="fedga", validation_fraction=0))


# --- one station by itself


def test_one_station_is_the_model_that_it_would_have_alone(tmp_path):
    alone = {"server_rule": "one-station", "rounds": 1, "bound_factor": 0}
    one, other = (
        last_model(run_small(tmp_path, f"{n}", **alone, rule_params=f"station={n}")) for n in (0, 1)
    )
    mean = last_model(run_small(tmp_path, "avg", server_rule="avg", rounds=1, bound_factor=0))
    for name in mean:
        assert torch.allclose((one[name] + other[name]) / 2, mean[name], atol=1e-6)
    assert any(not torch.equal(one[name], other[name]) for name in one)


def test_a_station_that_is_not_there_has_no_model():
    with pytest.raises(ValueError, match="station 3"):
        OneStation(station=3).merge([update(0, {}, 1)], situation({}))
