"""The examples in docstrings are true."""

import doctest
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("hfedatm_files", "hfedatm_core", "hfedatm", "client_app", "station_app", "server_app")
MODULES = [
    ".".join(file.relative_to(ROOT).with_suffix("").parts)
    for package in PACKAGES
    for file in sorted((ROOT / package).rglob("*.py"))
    if ">>> " in file.read_text(encoding="utf-8")
]


def test_there_are_examples():
    assert MODULES


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_of_a_module_are_true(name):
    found = doctest.testmod(importlib.import_module(name))
    assert found.attempted and not found.failed
