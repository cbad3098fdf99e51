"""Plug-ins: by path, by entry point; and what is refused before round 1, with the cure."""

from dataclasses import dataclass

import pytest
import torch
from helpers import (
    SMALL,
    failures_of,
    last_model,
    lines_of,
    run_small,
    small_settings,
    tiny_data,
    tiny_net,
)
from torch import nn

from client_app.methods.fedprox import FedProx
from hfedatm.base.building import build_method, build_model, build_rule, load_data
from hfedatm.base.errors import UserError
from hfedatm.base.plugins import PluginError, import_object
from hfedatm.contracts import Method, Rule
from hfedatm.runtime.opening import open_run
from hfedatm_core.data import DomainData
from server_app.rules.avg import Avg

HERE = __name__


@dataclass
class Twice(FedProx):
    """A method with a parameter of its own."""

    times: int = 2

    def loss(self, model, inputs, targets):
        return self.times * super().loss(model, inputs, targets)


@dataclass
class Halfway(Avg):
    """A rule with a parameter: go part of the way to the mean."""

    share: float = 0.5

    def merge(self, updates, situation):
        merged = super().merge(updates, situation)
        for name, value in merged.state.items():
            merged.state[name] = torch.lerp(situation.previous[name], value, self.share)
        return merged


def train(model, batches, received, settings):
    """Nudge everything by a constant, to see it was this function that ran."""
    for _ in batches:
        break
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, received[name])
            parameter.add_(settings.lr)
    return {"loss": 0.25, "extra": 3}


def too_few(model, batches):
    return {"loss": 0.0}


def too_many(model, batches, received, settings, more):
    return {"loss": 0.0}


def without_loss(model, batches, received, settings):
    return None


def no_arguments():
    return None


def not_a_module(spec):
    return "a model"


def not_data(data_dir):
    return [1, 2]


class WrongLoss(Method):
    def loss(self, batch):
        return 0.0


class WrongMerge(Avg):
    def merge(self, updates):
        return updates


class NoMerge(Rule):
    pass


NOT_CALLABLE = 3


class TestByPath:
    def test_model_and_data_set(self):
        settings = small_settings(model_params="width=9")
        assert isinstance(load_data(settings), DomainData)
        model = build_model(settings, tiny_data().spec, build_method(settings))
        assert model[4].out_features == 9
        assert type(model) is type(tiny_net(tiny_data().spec)) is nn.Sequential

    def test_client_method_with_its_parameters(self):
        settings = small_settings(client_method=f"{HERE}:Twice", client_params="times=5,mu=0.5")
        method = build_method(settings)
        assert (method.times, method.mu) == (5, 0.5)

    def test_method_and_rule_run_and_make_a_difference(self, tmp_path):
        plain = run_small(tmp_path, "plain", rounds=1, server_rule="avg")
        twice = run_small(
            tmp_path, "twice", rounds=1, server_rule="avg", client_method=f"{HERE}:Twice"
        )
        half = run_small(
            tmp_path, "half", rounds=1, server_rule=f"{HERE}:Halfway", rule_params="share=0.25"
        )
        assert not torch.equal(last_model(plain)["4.weight"], last_model(twice)["4.weight"])
        settings = small_settings()
        start = build_model(settings, tiny_data().spec, build_method(settings)).state_dict()
        for name, value in last_model(half).items():
            expected = torch.lerp(start[name], last_model(plain)[name], 0.25)
            torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-6)

    @pytest.mark.parametrize("rule", ["avg", "hfedatm"])
    def test_training_function_replaces_the_loop_and_keeps_the_rest(self, tmp_path, rule):
        folder = run_small(
            tmp_path, rounds=1, station_rounds=2, server_rule=rule, train_fn=f"{HERE}:train", lr=0.5
        )
        assert failures_of(folder) == []
        [record] = lines_of(folder)
        assert record["loss"] == pytest.approx(0.25)
        assert bool(record["per_station"][0]["gram-bytes-up"]) == (rule == "hfedatm")
        settings = small_settings()
        start = build_model(settings, tiny_data().spec, build_method(settings)).state_dict()
        for name, value in last_model(folder).items():
            torch.testing.assert_close(value, start[name] + 2 * 0.5, rtol=1e-4, atol=1e-4)

    def test_a_training_function_that_returns_no_loss_is_named(self, tmp_path):
        with pytest.raises(UserError, match="must return a dict with a 'loss', got None"):
            run_small(tmp_path, rounds=1, train_fn=f"{HERE}:without_loss")
        assert not (tmp_path / "run").exists()


def entry_point(folder, group, name, value):
    """Install a distribution that has this entry point, as pip would."""
    info = folder / "lab-1.0.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: lab\nVersion: 1.0\n")
    with (info / "entry_points.txt").open("a") as file:
        file.write(f"[{group}]\n{name} = {value}\n")


class TestByEntryPoint:
    @pytest.fixture
    def installed(self, tmp_path, monkeypatch):
        for group, name, value in (
            ("hfedatm.models", "lab-net", "helpers:tiny_net"),
            ("hfedatm.datasets", "lab-data", "helpers:tiny_data"),
            ("hfedatm.methods", "lab-method", f"{HERE}:Twice"),
            ("hfedatm.rules", "lab-rule", f"{HERE}:Halfway"),
        ):
            entry_point(tmp_path, group, name, value)
        monkeypatch.syspath_prepend(tmp_path)

    def test_all_four_kinds(self, installed, tmp_path):
        settings = small_settings(
            model="lab-net", dataset="lab-data", client_method="lab-method", server_rule="lab-rule"
        )
        assert isinstance(build_method(settings), Twice)
        assert isinstance(build_rule(settings), Halfway)
        assert isinstance(load_data(settings), DomainData)
        folder = run_small(
            tmp_path / "out", rounds=1, model="lab-net", dataset="lab-data",
            client_method="lab-method", server_rule="lab-rule",
        )  # fmt: skip
        assert failures_of(folder) == []

    def test_without_it_the_name_is_unknown(self):
        with pytest.raises(PluginError, match="client-method: got 'nobodys'; available: "):
            build_method(small_settings(client_method="nobodys"))


REFUSED = [
    ("train-fn", f"{HERE}:too_few", "must be train(model, batches, received, settings)"),
    ("train-fn", f"{HERE}:too_many", "must be train(model, batches, received, settings)"),
    ("train-fn", f"{HERE}:NOT_CALLABLE", "3 is not callable; it must be train(model, batches"),
    ("train-fn", f"{HERE}:missing", f"module '{HERE}' has no 'missing'"),
    ("train-fn", "no_such_lab:train", "cannot import 'no_such_lab'"),
    ("train-fn", "train", "got 'train'; write it 'package.module:name'"),
    ("model", f"{HERE}:no_arguments", "must be build(spec, **params) -> torch.nn.Module"),
    ("model", f"{HERE}:not_a_module", "returned str, not a Module"),
    ("model", "lenet6", "Did you mean 'lenet5'?"),
    ("dataset", f"{HERE}:no_arguments", "must be load(data_dir, **params) -> DomainData"),
    ("dataset", f"{HERE}:not_data", "returned list, not a DomainData"),
    ("dataset", "digit", "Did you mean 'digits'?"),
    ("client-method", f"{HERE}:train", "must be a subclass of hfedatm.contracts.method.Method"),
    ("client-method", f"{HERE}:Halfway", "must be a subclass of hfedatm.contracts.method.Method"),
    ("client-method", f"{HERE}:WrongLoss", "must be loss(self, model, inputs, targets)"),
    ("client-method", "fedprx", "Did you mean 'fedprox'?"),
    ("client-method", "base", "got 'base'; available: "),
    ("server-rule", f"{HERE}:Twice", "must be a subclass of hfedatm.contracts.rule.Rule"),
    ("server-rule", f"{HERE}:WrongMerge", "must be merge(self, updates, situation)"),
    ("server-rule", f"{HERE}:NoMerge", "NoMerge must define merge(self, updates, situation)"),
    ("server-rule", "hfedatm-no-ot", "Did you mean 'hfedatm-no-fot'?"),
    ("client-params", "mu=3", "FedAvg has no parameter 'mu'; it has: none."),
    ("rule-params", "shares=3", "has no parameter 'shares'"),
    ("model-params", "breadth=3", "breadth"),
    ("dataset-params", "size=3", "size"),
    ("device", "cuda:99", "this machine has no cuda:99; 'auto' takes one it has"),
    ("target-domain", "d", "unknown domain 'd'; this data has: a, b, c."),
]


@pytest.mark.parametrize("key, value, cure", REFUSED, ids=[f"{k}={v}" for k, v, _ in REFUSED])
def test_what_cannot_work_is_refused_before_round_1_with_the_cure(tmp_path, key, value, cure):
    with pytest.raises(UserError) as caught:
        with open_run(SMALL | {"output": str(tmp_path), key: value}):
            pass
    assert str(caught.value).startswith(key)
    assert cure in str(caught.value)
    assert list(tmp_path.iterdir()) == [], "nothing has been started"


def texts_and_numbers(data_dir, name: str = "", also: str | None = None, count: int = 0, more=0):
    GIVEN.update(name=name, also=also, count=count, more=more)
    return tiny_data()


GIVEN = {}


def test_a_parameter_declared_as_text_gets_the_text_though_it_is_a_number():
    params = "name=007,also=1e3,count=12,more=12"
    chosen = small_settings(dataset=f"{HERE}:texts_and_numbers", dataset_params=params)
    load_data(chosen)
    assert GIVEN == {"name": "007", "also": "1e3", "count": 12, "more": 12}


def test_an_error_inside_the_users_module_is_not_hidden(tmp_path, monkeypatch):
    (tmp_path / "broken_lab.py").write_text("import surely_not_installed\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(PluginError, match="No module named 'surely_not_installed'"):
        import_object("model", "broken_lab:build")
