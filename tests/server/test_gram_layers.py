"""Stations that did not share a start: which Grams are asked for, and what becomes of them."""

from __future__ import annotations

import pytest
from helpers import SPEC, lines_of, run_small, small_settings
from torch import nn

from hfedatm.base.building import example_grams, measures_all
from hfedatm_core.data import DataSpec


def norm_net(spec: DataSpec) -> nn.Module:
    """A convolution with a BatchNorm, a depthwise one, two Linear layers."""
    return nn.Sequential(
        *(nn.Conv2d(spec.input_shape[0], 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU()),
        *(nn.Conv2d(4, 4, 3, groups=4, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        *(nn.Linear(36, 16), nn.ReLU(), nn.Linear(16, spec.num_classes)),
    )


NET = {"model": f"{__name__}:norm_net"}


def gram_bytes(folder) -> list[float]:
    return [sum(s["gram-bytes-up"] for s in line["per_station"]) for line in lines_of(folder)]


def test_all_grams_are_asked_for_in_the_round_of_own_starts_and_in_no_other(tmp_path):
    apart = run_small(tmp_path, "apart", station_start="own", **NET)
    paper = run_small(tmp_path, "paper", station_start="own", gram_layers="linear", **NET)
    shared = run_small(tmp_path, "shared", **NET)
    first, second = gram_bytes(apart)
    assert first > second
    assert gram_bytes(paper) == [second, second] == gram_bytes(shared)
    merge = lines_of(apart)[0]["merge"]
    assert set(merge["quality"]) == {"0", "7", "9"}
    assert merge["layers"]["0"]["how"] == "regmean"
    assert merge["layers"]["3"]["how"] == "averaged"  # depthwise: the wire has no form for it
    assert merge["quality"]["0"]["variance_after"] == pytest.approx(1.0, abs=1e-3)
    for folder in (paper, shared):
        assert lines_of(folder)[0]["merge"]["quality"] == {}
        assert lines_of(folder)[0]["merge"]["layers"]["0"]["how"] == "averaged"
    assert lines_of(apart)[1]["merge"]["quality"] == {}
    assert not any(line["failures"] for line in lines_of(apart))


def test_all_grams_are_measured_in_every_round_for_who_says_so(tmp_path):
    folder = run_small(tmp_path, gram_layers="all", **NET)
    assert [set(line["merge"]["quality"]) for line in lines_of(folder)] == [{"0", "7", "9"}] * 2


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({}, False),
        ({"station_start": "own"}, True),
        ({"station_start": "own", "gram_layers": "linear"}, False),
        ({"station_start": "own", "server_rule": "avg"}, False),
        ({"station_start": "own", "server_rule": "hfedatm-no-fot"}, False),
        ({"station_start": "own", "secure_aggregation": True}, False),
        ({"station_start": "own", "preset": "paper"}, False),
        ({"gram_layers": "all"}, True),
    ],
)
def test_when_all_layers_are_measured(given, wanted):
    settings = small_settings(**given)
    assert measures_all(settings, 1) == wanted
    assert measures_all(settings, 2) == (given.get("gram_layers") == "all")


def test_noise_and_secure_sums_refuse_grams_of_all_layers():
    noise = {"privacy.mechanism": "client", "privacy.sigma": 1.0}
    for given in ({"secure_aggregation": True}, noise):
        with pytest.raises(Exception, match="gram-layers"):
            small_settings(gram_layers="all", **given)


def test_the_layers_that_are_expected_have_the_constant_input():
    settings = small_settings(station_start="own")
    grams = example_grams(settings, norm_net(SPEC), SPEC, round=1)
    channels = SPEC.input_shape[0]
    assert {name: gram.dim for name, gram in grams.items()} == {
        "0": 9 * channels + 1,
        "7": 37,
        "9": 17,
    }
