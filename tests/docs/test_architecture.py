"""The list of files that a weight passes is what a run shows."""

import re
from pathlib import Path

import pytest
from weight_way import WeightWay

from hfedatm.runtime.local import run_locally
from server_app.strategy import HFedATMStrategy

ROOT = Path(__file__).parents[2]
MOST = 26


@pytest.fixture(scope="module")
def listed() -> list[str]:
    page = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    section = page.partition("## The way of a weight")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (\d+) \| `([\w/]+\.py)` \|", section, re.MULTILINE)
    assert [int(number) for number, _ in rows] == list(range(1, len(rows) + 1))
    return [file for _, file in rows]


def test_the_way_is_short(listed):
    assert 10 < len(listed) <= MOST


def test_a_weight_passes_the_listed_files_in_this_order(listed, tmp_path, monkeypatch):
    way, start = WeightWay("fc3.weight"), HFedATMStrategy.start

    def followed(self, *args, **kwargs):
        with way:
            return start(self, *args, **kwargs)

    monkeypatch.setattr(HFedATMStrategy, "start", followed)
    settings = {"stations": 2, "clients-per-station": 2, "rounds": 1, "station-rounds": 1}
    settings |= {"local-epochs": 1, "diagnostics": False, "device": "cpu"}
    run_locally({**settings, "output": str(tmp_path), "run-name": "followed"})
    assert list(way.files) == listed
