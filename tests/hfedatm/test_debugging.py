"""`hfedatm run --debug` and `--pdb`: the first error stops the run where it is raised."""

import sys

import pytest
from helpers import SMALL

from hfedatm.base import tracebacks
from hfedatm.cli.main import app

CODE = """
from hfedatm.contracts import Method
from server_app.rules.avg import Avg

class Breaks(Method):
    calls = 0
    def loss(self, model, inputs, targets):
        self.calls += 1
        clue = self.calls * 1000
        if self.calls > 1:
            raise LookupError("the second batch")
        return super().loss(model, inputs, targets)

class Merges(Avg):
    def merge(self, updates, situation):
        clue = 42
        raise ValueError("no way to merge")
"""


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Run with options; return the exit code and what was shown."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "breakable.py").write_text(CODE)

    def call(*options, **changes):
        given = SMALL | {"output": tmp_path / "results"} | changes
        arguments = [f"{key.replace('_', '-')}={value}" for key, value in given.items()]
        monkeypatch.setattr(sys, "argv", ["hfedatm", "run", *options, *arguments])
        with pytest.raises(SystemExit) as ended:
            app()
        shown = capsys.readouterr()
        return ended.value.code, shown.out, shown.err

    yield call
    sys.modules.pop("breakable", None)


def test_debug_stops_at_a_clients_error_with_its_traceback(run):
    code, out, err = run("--debug", client_method="breakable:Breaks")
    assert code == 1
    assert 'raise LookupError("the second batch")' in err and "breakable.py" in err
    assert "round   1" not in out


def test_debug_stops_at_a_rules_error_even_one_that_a_run_survives(run):
    code, _, err = run("--debug", server_rule="breakable:Merges")
    assert code == 1 and 'raise ValueError("no way to merge")' in err
    code, out, _ = run(server_rule="breakable:Merges")
    assert code == 2 and "MODEL KEPT: merge: no way to merge" in out


@pytest.mark.parametrize(
    "given, clue",
    [({"client_method": "breakable:Breaks"}, 2000), ({"server_rule": "breakable:Merges"}, 42)],
)
def test_pdb_opens_the_debugger_where_the_error_was_raised(run, monkeypatch, given, clue):
    seen = []

    def debugger(trace):
        while trace.tb_next:
            trace = trace.tb_next
        seen.append(trace.tb_frame.f_locals["clue"])

    monkeypatch.setattr("pdb.post_mortem", debugger)
    assert run("--pdb", **given)[0] == 1
    assert seen == [clue]


def test_a_plain_mistake_is_still_one_message(run):
    code, _, err = run("--debug", lr=-1)
    assert code == 2 and err.startswith("hfedatm: lr") and "Traceback" not in err


def test_nothing_is_left_of_debugging(run):
    run("--debug", client_method="breakable:Breaks")
    assert not tracebacks.is_debugging()
