"""A user's rule that returns a state and nothing else goes all the way."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from helpers import failures_of, last_model, lines_of, run_small
from typer.testing import CliRunner

from hfedatm.cli.main import typer_app
from hfedatm.contracts import Merged, MergeReport, Rule

RULE = "test_own_rule:Middle"


@dataclass
class Middle(Rule):
    def merge(self, updates, situation):
        states = [update.state for update in updates]
        middle = {n: torch.stack([s[n] for s in states]).mean(0) for n in situation.previous}
        return Merged(middle)


@dataclass
class Careless(Middle):
    def merge(self, updates, situation):
        merged = super().merge(updates, situation)
        return Merged(merged.state, MergeReport(reference=np.int64(3)))


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("results")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HFEDATM_STATE", str(folder / "state"))
        run_small(folder, "own", server_rule=RULE)
        run_small(folder, "average", server_rule="avg")
    return folder


def test_a_state_is_enough_for_a_rule(results):
    assert not failures_of(results / "own")
    for line in lines_of(results / "own"):
        assert not any(line["merge"].values())
        assert line["moved"] == 0 and "kept" not in line
    mean = last_model(results / "average")  # the stations have equally many examples
    for name, value in last_model(results / "own").items():
        torch.testing.assert_close(value, mean[name])


@pytest.mark.parametrize(
    "command",
    [
        ["watch", "own", "--once"],
        ["report", "own"],
        ["compare", "own", "average"],
        ["export", "own", "--output", "exported"],
    ],
    ids=lambda command: command[0],
)
def test_its_run_can_be_looked_at(results, command, monkeypatch):
    monkeypatch.chdir(results)
    shown = CliRunner().invoke(typer_app, command)
    assert shown.exit_code == 0, shown.output


def test_a_report_that_is_none_leaves_the_model_and_says_so(tmp_path):
    with pytest.raises(Exception, match="merge: .*reference"):
        run_small(tmp_path, server_rule="test_own_rule:Careless", rounds=1)
