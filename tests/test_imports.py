"""The house has floors: a module imports from its own floor and those below, never from above."""

import ast
import re
from pathlib import Path

import pytest
from import_graph import Graph, cycle, imports, sources

ROOT = Path(__file__).parents[1]
TIERS = ("client_app", "station_app", "server_app")
FLOORS = {  # from the ground up; the longest name that fits a module counts
    "files that appear whole": ["hfedatm_files"],
    "mathematics": ["hfedatm_core"],
    "shared base": ["hfedatm", "hfedatm.moved", "hfedatm.base", "hfedatm.contracts"],
    "tiers": [*TIERS],
    "what assembles the tiers": [
        *("hfedatm.runtime", "hfedatm.deploy", "hfedatm.flower", "hfedatm.flower_internals"),
        "hfedatm.apps",
    ],
    "what a person touches": [
        *("hfedatm.cli", "hfedatm.report", "hfedatm.reproduce", "hfedatm.comparison"),
        *(
            "hfedatm.backup",
            "hfedatm.doctor",
            "hfedatm.exporting",
            "hfedatm.monitor",
            "hfedatm.preflight",
            "hfedatm.runs",
            "hfedatm.starter",
            "hfedatm.submissions",
        ),
    ],
}
NAMES = list(FLOORS)
# Flower opens a tier by the name of a module and an object in it. Behind these three doors the
# tiers are put together, so they alone reach up, and only to what assembles the tiers.
DOORS = ("client_app.app", "station_app.app", "server_app.app")
# Plug-ins are found by name. The base knows the names of the packages of built-in ones.
NAMED_IN_BASE = {"client_app.methods", "server_app.rules"}


def floor(module: str) -> str:
    """Return the floor a module is on."""
    fitting = [
        (len(room), name)
        for name, rooms in FLOORS.items()
        for room in rooms
        if module == room or (module.startswith(f"{room}.") and room != "hfedatm")
    ]
    assert fitting, f"{module} is on no floor: put it into a room, or say in FLOORS where it is"
    return max(fitting)[1]


def wrong(graph: Graph) -> list[str]:
    """Return the imports that point up, or from one tier into another."""
    found = []
    for module, wanted in graph.items():
        here = NAMES.index(floor(module))
        for other in wanted:
            there = NAMES.index(floor(other))
            across = here == there == NAMES.index("tiers") and _top(module) != _top(other)
            assembles = there == NAMES.index("what assembles the tiers")
            if across or (there > here and not (module in DOORS and assembles)):
                found.append(f"{module} imports {other}")
    return found


def _top(module: str) -> str:
    return module.partition(".")[0]


@pytest.fixture(scope="module")
def texts() -> dict[str, str]:
    packages = {room.partition(".")[0] for rooms in FLOORS.values() for room in rooms}
    return sources(ROOT, *sorted(packages))


@pytest.mark.parametrize(
    ("module", "line", "allowed"),
    [
        ("hfedatm.base.records", "import client_app.data", False),
        ("hfedatm.contracts.rule", "from hfedatm.runtime import local", False),
        ("hfedatm_core.merging", "from hfedatm.base import records", False),
        ("station_app.station", "def f():\n    from server_app import run", False),
        ("client_app.data", "from client_app.app import app", True),
        ("client_app.data", "from hfedatm.base.records import Task", True),
        ("server_app.run", "from hfedatm.runtime import local", False),
        ("server_app.app", "from hfedatm.runtime import local", True),
        ("server_app.app", "from client_app import data", False),
        ("server_app.app", "from hfedatm.cli import main", False),
        ("hfedatm.runtime.local", "from server_app import run", True),
        ("hfedatm.runtime.local", "from hfedatm.cli import main", False),
        ("hfedatm.cli.main", "from server_app import run", True),
    ],
)
def test_the_check_knows_up_from_down(module, line, allowed):
    rest = ["client_app.data", "client_app.app", "server_app.run", "hfedatm.runtime.local"]
    rest += ["hfedatm.cli.main", "hfedatm.base.records"]
    found = wrong(imports({**dict.fromkeys(rest, ""), module: line}))
    assert bool(found) != allowed


def test_imports_point_down(texts):
    graph = imports(texts)
    assert len(graph) > 150
    assert not wrong(graph)


def test_every_room_of_a_floor_is_there(texts):
    missing = [room for rooms in FLOORS.values() for room in rooms if room not in texts]
    assert not missing


def test_no_modules_import_each_other_in_a_circle(texts):
    assert not cycle(imports(texts, for_types=False))


def test_the_base_names_no_module_of_a_tier_but_the_packages_of_built_ins(texts):
    """An import by a name in a string is an import all the same."""
    named = set()
    for module, text in texts.items():
        if NAMES.index(floor(module)) < NAMES.index("tiers") and module != "hfedatm.moved":
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    named |= set(re.findall(rf"^(?:{'|'.join(TIERS)})\.[\w.]+$", node.value))
    assert named == NAMED_IN_BASE
