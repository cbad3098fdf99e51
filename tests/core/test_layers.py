"""Imports inside the mathematics point one way: between modules and between packages."""

from pathlib import Path

import pytest
from import_graph import cycle, imports, sources

import hfedatm_core

ROOT = Path(hfedatm_core.__file__).parent.parent


def by_package(graph: dict[str, set[str]]) -> dict[str, set[str]]:
    """Return what the packages (and single modules) directly below the root import."""

    def top(name: str) -> str:
        return ".".join(name.split(".")[:2])

    packages: dict[str, set[str]] = {}
    for name, wanted in graph.items():
        packages.setdefault(top(name), set()).update(map(top, wanted))
    return {name: wanted - {name} for name, wanted in packages.items()}


@pytest.mark.parametrize(
    "late",
    [
        "def f():\n    from core.b import y",
        "def f():\n    from core import b",
        "def f():\n    import core.b",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from core.b import y",
    ],
)
def test_the_check_sees_a_cycle_that_a_late_import_hides(late):
    graph = imports({"core": "", "core.a": late, "core.b": "from core.a import x"})
    assert set(cycle(graph)) == {"core.a", "core.b"}


def test_the_check_sees_a_cycle_of_packages_whose_modules_have_none():
    graph = imports(
        {
            "core.p.low": "",
            "core.p.high": "from core.q.one import x",
            "core.q.one": "from core.p.low import y",
        }
    )
    assert not cycle(graph)
    assert set(cycle(by_package(graph))) == {"core.p", "core.q"}


def test_the_modules_of_the_core_have_no_cycle():
    graph = imports(sources(ROOT, "hfedatm_core"))
    assert len(graph) > 50
    assert any(graph.values())
    assert not cycle(graph)


def test_the_packages_of_the_core_have_no_cycle():
    packages = by_package(imports(sources(ROOT, "hfedatm_core")))
    assert {"hfedatm_core.fot", "hfedatm_core.regmean"} <= packages["hfedatm_core.merging"]
    assert not cycle(packages)


def test_nothing_in_the_core_comes_in_by_the_front_door():
    """Who needs a part imports that part; only ``__init__`` knows all of them."""
    graph = imports(sources(ROOT, "hfedatm_core"))
    assert not [name for name, wanted in graph.items() if "hfedatm_core" in wanted]
