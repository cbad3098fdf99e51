"""What the documentation says works: its commands and code run, its names exist.

A page's ``python`` blocks with a title are files, its ``bash`` blocks are run in order in a folder
that holds them. Settings are made small; a block that cannot run here is preceded by
``<!-- test: skip, <reason> -->``. Commands of other programs (make, flwr) are checked, not run.
"""

from __future__ import annotations

import os
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from glob import glob
from pathlib import Path
from typing import Any

import pytest
import typer

import client_app.methods
import hfedatm.runtime.local
import hfedatm_core.data
import hfedatm_core.models
import server_app.rules
from hfedatm.base.describing import describe
from hfedatm.base.presets import load_presets
from hfedatm.cli.main import app, typer_app
from hfedatm_core.discovery import available

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "SECURITY.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
README = (ROOT / "README.md").read_text(encoding="utf-8")
SMALL = {
    "rounds": 1,
    "station-rounds": 1,
    "local-epochs": 1,
    "stations": 2,
    "clients-per-station": 2,
}
# Programs a page may call; what they are called with is written down instead of run.
RECORDER = """
note() { printf '%s\\x1f' "$@" >> "$CALLS"; printf '\\n' >> "$CALLS"; }
for program in hfedatm make flwr source .venv/bin/pre-commit; do
  eval "function $program { note $program \\"\\$@\\"; }"
done
"""


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    language: str
    title: str
    text: str
    skipped: bool


def blocks(page: Path) -> Iterator[Block]:
    fence = re.compile(
        r"(?P<skip><!-- test: skip, [^\n]+ -->\n)?"
        r'^```(?P<language>\w+)(?: title="(?P<title>[^"]+)")?'
        r"\n(?P<text>.*?)^```$",
        re.MULTILINE | re.DOTALL,
    )
    for found in fence.finditer(page.read_text(encoding="utf-8")):
        yield Block(found["language"], found["title"] or "", found["text"], bool(found["skip"]))


def inline_code(page: Path) -> list[str]:
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    return [code.replace("\n", " ") for code in re.findall(r"`([^`]+)`", text)]


def calls(script: str, folder: Path) -> list[list[str]]:
    """Return the commands a piece of shell calls, loops unrolled and quotes taken off."""
    record = folder / "calls"
    record.write_text("")
    environment = {**os.environ, "CALLS": str(record)}
    subprocess.run(
        ["bash", "-euc", RECORDER + script], check=True, cwd=folder, env=environment, timeout=60
    )
    return [line.rstrip("\x1f").split("\x1f") for line in record.read_text().splitlines()]


def commands() -> list[str]:
    return list(typer.main.get_command(typer_app).commands)  # type: ignore[attr-defined]


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def is_sample(page: Path) -> bool:
    return any(b.language in ("bash", "python") and not b.skipped for b in blocks(page))


@pytest.mark.parametrize("page", filter(is_sample, PAGES), ids=name)
def test_samples_work(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_locally = hfedatm.runtime.local.run_locally

    def run_small(given: dict[str, Any]) -> dict[str, Any]:
        summary = run_locally({**given, **SMALL})
        assert summary["failures"] == 0, "a run goes on without a node that failed; a sample not"
        return summary

    monkeypatch.setattr(hfedatm.runtime.local, "run_locally", run_small)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("HFEDATM_STATE", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    found = [block for block in blocks(page) if not block.skipped]
    files = [block for block in found if block.language == "python"]
    assert all(block.title for block in files), "a python sample needs a title to be tested"
    for block in files:
        Path(block.title).write_text(block.text)
    script = "\n".join(block.text for block in found if block.language == "bash")
    done = calls(script, tmp_path)
    try:
        for program, *arguments in done:
            if program == "hfedatm":
                hfedatm_command(arguments, monkeypatch)
            elif program == "make":
                check_make(arguments)
            elif program == "flwr":
                check_flwr(arguments)
        for block in files:
            if f"{Path(block.title).stem}:" not in script:  # not a plug-in: a script of its own
                runpy.run_path(block.title)
    finally:
        for block in files:
            sys.modules.pop(Path(block.title).stem, None)


def hfedatm_command(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [sorted(glob(a)) if "*" in a else [a] for a in arguments]
    monkeypatch.setattr(sys, "argv", ["hfedatm", *sum(paths, [])])
    with pytest.raises(SystemExit) as ended:
        app()
    assert not ended.value.code, f"hfedatm {shlex.join(arguments)} ended with {ended.value.code}"


def check_make(targets: list[str]) -> None:
    text = (ROOT / "Makefile").read_text()
    known = re.findall(r"^([a-z-]+):", text, flags=re.MULTILINE)
    variables = [word.partition("=")[0] for word in targets if "=" in word]
    assert {word for word in targets if "=" not in word} <= set(known)
    assert all(f"$({variable})" in text for variable in variables)


def check_flwr(arguments: list[str]) -> None:
    assert arguments[:2] == ["run", "."]
    given = arguments[arguments.index("-c") + 1] if "-c" in arguments else ""
    for assignment in shlex.split(given):
        check_setting(*assignment.split("=", 1))


def check_setting(key: str, value: str) -> None:
    rows = {row["key"]: row for row in describe()}
    assert key in rows
    if key == "preset":
        assert value in load_presets()
    if " | " in rows[key]["allowed"]:
        assert value in rows[key]["allowed"].split(" | ")
    own = ":" in value or value.startswith("my-") or "<" in value
    if key in PLUGINS and not own:
        assert value in PLUGINS[key]


def modules(package: Any) -> list[str]:
    files = Path(package.__path__[0]).glob("[a-z]*.py")
    return [file.stem.replace("_", "-") for file in files if file.stem != "base"]


PLUGINS = {
    "dataset": available(hfedatm_core.data, "load"),
    "model": available(hfedatm_core.models, "build"),
    "client-method": modules(client_app.methods),
    "server-rule": modules(server_app.rules),
}


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_names_exist(page: Path) -> None:
    fenced = [b.text for b in blocks(page) if b.language in ("bash", "text")]
    for code in [*inline_code(page), *fenced]:
        for command in re.findall(r"(?<![\w/.-])hfedatm ([a-z]+)\b", code):
            assert command in commands(), f"there is no command hfedatm {command}"
        for targets in re.findall(r"(?<![\w-])make ([a-z -]+)", code):
            check_make(targets.split())
    for code in inline_code(page):
        code = code.replace(" = ", "=")
        if code != "key=value" and re.fullmatch(r"([a-z][a-z.-]*=\S*\s*)+", code):
            for key, value in (part.split("=", 1) for part in shlex.split(code)):
                check_setting(key, value)
        if re.fullmatch(r"[\w.-]+/[\w./-]+\.(py|yaml|toml|md)", code) and "/my_" not in code:
            assert (ROOT / code).exists(), f"there is no {code}"


@pytest.mark.parametrize("page", [p for p in PAGES if p.parent == ROOT], ids=name)
def test_links_lead_somewhere(page: Path) -> None:
    """Those of the pages in docs/ are checked by ``mkdocs build --strict``."""
    for link in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text(encoding="utf-8")):
        if "://" not in link:
            assert (page.parent / link).exists(), f"{link} does not exist"


def test_the_readme_lists_what_is_built_in() -> None:
    rows = re.findall(
        r"^\| (data sets|models|client methods|server rules) \| (.*) \|$", README, re.M
    )
    kinds = dict(
        zip(("data sets", "models", "client methods", "server rules"), PLUGINS, strict=True)
    )
    assert len(rows) == 4
    for kind, names in rows:
        assert sorted(re.findall(r"`([^`]+)`", names)) == sorted(PLUGINS[kinds[kind]])


def test_the_architecture_says_where_the_unseen_domain_is_evaluated() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    (row,) = (line for line in page.splitlines() if "evaluates the unseen domain" in line)
    files = re.findall(r"`([\w/]+\.py)`", row)
    assert any("return Unseen(" in (ROOT / file).read_text(encoding="utf-8") for file in files)
