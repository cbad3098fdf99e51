"""What only a server rule reads is declared by the rule alone, and known everywhere."""

import json
from dataclasses import dataclass, field
from typing import Literal

import pytest
from helpers import assert_same_model, last_model, run_small, small_settings
from typer.testing import CliRunner

from hfedatm.base.building import build_rule
from hfedatm.base.errors import UserError
from hfedatm.base.options import options_of, rows_of
from hfedatm.base.plugins import construct
from hfedatm.base.records import BadTask, Task
from hfedatm.base.resolving import as_config, resolve, validate
from hfedatm.base.rule_keys import built_in_rules, rule_keys
from hfedatm.base.settings import Settings, SettingsError
from hfedatm.cli.main import typer_app
from hfedatm.contracts import option
from server_app.rules.hfedatm import HFedATM

HERE = __name__


@dataclass
class Damped(HFedATM):
    """A rule with one more option; nothing outside this class knows of it."""

    damping: float = option(0.0, "share of the last model that stays", ge=0, lt=1)
    shape: Literal["flat", "steep"] = option("flat", "how it falls over the rounds")
    steps: int = 3
    names: list[str] = field(default_factory=list)

    def merge(self, updates, situation):
        merged = super().merge(updates, situation)
        for name, old in situation.previous.items():
            merged.state[name].lerp_(old, self.damping)
        return merged


def damped(params: str, **given) -> Damped:
    return build_rule(small_settings(server_rule=f"{HERE}:Damped", rule_params=params, **given))


class TestANewOption:
    def test_is_given_by_rule_params_and_used(self, tmp_path):
        given = {"server_rule": f"{HERE}:Damped", "rounds": 1}
        plain = last_model(run_small(tmp_path, "plain", **given))
        half = last_model(run_small(tmp_path, "half", rule_params="damping=0.5", **given))
        most = last_model(run_small(tmp_path, "most", rule_params="damping=0.75", **given))
        name = "0.weight"
        start = 2 * half[name] - plain[name]
        assert not (half[name] == plain[name]).all()
        assert most[name].allclose(0.25 * plain[name] + 0.75 * start, atol=1e-6)

    def test_is_explained(self):
        shown = CliRunner().invoke(
            typer_app, ["settings", "damping", "--rule", f"{HERE}:Damped", "--json"]
        )
        [row] = json.loads(shown.stdout)
        assert row["key"] == "rule-params=damping"
        assert row["allowed"] == "number, >= 0, < 1"
        assert row["default"] == 0.0
        assert f"{HERE}:Damped" in row["meaning"]

    @pytest.mark.parametrize(
        ("params", "words"),
        [
            ("damping=1", "damping: got 1; input should be less than 1 (share of the last model"),
            ("damping=much", "damping: got 'much'; input should be a valid number"),
            ("shape=round", "shape: got 'round'; input should be 'flat' or 'steep'"),
            ("steps=1.5", "steps: got 1.5; input should be a valid integer"),
            ("dumping=0", "Did you mean 'damping'?"),
            ("ot-reg=0", "ot-reg: got 0; input should be greater than 0"),
        ],
    )
    def test_is_kept_within_its_bounds(self, params, words):
        with pytest.raises(UserError) as refused:
            damped(params)
        assert words in str(refused.value)

    def test_stands_beside_the_keys_that_are_inherited(self):
        rule = damped("damping=0.5,shape=steep", **{"ot-scope": "all"})
        assert (rule.damping, rule.shape, rule.ot_scope) == (0.5, "steep", "all")
        assert type(damped("damping=0").damping) is float


class TestKeysOfRules:
    def test_say_the_same_as_rule_params(self):
        short = build_rule(resolve({"ot-reg": "0.1", "ot-scope": "all"}))
        assert short == build_rule(resolve({"rule-params": "ot-reg=0.1,ot-scope=all"}))
        assert (short.ot_reg, short.ot_scope) == (0.1, "all")

    def test_rule_params_lie_over_a_preset(self):
        given = {"preset": "paper", "rule-params": "broadcast=average"}
        assert build_rule(resolve(given)).broadcast == "average"
        assert as_config(resolve(given))["broadcast"] == "average"

    def test_one_at_its_default_is_as_good_as_none(self):
        assert resolve({"ot-solver": "sinkhorn", "ridge": 1e-6}) == resolve({})

    @pytest.mark.parametrize("rule", ["avg", "mtgc", "fedrc-weights"])
    def test_are_checked_kept_and_ignored_by_a_rule_without_them(self, rule):
        settings = resolve({"preset": "paper", "server-rule": rule, "ot-scope": "all"})
        assert as_config(settings)["ot-scope"] == "all"
        assert as_config(settings)["broadcast"] == "merged"
        build_rule(settings)
        with pytest.raises(SettingsError, match="ot-scope: got 'some'"):
            resolve({"server-rule": rule, "ot-scope": "some"})

    def test_all_mistakes_are_told_at_once(self):
        with pytest.raises(SettingsError) as refused:
            resolve({"ot-reg": 0, "lr": 0, "broadcast": "loudly"})
        lines = str(refused.value).splitlines()
        assert [line.split(":")[0] for line in lines] == ["lr", "broadcast", "ot-reg"]

    def test_hold_no_free_text_that_a_node_could_take_for_a_file(self):
        entries = rule_keys().model_json_schema()["properties"]
        assert len(entries) >= 9
        assert all(e["type"] != "string" or "enum" in e for e in entries.values())

    def test_are_declared_alike_by_all_rules_that_have_them(self):
        declared = {}
        for cls in built_in_rules().values():
            for row in rows_of(options_of(cls)):
                assert declared.setdefault(row["key"], row) == row

    def test_none_has_the_name_of_a_setting_of_the_run(self):
        assert not {f.alias for f in rule_keys().model_fields.values()} & {
            f.alias for f in Settings.model_fields.values()
        }


class TestOnTheWayToANode:
    def test_they_arrive(self):
        sent = resolve({"ot-solver": "exact", "ot-reg": 0.3, "rule-params": "beta=0.5"})
        rule = build_rule(Task.from_record(Task("train", sent, round=1).to_record()).settings)
        assert (rule.ot_solver, rule.ot_reg, rule.beta) == ("exact", 0.3, 0.5)

    @pytest.mark.parametrize(
        "text", ["ot-reg=-1", "ot-solver=/etc/passwd", "ot-iterations=many", "broadcast=loudly"]
    )
    def test_a_node_refuses_what_is_out_of_bounds(self, text):
        with pytest.raises(UserError, match=text.partition("=")[0]):
            build_rule(Settings(rule_keys=text))

    def test_a_node_refuses_what_is_no_key_of_any_rule(self):
        with pytest.raises(UserError, match="no_such"):
            build_rule(Settings(rule_keys="no-such=1"))
        record = Task("train", Settings(), round=1).to_record()
        record["settings"] = str(record["settings"]).replace('"rule-keys":""', '"ot-reg":0.1')
        with pytest.raises(BadTask, match="ot-reg"):
            Task.from_record(record)


class TestOlderFolders:
    def test_a_run_whose_folder_lists_the_keys_flat_goes_on(self, tmp_path, monkeypatch):
        import hfedatm.runtime.local as local

        folder = run_small(tmp_path, "old", rounds=2, **{"ot-scope": "all", "broadcast": "merged"})
        stored = json.loads((folder / "config.json").read_text())["settings"]
        assert (stored["ot-scope"], stored["broadcast"]) == ("all", "merged")
        assert "rule-keys" not in stored
        rule = build_rule(validate(stored))
        assert (rule.ot_scope, rule.broadcast) == ("all", "merged")
        again = tmp_path / "again"
        local.run_locally({**stored, "output": str(again), "run-name": "old"})
        assert_same_model(folder, again / "old")

    def test_what_was_stored_cannot_become_something_else(self, tmp_path):
        import hfedatm.runtime.local as local

        folder = run_small(tmp_path, "old", rounds=1, **{"ot-scope": "all"})
        for given in ({"ot-scope": "conv"}, {"rule-params": "ot-scope=conv"}):
            with pytest.raises(UserError, match="resume: (ot-scope|rule-params) was"):
                local.run_locally({"resume": str(folder), **given})


def test_parameters_of_other_plugins_are_checked_too():
    from client_app.methods.fedprox import FedProx

    with pytest.raises(UserError, match="client-params: mu: got 'much'"):
        construct("client-params", FedProx, {"mu": "much"})


def test_a_parameter_whose_type_is_not_known_is_passed_as_it_is():
    @dataclass
    class Odd:
        thing: "NoSuchType" = None  # noqa: F821

    assert construct("rule-params", Odd, {"thing": "x"}).thing == "x"


@pytest.mark.parametrize("words", [["gram"], ["gram", "rank"], ["no-such-word"]])
def test_settings_are_filtered_by_words(words):
    shown = CliRunner().invoke(typer_app, ["settings", *words, "--json"])
    rows = json.loads(shown.stdout)
    assert bool(rows) == (words != ["no-such-word"])
    for row in rows:
        assert all(word in f"{row['key']} {row['meaning']}".lower() for word in words)


def test_the_names_that_a_key_accepts_are_listed():
    shown = CliRunner().invoke(typer_app, ["settings", "--json"])
    rows = {row["key"]: row for row in json.loads(shown.stdout)}
    assert "resnet18" in rows["model"]["allowed"].split(" | ")
    assert "hfedatm-no-fot" in rows["server-rule"]["allowed"].split(" | ")
    assert "digits4" in rows["dataset"]["allowed"].split(" | ")
    assert "pacs-lenet5" in rows["preset"]["allowed"].split(" | ")
    assert all(row["meaning"] for row in rows.values())
