"""The benchmark of stations with different widths: what its table compares."""

import importlib
from pathlib import Path

import pytest
import torch

from hfedatm_core import Update
from hfedatm_core.data import DataSpec

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    found = importlib.import_module("different_architectures")
    monkeypatch.setattr(found, "ROUNDS", 1)
    monkeypatch.setattr(found, "EPOCHS", 1)
    monkeypatch.setattr(found, "APART_EPOCHS", 1)
    return found


@pytest.fixture
def task(script):
    def part(count):
        return torch.rand(count, 1, 16, 16), torch.arange(count) % 3

    spec = DataSpec("image", 3, (1, 16, 16))
    return script.Task(spec, [part(64)] * 3, [part(9)] * 3, part(9))


def test_every_way_gives_a_model_of_its_width(script, task):
    for name, way in script.ways(task).items():
        state, width = script.federate(task, way, 0)
        assert width == (0.5 if name == "smallest" else 2.0)
        script.network(task, width, 0).load_state_dict(state)
    found = list(script.once(task, 0))
    assert [name for name, *_ in found][:4] == ["alone", "ensemble", "slices", "transport"]
    assert all(0 <= value <= 100 for _, *values in found for value in values)


def test_an_entry_is_the_mean_of_those_who_have_it(script):
    previous = {"a": torch.zeros(4)}
    updates = [Update({"a": torch.ones(2)}, {}, 1), Update({"a": torch.full((3,), 4.0)}, {}, 2)]
    assert script.overlapping(updates, previous)["a"].tolist() == [3.0, 3.0, 4.0, 0.0]
