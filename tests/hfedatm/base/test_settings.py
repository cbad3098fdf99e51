"""Settings: what is refused and how, the layers, and the files that repeat the keys."""

import re
import tomllib
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
from hypothesis import given as for_all
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from hfedatm.base.building import build_rule
from hfedatm.base.describing import describe
from hfedatm.base.options import parse_params
from hfedatm.base.presets import load_presets
from hfedatm.base.records import Task
from hfedatm.base.resolving import all_keys, as_config, resolve, validate
from hfedatm.base.rule_keys import rule_keys
from hfedatm.base.settings import Settings, SettingsError

ROOT = Path(__file__).resolve().parents[3]
SPEC = spec_from_file_location("write_pyproject", ROOT / "tools/write_pyproject.py")
write_pyproject = module_from_spec(SPEC)
SPEC.loader.exec_module(write_pyproject)
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SCHEMA = {
    key: entry
    for model in (Settings, rule_keys())
    for key, entry in model.model_json_schema(by_alias=True)["properties"].items()
    if key != "rule-keys"
}


def wrong_values():
    """Yield (key, value, what the message must say) for every key that has a limit."""
    for key, entry in SCHEMA.items():
        kind = entry["type"]
        if "enum" in entry:
            yield key, "nonsense", [repr(option) for option in entry["enum"]]
        elif kind == "boolean":
            yield key, "perhaps", ["valid boolean"]
        elif kind in ("integer", "number"):
            yield key, "many", [f"valid {kind}"]
            if kind == "integer":
                yield key, 1.5, ["valid integer"]
            else:
                yield key, float("inf"), ["finite number"]
                yield key, float("nan"), [""]
            if "minimum" in entry:
                low = entry["minimum"]
                yield key, low - 1, [f"greater than or equal to {low:g}"]
            if "exclusiveMinimum" in entry:
                low = entry["exclusiveMinimum"]
                yield key, low, [f"greater than {low:g}"]
            if "maximum" in entry:
                high = entry["maximum"]
                yield key, high + 1, [f"less than or equal to {high:g}"]
            if "exclusiveMaximum" in entry and entry["exclusiveMaximum"] < 2**60:
                high = entry["exclusiveMaximum"]
                yield key, high, [f"less than {high:g}"]
    yield "device", "tpu", ["auto"]
    yield "run-name", "../elsewhere", ["A-Za-z0-9"]
    yield "seed", 2**63, ["less than"]
    yield "preset", "pacs", ["pacs-lenet5", "demo"]


@pytest.mark.parametrize(
    "key, value, allowed",
    [pytest.param(*case, id=f"{case[0]}={case[1]}") for case in wrong_values()],
)
def test_a_wrong_value_is_refused_with_key_given_and_allowed(key, value, allowed):
    with pytest.raises(SettingsError) as caught:
        resolve({key: value})
    message = str(caught.value)
    assert message.startswith(f"{key}: got {value!r}; ")
    for part in allowed:
        assert part in message


def test_every_key_with_a_limit_is_among_those_tests():
    tried = {key for key, _, _ in wrong_values()}
    free = {key for key, entry in SCHEMA.items() if entry["type"] == "string"} - tried
    assert tried | free == set(all_keys())
    assert len(tried) > 40


@pytest.mark.parametrize(
    "wrong, right",
    [
        ("ronds", "rounds"),
        ("clients-per-stations", "clients-per-station"),
        ("clients_per_station", "clients-per-station"),
        ("learning-rate", None),
        ("lam", None),
    ],
)
def test_a_misspelt_key_is_refused_with_the_nearest(wrong, right):
    with pytest.raises(SettingsError) as caught:
        resolve({wrong: 1})
    message = str(caught.value)
    assert message.startswith(f"{wrong}: unknown key in settings; ")
    assert (f"did you mean {right!r}?" if right else "") in message


def test_all_mistakes_are_told_at_once():
    with pytest.raises(SettingsError) as caught:
        resolve({"lr": -1, "rounds": 0, "optimizer": "lion"})
    lines = str(caught.value).splitlines()
    assert [line.split(":")[0] for line in lines] == ["optimizer", "lr", "rounds"]


@pytest.mark.parametrize("key", ["dataset-params", "model-params", "client-params", "rule-params"])
def test_malformed_parameters_are_refused(key):
    with pytest.raises(SettingsError, match=f"{key}: got 'mu 3'; write 'name=value'"):
        resolve({key: "mu 3"})


class TestLayers:
    def test_default_under_preset_under_given(self):
        assert resolve({}).rounds == 5
        assert resolve({"preset": "paper"}).rounds == 200
        assert resolve({"preset": "paper", "rounds": 7}).rounds == 7

    def test_a_given_value_wins_also_when_it_equals_the_default(self):
        assert resolve({"preset": "paper", "rounds": 5}).rounds == 5

    def test_an_empty_value_is_not_given(self):
        assert resolve({"preset": "paper", "rounds": "", "data-dir": ""}).rounds == 200
        assert resolve({"preset": ""}) == resolve({})

    def test_values_from_a_command_line_are_text(self):
        typed = resolve({"rounds": "7", "lr": "1e-2", "regmean-conv": "true", "target-domain": 30})
        assert (typed.rounds, typed.lr, typed.regmean_conv) == (7, 0.01, True)
        assert typed.target_domain == "30"


class TestPresets:
    @pytest.mark.parametrize("name", load_presets())
    def test_each_resolves(self, name):
        assert resolve({"preset": name}).preset == name

    def test_the_papers_hyper_parameters(self):
        paper = resolve({"preset": "pacs-lenet5"})
        assert (paper.stations, paper.clients_per_station) == (10, 10)
        assert (paper.rounds, paper.station_rounds, paper.local_epochs) == (200, 5, 10)
        assert (paper.optimizer, paper.lr, paper.momentum, paper.weight_decay) == (
            "sgd", 0.01, 0.0, 0.0,
        )  # fmt: skip
        assert (paper.batch_size, paper.schedule, paper.alpha) == (32, "cosine", 0.75)
        rule = build_rule(paper)
        assert (rule.ot_solver, rule.ot_reg, rule.ot_iterations) == ("sinkhorn", 0.05, 25)
        text = resolve({"preset": "amazon-roberta-base"})
        assert (text.optimizer, text.lr, text.momentum, text.weight_decay) == (
            "adamw", 3e-5, 0.9, 1e-2,
        )  # fmt: skip

    def test_every_vision_data_set_and_model_of_the_paper_has_a_row(self):
        rows = load_presets()
        for data in ("pacs", "office-home", "terra-incognita"):
            for model in ("lenet5", "resnet18", "vgg11"):
                assert rows[f"{data}-{model}"]["dataset"] == data
                assert rows[f"{data}-{model}"]["model"] == model


def flat(table, prefix=""):
    for key, value in table.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


class TestPyproject:
    def test_what_settings_and_dependencies_determine_is_not_stale(self):
        text = (ROOT / "pyproject.toml").read_text()
        assert write_pyproject.up_to_date(text) == text, "stale: run make pyproject"

    def test_a_new_setting_and_a_new_dependency_would_be_noticed(self):
        text = (ROOT / "pyproject.toml").read_text()
        older = re.sub(r'^ot-scope = "" +# .*\n', "", text, flags=re.MULTILINE)
        older = older.replace("    \"scipy; sys_platform == 'never'\",\n", "")
        assert len(older) < len(text) - 60
        assert write_pyproject.up_to_date(older) == text

    def test_the_flower_app_lists_exactly_the_settings_and_gives_none(self):
        listed = dict(flat(PYPROJECT["tool"]["flwr"]["app"]["config"]))
        assert list(listed) == all_keys()
        assert set(listed.values()) == {""}

    def test_the_app_ships_what_it_needs(self):
        included = PYPROJECT["tool"]["flwr"]["app"]["fab-include"]
        for package in PYPROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]:
            assert f"{package}/**/*.py" in included
        assert "configs/*.yaml" in included


@for_all(
    st.fixed_dictionaries(
        {
            "rounds": st.integers(1, 999),
            "lr": st.floats(1e-9, 10),
            "lambda": st.floats(0, 1),
            "optimizer": st.sampled_from(["sgd", "adamw"]),
            "client-params": st.sampled_from(["", "mu=0.3"]),
            "seed": st.integers(0, 2**63 - 1),
            "ot-solver": st.sampled_from(["sinkhorn", "exact"]),
            "ot-reg": st.floats(1e-9, 10),
            "rule-params": st.sampled_from(["", "beta=0.5", "ot-margin=0.25"]),
        }
    )
)
@hypothesis_settings(max_examples=30)
def test_settings_survive_the_way_to_a_node_and_the_disk(given):
    made = resolve(given)
    assert Task.from_record(Task("train", made, round=1).to_record()).settings == made
    assert validate(as_config(made)) == made
    assert build_rule(made).ot_reg == as_config(made)["ot-reg"] == given["ot-reg"]


def test_settings_cannot_be_changed():
    with pytest.raises(Exception, match="frozen"):
        resolve({}).rounds = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    "text, expected",
    [
        ("", {}),
        ("mu=0.01, mode=mean", {"mu": 0.01, "mode": "mean"}),
        ("a=1,b=1e-3,c=true,d=False", {"a": 1, "b": 0.001, "c": True, "d": False}),
        ("batch-norm=true", {"batch_norm": True}),
        ("url=a=b", {"url": "a=b"}),
    ],
)
def test_parameters_are_parsed(text, expected):
    assert parse_params(text) == expected
    assert [type(v) for v in parse_params(text).values()] == [type(v) for v in expected.values()]


def test_describe_has_a_row_with_a_meaning_for_every_key():
    rows = {row["key"]: row for row in describe()}
    assert [key for key in rows if not key.startswith("rule-params=")] == all_keys()
    assert not [key for key, row in rows.items() if not row["meaning"]]
    assert rows["lr"]["allowed"] == "number, > 0"
    assert rows["optimizer"]["allowed"] == "sgd | adamw"
    assert rows["lr"]["rules"] == []
    assert rows["ot-margin"]["allowed"] == "number, >= 0, < 1"
    assert rows["rule-params=beta"]["rules"] == ["hfedatm", "hfedatm-no-fot", "hfedatm-no-regmean"]


def test_names_that_moved_are_found_with_a_notice():
    import hfedatm.base.settings as old

    with pytest.warns(DeprecationWarning, match="hfedatm.base.resolving"):
        assert old.resolve is resolve
    with pytest.raises(AttributeError, match="nothing"):
        old.nothing  # noqa: B018
