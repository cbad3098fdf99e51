"""`hfedatm init`: the starter project runs as it is."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from hfedatm.base.resolving import all_keys, resolve

BIN = Path(sys.executable).parent


def in_folder(folder: Path, *command: object, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [str(BIN / str(command[0])), *map(str, command[1:])],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
    )


@pytest.fixture
def project(hfedatm, tmp_path) -> Path:
    folder = tmp_path / "My-Hospital"
    done = hfedatm("init", folder)
    assert done.exit_code == 0, done.output
    return folder


def test_names_come_from_the_folder(project):
    about = tomllib.loads((project / "pyproject.toml").read_text())
    assert about["project"]["name"] == "my-hospital"
    assert (project / "my_hospital" / "model.py").is_file()


def test_flower_may_override_every_setting(project):
    config = tomllib.loads((project / "pyproject.toml").read_text())["tool"]["flwr"]["app"][
        "config"
    ]
    flat = {}
    for key, value in config.items():
        flat |= (
            {f"{key}.{k}": v for k, v in value.items()} if isinstance(value, dict) else {key: value}
        )
    assert set(flat) == set(all_keys())
    assert resolve(flat).model == "my_hospital.model:build"


def test_it_runs_and_learns(project):
    done = in_folder(project, "hfedatm", "run", "--config", "config.yaml", "run-name=first")
    assert done.returncode == 0, done.stderr
    final = re.search(r"round +5/5 .* source +([\d.]+) %", done.stdout)
    assert float(final[1]) > 50  # a third by chance
    assert "0 failures" in done.stdout
    shown = in_folder(project, "hfedatm", "report")
    assert shown.returncode == 0, shown.stderr
    assert (project / "results" / "first" / "report.html").is_file()


def test_flower_can_build_it(project):
    done = in_folder(project, "flwr", "build", FLWR_HOME=str(project / "home"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert list(project.glob("*.fab"))


def test_nothing_of_the_user_is_overwritten(hfedatm, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("irreplaceable")
    done = hfedatm("init", tmp_path / "mine")
    assert "not an empty folder" in str(done.exception)
    assert [p.name for p in (tmp_path / "mine").iterdir()] == ["thesis.txt"]


@pytest.mark.parametrize(
    "name", ["1st", "class", "torch", "a" * 40, "!!!", "two words", "under_score"]
)
def test_names_that_cannot_be_packages_are_refused(hfedatm, tmp_path, name):
    assert "init:" in str(hfedatm("init", tmp_path / name).exception)
    assert not (tmp_path / name).exists()
