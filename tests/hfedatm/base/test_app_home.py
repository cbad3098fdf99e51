"""Results stay with their project, whichever project's SuperLink runs it."""

import shutil

import pytest

from hfedatm.base.app_home import home_of, output_of, project_of
from hfedatm.base.errors import UserError
from hfedatm.runs import find_run, newest_run
from hfedatm.starter import write_project


@pytest.fixture
def projects(tmp_path, monkeypatch):
    """Two projects; a SuperLink was started in the first."""
    monkeypatch.setenv("FLWR_HOME", str(tmp_path / "flower"))
    for name in ("first-lab", "second-lab"):
        write_project(tmp_path / name)
    monkeypatch.chdir(tmp_path / "first-lab")
    return tmp_path


def test_a_project_is_known_by_its_flower_app(projects):
    assert project_of(projects / "first-lab") == "first-lab/first-lab"
    assert project_of(projects) is None
    (projects / "first-lab" / "pyproject.toml").write_text("[project]\nname = 3\n")
    assert project_of(projects / "first-lab") is None


def test_the_project_whose_superlink_it_is_gets_its_results_into_its_folder(projects):
    assert str(output_of("first-lab/first-lab", "")) == "results"
    assert str(output_of("first-lab/first-lab", "mine")) == "mine"


def test_another_project_does_not_write_into_it(projects):
    found = output_of("second-lab/second-lab", "")
    assert found == projects / "flower/hfedatm/second-lab.second-lab/results"
    assert output_of("second-lab/second-lab", "/data/mine").as_posix() == "/data/mine"


def test_commands_in_the_other_project_find_its_runs(projects, results, monkeypatch):
    home = home_of("second-lab/second-lab") / "results"
    shutil.copytree(results / "avg-0", home / "elsewhere")
    monkeypatch.chdir(projects / "second-lab")
    assert newest_run() == find_run("elsewhere") == home / "elsewhere"
    monkeypatch.chdir(projects / "first-lab")
    with pytest.raises(UserError, match="there is no run in"):
        newest_run()
