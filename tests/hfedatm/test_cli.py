"""The command line: run, settings, and how mistakes end."""

import json
import sys
from importlib.metadata import version

import pytest
from helpers import SMALL
from typer.testing import CliRunner

from hfedatm.base.resolving import all_keys
from hfedatm.base.settings import SettingsError
from hfedatm.cli.main import app, typer_app
from hfedatm.cli.run import read_settings

ARGUMENTS = [f"{key}={value}" for key, value in (SMALL | {"rounds": 1}).items()]


def call(capsys, monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["hfedatm", *arguments])
    with pytest.raises(SystemExit) as ended:
        app()
    return ended.value.code or 0, capsys.readouterr()


def test_run_shows_three_tiers_and_ends_with_the_results_folder(tmp_path, capsys, monkeypatch):
    arguments = [*ARGUMENTS, f"output={tmp_path}", "run-name=one"]
    code, shown = call(capsys, monkeypatch, "run", *arguments)
    assert code == 0
    lines = shown.out.strip().splitlines()
    assert lines[0].startswith("HFedATM: 2 stations x 2 clients")
    [round_line] = [line for line in lines if line.startswith("round ")]
    for part in ("stations 2/2", "clients 4", "loss ", "source ", "unseen ", "moved ", " clients,",
                 " stations", " s"):  # fmt: skip
        assert part in round_line
    assert lines[-1] == f"Results: {tmp_path / 'one'}"


def test_a_file_of_settings_is_overlaid_by_the_command_line(tmp_path):
    file = tmp_path / "my.yaml"
    file.write_text("rounds: 3\nlr: 1.0e-2\nlambda: 0.5\n")
    assert read_settings(file, ["rounds=4", "seed = 1"]) == {
        "rounds": "4", "lr": 0.01, "lambda": 0.5, "seed": "1",
    }  # fmt: skip


def test_an_empty_file_gives_nothing_and_a_list_is_refused(tmp_path):
    file = tmp_path / "my.yaml"
    file.write_text("")
    assert read_settings(file, []) == {}
    file.write_text("- rounds\n")
    with pytest.raises(SettingsError, match="must hold 'key: value' lines"):
        read_settings(file, [])


@pytest.mark.parametrize(
    "argument, message",
    [
        ("rounds=none", "rounds: got 'none'; input should be a valid integer"),
        ("ronds=1", "ronds: unknown key in settings; did you mean 'rounds'?"),
        ("rounds", "got 'rounds'; write settings as key=value"),
        ("model=nosuch.lab:net", "model: cannot import 'nosuch.lab'"),
    ],
)
def test_a_mistake_ends_in_one_message_without_a_traceback(capsys, monkeypatch, argument, message):
    code, shown = call(capsys, monkeypatch, "run", *ARGUMENTS, argument)
    assert code == 2
    assert f"hfedatm: {message}" in shown.err
    assert "Traceback" not in shown.err + shown.out


def test_settings_lists_every_key():
    shown = CliRunner().invoke(typer_app, ["settings", "--json"])
    assert shown.exit_code == 0
    listed = [row["key"] for row in json.loads(shown.output)]
    assert [key for key in listed if not key.startswith("rule-params=")] == all_keys()
    table = CliRunner().invoke(typer_app, ["settings"], env={"COLUMNS": "200"})
    assert "clients-per-station" in table.output


def test_settings_without_a_match_says_so(monkeypatch, capsys):
    code, shown = call(capsys, monkeypatch, "settings", "run_nam")
    assert code == 2 and "no setting has 'run_nam'" in shown.err
    assert "Did you mean 'run-name'?" in shown.err


def test_version_names_what_matters(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["hfedatm", "--version"])
    with pytest.raises(SystemExit) as ended:
        app()
    assert ended.value.code == 0
    said = capsys.readouterr().out
    assert [f"{name} {version(name)}" in said for name in ("hfedatm", "flwr", "torch")] == [
        True
    ] * 3
