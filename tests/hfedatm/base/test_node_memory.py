"""What a node keeps: by moment, whole files only, and no more than needed."""

import os
import time

import pytest
import torch

from hfedatm.base.memory import NodeMemory


@pytest.fixture
def memory(tmp_path):
    return NodeMemory("run", "client-1", tmp_path)


def value(memory, before):
    return {name: tensor.item() for name, tensor in memory.load(before).items()}


def test_nothing_at_first(memory):
    assert memory.load(before=(1, 1)) == {}


def test_reading_asks_for_the_newest_before_the_moment(memory):
    for moment in ((1, 1), (1, 2), (2, 1)):
        memory.save(moment, {"x": torch.tensor(10.0 * moment[0] + moment[1])})
    assert value(memory, (1, 1)) == {}
    assert value(memory, (1, 2)) == {"x": 11.0}
    assert value(memory, (2, 1)) == {"x": 12.0}
    assert value(memory, (2, 2)) == {"x": 21.0}
    assert value(memory, (9, 9)) == {"x": 21.0}


def test_rounds_are_ordered_as_numbers(memory):
    memory.save((9, 1), {"x": torch.tensor(9.0)})
    memory.save((10, 1), {"x": torch.tensor(10.0)})
    assert value(memory, (11, 1)) == {"x": 10.0}


def test_a_round_done_again_replaces_what_it_kept(memory):
    memory.save((1, 1), {"x": torch.tensor(1.0)})
    memory.save((1, 1), {"x": torch.tensor(2.0)})
    assert value(memory, (1, 2)) == {"x": 2.0}


def test_old_rounds_are_dropped(memory, tmp_path):
    for number in range(1, 20):
        memory.save((number, 1), {"x": torch.tensor(float(number))})
    assert len(list(tmp_path.rglob("*.safetensors"))) == NodeMemory.KEPT
    assert value(memory, (19, 1)) == {"x": 18.0}


def test_half_a_file_is_never_read(memory, tmp_path):
    memory.save((1, 1), {"x": torch.tensor(1.0)})
    (tmp_path / "run" / "client-1" / "1-2.77.part").write_bytes(b"half")
    assert value(memory, (2, 1)) == {"x": 1.0}


def test_nodes_and_runs_are_apart(memory, tmp_path):
    memory.save((1, 1), {"x": torch.tensor(1.0)})
    assert NodeMemory("run", "client-2", tmp_path).load((9, 9)) == {}
    assert NodeMemory("other", "client-1", tmp_path).load((9, 9)) == {}


def test_memories_of_old_runs_go_and_ledgers_stay(tmp_path):
    old = NodeMemory("old", "client-0", tmp_path)
    old.save((1, 1), {"x": torch.ones(1)})
    ledger = old.folder / "privacy.json"
    ledger.write_text("{}")
    recent = NodeMemory("recent", "client-0", tmp_path)
    recent.save((1, 1), {"x": torch.ones(1)})
    long_ago = time.time() - NodeMemory.MAX_AGE - 60
    for path in old.folder.iterdir():
        os.utime(path, (long_ago, long_ago))
    NodeMemory("new", "client-0", tmp_path).save((1, 1), {"x": torch.ones(1)})
    assert list(old.folder.iterdir()) == [ledger]
    assert recent.load(before=(2, 0))


def test_the_folder_comes_from_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("HFEDATM_STATE", str(tmp_path / "kept"))
    NodeMemory("run", "client-1").save((1, 1), {"x": torch.tensor(1.0)})
    assert (tmp_path / "kept" / "run" / "client-1" / "1-1.safetensors").is_file()
