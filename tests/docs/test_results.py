"""The tables of results in the documentation are what the runs in ``evidence`` give."""

import re
import shlex
import sys
from pathlib import Path

import pytest

from hfedatm.cli.main import typer_app
from hfedatm.reproduce.runfile import read_runs

ROOT = Path(__file__).parents[2]
TABLES = sorted((ROOT / "docs" / "results").glob("*.md"))
EVIDENCE = sorted((ROOT / "evidence").glob("*.jsonl"))


@pytest.mark.parametrize("page", TABLES, ids=lambda page: page.stem)
def test_a_table_follows_from_the_runs(page: Path, tmp_path: Path, monkeypatch) -> None:
    # Pictures depend on the version of the library that draws them.
    monkeypatch.setattr("hfedatm.reproduce.typeset.picture", lambda *_: None)
    command = re.search(r"^```\nhfedatm (.+)\n```$", page.read_text(encoding="utf-8"), re.M)
    assert command is not None
    words = [*shlex.split(command[1]), "--print", "--output", str(tmp_path)]
    words += ["--runs", str(ROOT / "evidence")]
    monkeypatch.setattr(sys, "argv", ["hfedatm", *words])
    typer_app(words, standalone_mode=False)
    assert (tmp_path / page.name).read_bytes() == page.read_bytes()
    assert (tmp_path / page.name).with_suffix(".tex").stat().st_size > 0


def test_the_verdict_follows_from_the_runs(monkeypatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import does_it_win

    page = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    shown = page.split(does_it_win.BEGIN)[1].split(does_it_win.END)[0].strip()
    assert shown == does_it_win.write_table(does_it_win.SETS)
    assert "±" in shown


def test_the_first_page_has_three_screens() -> None:
    page = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    assert len(page.splitlines()) <= 150


def test_every_run_is_there_once() -> None:
    keys = [run["key"] for file in EVIDENCE for run in read_runs(file)]
    assert keys and len(set(keys)) == len(keys)


@pytest.mark.parametrize("file", EVIDENCE, ids=lambda file: file.stem)
def test_every_line_is_whole(file: Path) -> None:
    assert file.read_bytes().count(b"\n") == len(list(read_runs(file)))
    assert file.read_bytes().endswith(b"\n")
