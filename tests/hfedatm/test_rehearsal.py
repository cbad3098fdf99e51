"""Before round 1 one real batch goes through everything: what is wrong is said there."""

import sys

import pytest
import torch
from helpers import SMALL, SPEC, ask_client, assert_same_model, run_small, small_settings, tiny_data
from torch.utils.data import TensorDataset

from hfedatm.base.building import build_method, build_model
from hfedatm.cli.main import app
from hfedatm.contracts import DataSpec, Domain, DomainData, Method
from server_app.rules.avg import Avg

HERE = "test_rehearsal"


def spoilt(change):
    """Return the small data set with each of its domains changed."""
    data = tiny_data()
    return DomainData(SPEC, {name: change(domain) for name, domain in data.domains.items()})


def float_targets(data_dir=None):
    return spoilt(lambda d: Domain(d.name, d.inputs, d.targets.float()))


def class_out_of_range(data_dir=None):
    return spoilt(lambda d: Domain(d.name, d.inputs, d.targets + 1))


def wrong_shape(data_dir=None):
    return DomainData(DataSpec("image", 3, (1, 8, 9)), tiny_data().domains)


def nan_inputs(data_dir=None):
    return spoilt(
        lambda d: Domain(d.name, d.inputs.masked_fill(d.inputs > 2, torch.nan), d.targets)
    )


def torch_dataset(data_dir=None):
    return spoilt(lambda d: Domain(d.name, TensorDataset(d.inputs, d.targets), d.targets))


def few_examples(data_dir=None):
    return tiny_data(examples=100)


BROKEN = {
    "float_targets": "domain 'a': targets is a tensor of torch.float32",
    "class_out_of_range": "a target is not a class: with num_classes = 3 targets are 0 … 2",
    "wrong_shape": "an example has the shape (1, 8, 8), and input_shape of the DataSpec says",
    "nan_inputs": "an input is NaN or infinite",
    "torch_dataset": "inputs is a torch Dataset (TensorDataset), not a Tensor: make tensors of it",
    "few_examples": "4 of 4 clients have too few examples: the Gram of 4 is made of 45 rows",
}


@pytest.mark.parametrize("command", ["check", "run"])
@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_data_set_is_one_clear_message(name, command, monkeypatch, capsys, tmp_path):
    given = SMALL | {"dataset": f"{HERE}:{name}", "output": str(tmp_path / "results")}
    arguments = [f"{key}={value}" for key, value in given.items()]
    monkeypatch.setattr(sys, "argv", ["hfedatm", command, *arguments])
    with pytest.raises(SystemExit) as ended:
        app()
    shown = capsys.readouterr()
    assert ended.value.code == 2
    assert BROKEN[name] in shown.err and shown.err.count("\n") == 1
    assert "Traceback" not in shown.err + shown.out and "round" not in shown.out
    assert not (tmp_path / "results").exists()


def test_a_deployed_node_checks_its_own_data_and_its_reason_arrives(policy, tmp_path, caplog):
    """It says what is wrong with them, and not what they are: that stays in the node's log."""
    allowed = [f"{HERE}:class_out_of_range", SMALL["model"]]
    policy(data={"folder": str(tmp_path)}, code={"allowed": allowed})
    settings = small_settings(dataset=f"{HERE}:class_out_of_range")
    model = build_model(settings, SPEC, build_method(settings))
    reason = ask_client(settings, 0, model.state_dict()).config_records["failure"]["reason"]
    assert "this node's own data cannot be used as" in reason
    assert "a target is not a class: with num_classes = 3" in reason
    assert "domain 'a'" not in reason and str(tmp_path) not in reason
    assert "domain 'a'" in caplog.text and "from 1 to 3" in caplog.text


class Silent(Method):
    """Reports nothing."""


class Curious(Avg):
    """Wants to know what nobody reports."""

    reports = ("entropy",)


def test_a_rule_whose_reports_nobody_makes_is_refused(monkeypatch, capsys):
    given = SMALL | {"client-method": f"{HERE}:Silent", "server-rule": f"{HERE}:Curious"}
    monkeypatch.setattr(sys, "argv", ["hfedatm", "check", *(f"{k}={v}" for k, v in given.items())])
    with pytest.raises(SystemExit):
        app()
    assert (
        "needs each client to report entropy: metrics() must return it" in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    "given",
    [{"server-rule": "mtgc"}, {"server-rule": "fedrc-weights"}, {"client-method": "fediir"}],
    ids=lambda given: next(iter(given.values())),
)
def test_rules_and_methods_that_share_arrays_are_rehearsed_with_theirs(given, hfedatm):
    done = hfedatm("check", *(f"{key}={value}" for key, value in (SMALL | given).items()))
    assert done.exit_code == 0, done.output


def test_the_rehearsal_changes_nothing(tmp_path, monkeypatch):
    run_small(tmp_path, "with")
    monkeypatch.setattr("hfedatm.runtime.opening.rehearse", lambda *_: [])
    run_small(tmp_path, "without")
    assert_same_model(tmp_path / "with", tmp_path / "without")
