"""A file of the user's with the name of one of our packages: the message says what to do."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hfedatm.runtime.own_tiers import TIERS, require_own_tiers

ROOT = Path(__file__).resolve().parents[2]


def test_nothing_is_said_where_nothing_is_hidden():
    require_own_tiers()


@pytest.mark.parametrize("name", TIERS)
def test_a_file_that_hides_a_tier_is_named_with_the_cure(tmp_path, name):
    """Python puts a script's own folder first."""
    (tmp_path / f"{name}.py").write_text("app = 'mine'\n")
    (tmp_path / "apps.py").write_text("from hfedatm.apps import client, server\n")
    done = subprocess.run(
        [sys.executable, "apps.py"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    said = done.stderr.splitlines()[-1]
    assert f"{tmp_path / name}.py has the name of HFedATM's package {name!r} and hides it" in said
    assert f"my_{name}.py" in said
