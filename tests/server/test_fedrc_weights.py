"""FedRC of Kou et al.: closeness weights."""

import math

import pytest
import torch
from helpers import SPEC, lines_of, run_small, small_settings, tiny_net
from hypothesis import given, settings
from hypothesis import strategies as st

from hfedatm.base.building import build_method, build_rule
from hfedatm.base.errors import UserError
from hfedatm.contracts import Situation
from hfedatm_core import ChannelGraph, Update
from server_app.rules.fedrc_weights import (
    PREFIX,
    FedRCWeights,
    InputMoments,
    WeighingStation,
    bhattacharyya,
)

means = st.floats(-5, 5)
deviations = st.floats(0.05, 5)


def moments(mean: float, std: float) -> tuple[float, float]:
    return mean, std**2 + mean**2


def update(name: str, value: float, mean: float, std: float, examples: int = 100) -> Update:
    own = moments(mean, std)
    return Update(
        {"w": torch.full((2,), value)},
        num_examples=examples,
        name=name,
        metrics={"input-mean": own[0], "input-square": own[1]},
    )


def merge(*updates: Update) -> float:
    model = tiny_net(SPEC)
    graph = ChannelGraph.trace(model, (SPEC.example(),))
    merged = FedRCWeights().merge(iter(updates), Situation(small_settings(), graph, {}, 1))
    return float(merged.state["w"][0])


@settings(max_examples=60)
@given(means, deviations, means, deviations)
def test_distance_is_symmetric_not_negative_and_zero_for_equal_gaussians(m1, s1, m2, s2):
    one, other = moments(m1, s1), moments(m2, s2)
    assert bhattacharyya(one, other) == pytest.approx(bhattacharyya(other, one), abs=1e-12)
    assert bhattacharyya(one, other) >= -1e-9
    assert bhattacharyya(one, one) == pytest.approx(0.0, abs=1e-6)


def test_distance_is_minus_the_logarithm_of_the_overlap():
    x = torch.linspace(-30, 30, 200_001, dtype=torch.float64)
    one, other = torch.distributions.Normal(0.3, 1.2), torch.distributions.Normal(-1.0, 2.5)
    overlap = torch.trapezoid((one.log_prob(x) + other.log_prob(x)).mul(0.5).exp(), x)
    found = bhattacharyya(moments(0.3, 1.2), moments(-1.0, 2.5))
    assert found == pytest.approx(-math.log(overlap), abs=1e-4)


def test_equal_gaussians_count_the_same_whatever_their_size():
    assert merge(update("a", 0.0, 1.0, 2.0, 10), update("b", 1.0, 1.0, 2.0, 990)) == 0.5


def test_the_merge_is_a_convex_combination_by_softmax_of_minus_the_distance():
    a, b = update("a", 0.0, 0.0, 1.0, 300), update("b", 1.0, 2.0, 1.0, 100)
    everything = 0.5, (300 * 1.0 + 100 * 5.0) / 400
    da, db = (bhattacharyya(moments(m, 1.0), everything) for m in (0.0, 2.0))
    softmax = torch.softmax(torch.tensor([-da, -db]), 0)
    assert da < db
    assert merge(a, b) == pytest.approx(float(softmax[1]), abs=1e-6)


def test_station_weighs_a_client_by_its_own_gaussian():
    shared = {f"{PREFIX}moments": torch.tensor(moments(0.0, 1.0), dtype=torch.float64)}
    side = WeighingStation()
    alike = {"num-examples": 5, "input-mean": 0.0, "input-square": 1.0}
    apart = {"num-examples": 5, "input-mean": 3.0, "input-square": 10.0}
    assert side.weight(alike, shared) == pytest.approx(1.0)
    expected = math.exp(-bhattacharyya(moments(3.0, 1.0), moments(0.0, 1.0)))
    assert side.weight(apart, shared) == pytest.approx(expected)


def test_moments_of_tokens_leave_out_padding():
    counted = InputMoments()
    ids = torch.tensor([[4, 6, 0, 0]])
    counted.add({"input_ids": ids, "attention_mask": torch.tensor([[1, 1, 0, 0]])})
    assert counted.result() == (5.0, 26.0)


def test_run_reports_the_moments_of_the_stations_data(tmp_path):
    folder = run_small(tmp_path, server_rule="fedrc-weights")
    for record in lines_of(folder):
        assert not record["failures"]
        for station in record["per_station"]:
            assert station["input-square"] > station["input-mean"] ** 2


def test_a_method_that_shares_with_all_is_refused_with_the_cure(tmp_path):
    with pytest.raises(UserError, match="level=station"):
        build_method(small_settings(server_rule="fedrc-weights", client_method="fediir"))
    folder = run_small(
        tmp_path, server_rule="fedrc-weights", client_method="fediir", client_params="level=station"
    )
    assert not any(record["failures"] for record in lines_of(folder))


@pytest.mark.parametrize(
    ("given", "words"),
    [({"train_fn": "a:b"}, "train-fn"), ({"secure_aggregation": True}, "secure-aggregation")],
)
def test_settings_it_does_not_go_with_are_refused(given, words):
    with pytest.raises(UserError, match=words):
        build_rule(small_settings(server_rule="fedrc-weights", **given))


def test_the_classes_of_both_fedrc_have_different_names_and_the_old_one_is_kept():
    from server_app.rules import fedrc_weights

    names = {r: type(build_rule(small_settings(server_rule=f"fedrc{r}"))).__name__ for r in NAMED}
    assert names == NAMED
    assert fedrc_weights.FedRC is FedRCWeights


NAMED = {"": "FedRCWeights", "-weights": "FedRCWeights", "-clusters": "FedRCClusters"}
