"""The audit is the canary: it recovers examples from bare Grams and none from private ones."""

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from hfedatm.base.building import build_method, build_model, load_data
from hfedatm.base.errors import UserError
from hfedatm.base.resolving import resolve
from hfedatm.cli.audit import attack, draw
from hfedatm.cli.main import typer_app

DIGITS = {"dataset": "digits", "model": "lenet5", "local-epochs": 5, "gram-min-rows": 8}


def test_most_rows_are_recovered_without_dp_and_none_with_epsilon_one(tmp_path):
    settings = resolve(DIGITS | {"privacy.mechanism": "example", "privacy.epsilon": 1.0})
    findings = attack(settings, rows=8)
    assert list(findings) == ["fc1", "fc2", "fc3"]
    for name, finding in findings.items():
        assert finding.without.attacked and finding.private.attacked
        assert finding.private.recovered == 0, f"{name}: the noise does not protect"
    recovered = sum(f.without.recovered for f in findings.values())
    trivial = sum(f.without.without_search for f in findings.values())
    assert recovered > 3 * 8 / 2, f"the attack has become weak: {recovered} of 24"
    assert trivial < recovered / 2, "rows so alike that finding them proves nothing"
    draw(findings, tmp_path / "audit.png")
    assert (tmp_path / "audit.png").stat().st_size > 1000


def test_the_command_prints_what_it_found(tmp_path):
    settings = resolve(DIGITS)
    model = build_model(settings, load_data(settings).spec, build_method(settings))
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    result = CliRunner().invoke(
        typer_app,
        ["audit", "--model", "lenet5", "--data", "digits", "--rows", "2", "--layer", "fc3",
         "--weights", str(tmp_path / "model.safetensors")],
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "recovered without DP" in result.output
    assert "fc3" in result.output and "fc1" not in result.output
    assert " of 2" in result.output
    assert "No DP is configured" in result.output


@pytest.mark.parametrize(
    ("rows", "layer", "message"),
    [(10_000, "", "client 0 has"), (2, "fc9", "there are: fc1, fc2, fc3")],
)
def test_a_wrong_option_is_named(rows, layer, message):
    with pytest.raises(UserError, match=message):
        attack(resolve(DIGITS | {"local-epochs": 1}), rows, layer)


def test_weights_of_another_model_are_refused(tmp_path):
    save_file({"a": torch.zeros(2)}, tmp_path / "other.safetensors")
    with pytest.raises(UserError, match="does not fit this model"):
        attack(resolve(DIGITS), 2, weights=tmp_path / "other.safetensors")


def test_a_layer_too_wide_for_a_full_gram_is_not_attacked():
    findings = attack(resolve(DIGITS | {"gram-max-dim": 100, "local-epochs": 1}), 2, "fc1")
    assert findings["fc1"].skipped == "not attacked: sends a low-rank factor"
    assert findings["fc1"].without is None
