"""Every benchmark runs, at tiny sizes, and writes what the table needs."""

import importlib
import json
import math
import sys
import time
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(autouse=True)
def scripts(monkeypatch):
    """Let the scripts import each other as they do when they are run."""
    monkeypatch.syspath_prepend(str(FOLDER))


def script_names() -> list[str]:
    """Return the scripts that share the common command line."""
    return sorted(
        path.stem
        for path in FOLDER.glob("*.py")
        if "publish(__file__" in path.read_text(encoding="utf-8")
    )


def test_the_driver_knows_every_script():
    assert sorted(importlib.import_module("run_all").SCRIPTS) == script_names()


@pytest.mark.skipif(sys.platform != "linux", reason="peak memory is read from /proc")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.e2e if name == "deployment_overhead" else ())
        for name in script_names()
    ],
)
def test_a_script_writes_its_figures(name, tmp_path):
    importlib.import_module(name).main(["--smoke", "--output", str(tmp_path)])
    result = json.loads((tmp_path / f"{name}.json").read_text(encoding="utf-8"))
    assert result["smoke"] and result["threads"] == 1 and result["machine"]["cores"] >= 1
    assert result["figures"]
    for figure in result["figures"]:
        assert figure["name"] and figure["compared_with"] and math.isfinite(figure["value"])
        kept = figure["value"] >= figure["limit"] if figure["at_least"] else None
        kept = figure["value"] <= figure["limit"] if kept is None else kept
        assert figure["reached"] == kept


def test_a_pair_is_compared_in_turn():
    measure, order = importlib.import_module("measure"), []

    def job(name: str, seconds: float):
        def run() -> None:
            order.append(name)
            end = time.process_time() + seconds
            while time.process_time() < end:
                pass

        return run

    pair = measure.paired(job("a", 0.04), job("b", 0.02), repeats=3)
    assert order == ["a", "b"] * 4
    assert 1.5 < pair["ratio"] < 2.5


def fill(megabytes: int):
    """Return a job that needs this much."""
    return lambda: bytearray(b"x" * (megabytes * 10**6))


def test_the_peak_is_what_the_job_adds(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    measure = importlib.import_module("measure")
    prepare = importlib.import_module("test_benchmarks").fill
    small, large = (measure.peak_bytes(prepare, size) for size in (10, 100))
    assert 150e6 < large - small < 210e6  # the literal and its copy


def test_a_figure_that_is_no_number_is_not_published(tmp_path):
    measure = importlib.import_module("measure")
    chosen = measure.options("nothing", ["--output", str(tmp_path)])
    with pytest.raises(ValueError, match="is no figure"):
        measure.publish("x.py", [measure.Figure("x", math.nan, 1.0, "y")], chosen)
    assert not list(tmp_path.iterdir())


def test_the_table_goes_between_its_marks(tmp_path):
    run_all = importlib.import_module("run_all")
    page = tmp_path / "page.md"
    page.write_text(f"before\n{run_all.BEGIN}\nold\n{run_all.END}\nafter\n")
    run_all.write_page("new", page)
    assert page.read_text() == f"before\n{run_all.BEGIN}\nnew\n{run_all.END}\nafter\n"
