"""`hfedatm check`: what it foretells is what happens."""

import json

import pytest
from helpers import SMALL, small_settings
from torch import nn

from hfedatm.base.errors import UserError
from hfedatm.preflight import examine, gram_bytes
from hfedatm.runs import read_run


def arguments(**changes):
    return [f"{key}={value}" for key, value in {**SMALL, **changes}.items()]


def test_layers_are_merged_as_foretold(results):
    foretold = {layer["layer"]: layer for layer in examine(small_settings())["model"]["layers"]}
    happened = read_run(results / "hfedatm-0").rounds[0].merge.model_dump()
    for name, layer in happened["layers"].items():
        assert foretold[name]["merged"] == layer["how"], name
    aligned = {name for name, layer in foretold.items() if layer["aligned"] == "yes"}
    assert aligned == set(happened["stations"]["station 0"])


def test_scope_all_is_foretold(results):
    foretold = examine(small_settings(ot_scope="all"))["model"]["layers"]
    aligned = {layer["layer"] for layer in foretold if layer["aligned"] == "yes"}
    assert aligned == set(read_run(results / "apart").rounds[0].merge.stations["station 0"])
    last = foretold[-1]
    assert last["aligned"] == "frozen" and "output" in last["aligned_why"]


@pytest.mark.parametrize("rule", ["avg", "hfedatm"])
def test_bytes_are_as_foretold(results, rule):
    foretold = examine(small_settings(server_rule=rule))["bytes_up_per_round"]
    happened = read_run(results / f"{rule}-0").rounds[0].bytes_up.model_dump()
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


def test_clients_too_small_for_a_gram_stop_the_run_before_round_1():
    few = {"stations": 20}  # 10 examples per client, one of them held out
    message = "40 of 40 clients have too few examples: .* 9 rows, fewer than gram-min-rows = 64"
    with pytest.raises(UserError, match=message):
        examine(small_settings(**few))
    examine(small_settings(**few, server_rule="avg"))
    noise = {"privacy.mechanism": "example", "privacy.sigma": 1.0}
    examine(small_settings(**few, **noise))


def test_some_clients_too_small_for_a_gram_are_warned_of():
    """Domain a is shared by two clients of 90 training examples, b is one client's 180."""
    three = {"stations": 3, "clients_per_station": 1, "station_quorum": 0.3}
    [warning] = examine(small_settings(**three, gram_min_rows=100))["warnings"]
    assert "2 of 3 clients have too few examples" in warning and "90 rows" in warning
    assert not examine(small_settings(**three, gram_min_rows=90))["warnings"]
    with pytest.raises(UserError, match="3 of 3 clients have too few .* 64 rows"):
        examine(small_settings(**three, gram_min_rows=100, gram_batches=2))


def test_the_table_shows_every_layer(hfedatm):
    shown = hfedatm("check", *arguments())
    assert shown.exit_code == 0, shown.output
    for word in ("regmean", "averaged", "frozen", "never seen", "bytes up per round", "device"):
        assert word in shown.stdout


def test_norms_of_every_form_follow_the_layer_before():
    """A LayerNorm over channels and pixels has weights of three axes."""
    shown = examine(small_settings(model=f"{__name__}:normed"))["model"]["layers"]
    assert [row["aligned"] for row in shown] == ["yes", "with the layer before"] * 3 + ["frozen"]


def normed(spec):
    return nn.Sequential(
        *(nn.Conv2d(1, 4, 3), nn.GroupNorm(1, 4)),
        *(nn.Conv2d(4, 4, 3), nn.GroupNorm(2, 4)),
        *(nn.Conv2d(4, 4, 3), nn.LayerNorm((4, 2, 2))),
        *(nn.Flatten(), nn.Linear(16, spec.num_classes)),
    )


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


class Branching(nn.Module):
    """What torch.fx cannot follow."""

    def __init__(self, classes):
        super().__init__()
        self.hidden, self.head = nn.Linear(64, 8), nn.Linear(8, classes)

    def forward(self, x):
        hidden = self.hidden(x.flatten(1))
        return self.head(hidden if hidden.sum() > 0 else 2 * hidden)


def branching(spec):
    return Branching(spec.num_classes)


@pytest.mark.parametrize(
    "rule, warned", [("hfedatm", True), ("avg", False), ("hfedatm-no-fot", False)]
)
def test_alignment_is_warned_of_only_where_it_is_used(caplog, rule, warned):
    examine(small_settings(model="test_check:branching", server_rule=rule))
    assert ("without channel alignment" in caplog.text) == warned
