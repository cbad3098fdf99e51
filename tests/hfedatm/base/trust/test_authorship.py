"""A results folder from elsewhere makes nobody import what it names."""

import json
import shutil
import stat
import sys
from pathlib import Path

import pytest
from helpers import SMALL, run_small

from hfedatm.base.errors import UserError
from hfedatm.base.results import RunFolder
from hfedatm.exporting import export_run
from hfedatm.runs import read_run
from hfedatm.runtime.local import run_locally

KEYS = ["dataset", "model", "client-method", "server-rule", "train-fn", "track"]


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """A run of built-ins and the tests' own code, made by this user."""
    return run_small(tmp_path_factory.mktemp("results"), rounds=1, station_rounds=1)


@pytest.fixture
def folder(made, tmp_path) -> Path:
    return shutil.copytree(made, tmp_path / "run")


@pytest.fixture
def mischief(tmp_path, monkeypatch) -> Path:
    """A module whose import leaves a mark."""
    mark = tmp_path / "mark"
    (tmp_path / "mischief.py").write_text(f"open({str(mark)!r}, 'w')\nrun = print\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield mark
    sys.modules.pop("mischief", None)


def change(folder: Path, **settings) -> dict:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["settings"] |= {key.replace("_", "-"): value for key, value in settings.items()}
    path.write_text(json.dumps(config))
    return config


@pytest.mark.parametrize("key", KEYS)
def test_a_changed_folder_is_not_resumed(folder, mischief, key):
    change(folder, **{key: "mischief:run"})
    with pytest.raises(UserError) as refused:
        run_locally({"resume": str(folder)})
    (line,) = str(refused.value).splitlines()
    assert "was not made by you here" in line and f" {key}=mischief:run" in line
    assert not mischief.exists()


@pytest.mark.parametrize("key", ["dataset", "model", "client-method", "server-rule"])
def test_a_changed_folder_is_not_exported(folder, mischief, tmp_path, key):
    change(folder, **{key: "mischief:run"})
    with pytest.raises(UserError, match="name it again: .*--allow mischief:run"):
        export_run(read_run(folder), "last", tmp_path / "export")
    assert not mischief.exists() and not (tmp_path / "export").exists()


@pytest.mark.parametrize("author", [None, "", "0" * 64, 7, ["x"]])
def test_nobody_else_can_sign(folder, author):
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["author"] = author
    path.write_text(json.dumps(config))
    with pytest.raises(UserError, match="was not made by you here"):
        RunFolder.reopen(str(folder), {})


def test_a_folder_of_another_user_names_code_in_vain(folder, monkeypatch, tmp_path):
    """Until the person names it, each name that there is."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "somebody"))
    with pytest.raises(UserError, match="again: dataset=helpers:tiny_data model=helpers:tiny_net"):
        RunFolder.reopen(str(folder), {})
    with pytest.raises(UserError, match="again: model=helpers:tiny_net"):
        RunFolder.reopen(str(folder), {"dataset": SMALL["dataset"]})
    assert RunFolder.reopen(str(folder), {k: SMALL[k] for k in ("dataset", "model")}).id
    allow = [SMALL["dataset"], SMALL["model"]]
    assert export_run(read_run(folder), "last", tmp_path / "export", allow=allow)


def test_what_this_user_made_goes_on_as_ever(folder, tmp_path):
    assert RunFolder.reopen(str(folder), {}).id
    assert export_run(read_run(folder), "last", tmp_path / "export")


def test_an_old_folder_without_own_code_goes_on_as_ever(folder):
    path = folder / "config.json"
    config = change(folder, dataset="digits", model="lenet5", **{"target-domain": "45"})
    del config["author"]
    path.write_text(json.dumps(config))
    assert RunFolder.reopen(str(folder), {}).id


def test_the_key_is_this_users_only_and_in_no_folder(made, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    run_small(tmp_path / "results", rounds=1, station_rounds=1)
    key = tmp_path / "config/hfedatm/author.key"
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    assert len(key.read_bytes()) == 32
    assert [path.name for path in key.parent.iterdir()] == ["author.key"]
    secret = key.read_bytes()
    for path in (tmp_path / "results").rglob("*"):
        assert path.is_dir() or secret not in path.read_bytes()
        assert path.is_dir() or secret.hex() not in path.read_bytes().decode("latin1")


def test_a_user_without_a_home_still_runs(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "file"))
    folder = run_small(tmp_path / "results", rounds=1, station_rounds=1)
    with pytest.raises(UserError, match="was not made by you here"):
        RunFolder.reopen(str(folder), {})


def test_a_deployed_server_has_its_owners_list(folder, policy, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "somebody"))
    policy(code={"allowed": ["helpers:tiny_data", "helpers:tiny_net"]})
    assert RunFolder.reopen(str(folder), {}).id
    policy(code={"allowed": ["helpers:tiny_data"]})
    with pytest.raises(UserError, match="code.allowed"):
        run_locally({"resume": str(folder)})
