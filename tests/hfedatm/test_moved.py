"""What a user's package imported before still works, and says where it is now."""

import re
import subprocess
import sys
import warnings
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

from hfedatm.moved import MOVED

ROOT = Path(__file__).parents[2]
OLD_PLUGIN = """
from client_app.methods.base import Method, State, mean_loss_gradient, snapshot
from client_app.wrapper import Wrapper
from hfedatm.assembly import build_method, build_model, build_rule, load_data
from hfedatm.errors import UserError
from hfedatm.results import read_rounds
from hfedatm.settings import Settings, resolve
from hfedatm.tracking.base import Tracker
from server_app.rules.base import Rule, Situation, StationSide
import hfedatm.settings
import hfedatm.contracts as now

assert (Method, Rule, Wrapper, UserError) == (now.Method, now.Rule, now.Wrapper, now.UserError)
assert hfedatm.settings.Settings is now.Settings
assert StationSide is now.StationRule
"""


def run(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *options, "-c", OLD_PLUGIN]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_a_plugin_with_old_imports_works_and_is_told():
    done = run("-W", "always::DeprecationWarning:__main__")
    assert done.returncode == 0, done.stderr
    for old in ("client_app.methods.base", "server_app.rules.base", "hfedatm.settings"):
        assert f"{old} is deprecated; import from {MOVED[old]}" in done.stderr
    assert "StationSide is deprecated; it is called StationRule" in done.stderr


@pytest.mark.parametrize("old", MOVED)
def test_an_old_name_is_the_new_module(old):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert import_module(old) is import_module(MOVED[old])
    assert import_module(MOVED[old]).__spec__.name == MOVED[old]


def test_names_that_never_were_are_still_unknown():
    assert find_spec("hfedatm.nothing") is None
    with pytest.raises(ModuleNotFoundError):
        import_module("client_app.methods.nothing")


def test_nothing_here_uses_an_old_name():
    places = ["hfedatm*", "*_app", "examples", "docs", "tests", "benchmarks", "README.md"]
    files = [f for place in places for top in ROOT.glob(place) for f in (top, *top.rglob("*"))]
    texts = [f for f in files if f.suffix in (".py", ".md", ".j2", ".ipynb")]
    old = re.compile(rf"\b(from|import) ({'|'.join(map(re.escape, MOVED))})\b(?! is)")
    found = [str(f) for f in texts if f != Path(__file__) and old.search(f.read_text("utf-8"))]
    assert len(texts) > 300
    assert not found
