"""The mathematics never imports Flower."""

import ast
import subprocess
import sys
from pathlib import Path

import hfedatm_core

PACKAGE = Path(hfedatm_core.__file__).parent


def imported(source: str) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names.add((node.module or "").partition(".")[0])
    return names


def test_the_check_sees_late_imports():
    assert imported("def f():\n    from flwr.app import x\n    import os.path") == {"flwr", "os"}


def test_no_file_imports_flower_or_the_tiers():
    files = sorted(PACKAGE.rglob("*.py"))
    assert len(files) > 10
    forbidden = {"flwr", "hfedatm", "client_app", "station_app", "server_app"}
    found = {str(f.relative_to(PACKAGE)): imported(f.read_text()) & forbidden for f in files}
    assert not {name: modules for name, modules in found.items() if modules}


def test_importing_the_package_loads_neither_flower_nor_heavy_extras():
    code = (
        "import sys, hfedatm_core; "
        "print([m for m in ('flwr', 'transformers', 'sklearn', 'opacus', 'torchvision', 'ot', "
        "'pyarrow', 'matplotlib') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
