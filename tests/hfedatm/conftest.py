"""Finished runs of the small federation, made once for all tests that only read them."""

import json
import shutil
from pathlib import Path

import pytest
from helpers import run_small
from typer.testing import CliRunner, Result

from hfedatm.cli.main import typer_app


@pytest.fixture(scope="session")
def results(tmp_path_factory) -> Path:
    """Folder of runs: two seeds of two rules, and one whose stations start apart."""
    folder = tmp_path_factory.mktemp("results")
    for rule in ("avg", "hfedatm"):
        for seed in (0, 1):
            run_small(folder, f"{rule}-{seed}", server_rule=rule, seed=seed)
    run_small(folder, "apart", station_start="own", ot_scope="all", **{"lambda": 0.3})
    return folder


@pytest.fixture
def broken_run(results, tmp_path) -> Path:
    """A run in which a client failed, a station was slow and a round was lost; not finished."""
    path = tmp_path / "broken"
    shutil.copytree(results / "hfedatm-0", path)
    (path / "summary.json").unlink()
    rounds = [json.loads(line) for line in (path / "rounds.jsonl").read_text().splitlines()]
    rounds[0]["failures"] = [{"node": "station 1, client 3", "reason": "Diverged: <nan> & more"}]
    rounds[1]["failures"] = [{"node": "station 0", "reason": "time out"}]
    rounds[1]["kept"] = "1 of 2 stations usable, 2 needed"
    # a third station, so that one of them can be far above the median
    rounds[1]["per_station"].append(dict(rounds[1]["per_station"][0], name="station 2"))
    for station, seconds in zip(rounds[1]["per_station"], (1.0, 9.0, 1.1), strict=True):
        station["seconds"] = seconds
    (path / "rounds.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rounds))
    return path


@pytest.fixture
def hfedatm():
    """Call the command line in this process."""

    def call(*arguments: object) -> Result:
        return CliRunner().invoke(typer_app, [str(argument) for argument in arguments])

    return call
