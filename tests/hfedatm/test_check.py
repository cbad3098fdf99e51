"""`hfedatm check`: what it foretells is what happens."""

import json

import pytest
from helpers import SMALL, small_settings

from hfedatm.base.errors import UserError
from hfedatm.preflight import examine, gram_bytes
from hfedatm.runs import read_run


def arguments(**changes):
    return [f"{key}={value}" for key, value in {**SMALL, **changes}.items()]


def test_layers_are_merged_as_foretold(results):
    foretold = {layer["layer"]: layer for layer in examine(small_settings())["model"]["layers"]}
    happened = read_run(results / "hfedatm-0").rounds[0]["merge"]
    for name, layer in happened["layers"].items():
        assert foretold[name]["merged"] == layer["how"], name
    aligned = {name for name, layer in foretold.items() if layer["aligned"] == "yes"}
    assert aligned == set(happened["stations"]["station 0"])


def test_scope_all_is_foretold(results):
    foretold = examine(small_settings(ot_scope="all"))["model"]["layers"]
    aligned = {layer["layer"] for layer in foretold if layer["aligned"] == "yes"}
    assert aligned == set(read_run(results / "apart").rounds[0]["merge"]["stations"]["station 0"])
    last = foretold[-1]
    assert last["aligned"] == "frozen" and "output" in last["aligned_why"]


@pytest.mark.parametrize("rule", ["avg", "hfedatm"])
def test_bytes_are_as_foretold(results, rule):
    foretold = examine(small_settings(server_rule=rule))["bytes_up_per_round"]
    happened = read_run(results / f"{rule}-0").rounds[0]["bytes_up"]
    for tier in ("clients", "stations"):
        # Arrays carry headers of some hundred bytes, which weigh much in so small a model.
        assert foretold[tier] <= happened[tier] <= 2.0 * foretold[tier] + 4096


def test_wide_layers_are_counted_as_factors():
    settings = small_settings(gram_max_dim=10, gram_rank=4)
    assert gram_bytes(36, settings) == 36 * 4 * 4 + 36 * 4
    assert gram_bytes(10, settings) == 10 * 11 // 2 * 4
    assert gram_bytes(10, small_settings(gram_dtype="float16")) == 10 * 11 // 2 * 2


def test_noise_that_drowns_the_grams_is_said(hfedatm):
    private = {"privacy.mechanism": "example", "privacy.epsilon": 0.1, "gram-min-rows": 1}
    done = hfedatm("check", *arguments(**private), "--json")
    assert done.exit_code == 1, done.output
    privacy = json.loads(done.stdout)["privacy"]
    assert privacy["feasible"] is False and privacy["noise_to_signal"] > 1
    usable = {**private, "privacy.epsilon": 0, "privacy.sigma": 0.01}
    assert hfedatm("check", *arguments(**usable)).exit_code == 0


def test_clients_too_small_for_a_gram_are_warned_of():
    def warned(**changes):
        return any(
            "gram-min-rows" in text for text in examine(small_settings(**changes))["warnings"]
        )

    assert warned(stations=20)  # 10 examples per client
    assert not warned()
    assert not warned(stations=20, server_rule="avg")


def test_the_table_shows_every_layer(hfedatm):
    shown = hfedatm("check", *arguments())
    assert shown.exit_code == 0, shown.output
    for word in ("regmean", "averaged", "frozen", "never seen", "bytes up per round", "device"):
        assert word in shown.stdout


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"target_domain": "z"}, "target-domain"),
        ({"model": "lenet6"}, "lenet5"),
        ({"dataset": "helpers:nothing"}, "has no 'nothing'"),
        ({"data_dir": "/nowhere", "dataset": "pacs"}, "dataset"),
        ({"stations": 300}, "use fewer clients"),
        ({"track": "tensorbord"}, "tensorboard"),
    ],
)
def test_what_would_stop_a_run_is_said(change, message):
    with pytest.raises(UserError, match=message):
        examine(small_settings(**change))
