"""The benchmark of stations with different networks: what its table compares."""

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
    monkeypatch.setattr(found, "EPOCHS", 1)
    monkeypatch.setattr(found, "APART_EPOCHS", 1)
    return found


def task_of(script, family, size):
    def part(count):
        return torch.rand(count, 1, size, size), torch.arange(count) % 3

    spec = DataSpec("image", 3, (1, size, size))
    members = script.FAMILIES[family]
    return script.Task(members, 1, 0.03, spec, [part(64)] * 3, [part(9)] * 3, part(9))


@pytest.mark.parametrize(
    ("family", "size"),
    [
        ("lenet5", 16),
        pytest.param("vgg", 32, marks=pytest.mark.slow),
        pytest.param("resnet", 32, marks=pytest.mark.slow),
    ],
)
def test_every_way_gives_a_model_of_its_architecture(script, family, size):
    task = task_of(script, family, size)
    for name, way in script.ways(task).items():
        state, member = script.federate(task, way, 0)
        assert member == task.family[-1 if name == "smallest" else 0]
        script.network(task, member, 0).load_state_dict(state)
    found = list(script.once(task, 0))
    assert [name for name, *_ in found][:4] == ["alone", "ensemble", "slices", "transport"]
    assert all(0 <= value <= 100 for _, *values in found for value in values)


def test_a_block_that_only_the_largest_has_is_its_own(script):
    """Slices and transport leave the blocks of ResNet-34 to the station that has them."""
    task = task_of(script, "resnet", 32)
    way = script.ways(task)["slices"]
    large = script.network(task, task.family[0], 0).state_dict()
    small = script.network(task, task.family[2], 1).state_dict()
    updates = [way.up(n, Update(s, {}, 1), large) for n, s in ((0, large), (2, small))]
    merged = way.gather(updates, large, True)
    assert torch.equal(merged["layer3.5.conv1.weight"], large["layer3.5.conv1.weight"])
    both = (large["layer3.0.conv1.weight"] + small["layer3.0.conv1.weight"]) / 2
    assert torch.allclose(merged["layer3.0.conv1.weight"], both)


def test_an_entry_is_the_mean_of_those_who_have_it(script):
    previous = {"a": torch.zeros(4)}
    updates = [Update({"a": torch.ones(2)}, {}, 1), Update({"a": torch.full((3,), 4.0)}, {}, 2)]
    assert script.overlapping(updates, previous)["a"].tolist() == [3.0, 3.0, 4.0, 0.0]
