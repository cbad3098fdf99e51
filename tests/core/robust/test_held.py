"""Held updates come back as they were, from memory and from the file, in the order of arrival."""

import subprocess
import sys
import textwrap

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hfedatm_core import FactorGram, Gram, Update
from hfedatm_core.robust.held import HeldUpdates


def update(number: int) -> Update:
    generator = torch.Generator().manual_seed(number)
    state = {
        "w": torch.randn(5, 3, generator=generator),
        "half": torch.randn(7, generator=generator).to(torch.bfloat16),
        "double": torch.randn(2, generator=generator, dtype=torch.float64),
        "count": torch.tensor(number),
        "mask": torch.tensor([True, False, True]),
        "none": torch.empty(0, 4),
        "across": torch.randn(3, 5, generator=generator).T,
    }
    shared = Gram.from_dense(torch.eye(3) * (number + 1), rows=number + 1)
    factor = FactorGram(torch.randn(2, 4, generator=generator), torch.ones(4), 9, rank=6)
    grams = {"a": shared, "b": shared, "c": factor}
    return Update(state, grams, 10 + number, 2, f"client {number}", {"loss": 0.5 * number})


def assert_same(found: Update, wanted: Update) -> None:
    assert found.state.keys() == wanted.state.keys()
    for name, value in wanted.state.items():
        assert found.state[name].dtype == value.dtype and torch.equal(found.state[name], value)
    assert found.grams["a"] is found.grams["b"]
    for name, gram in wanted.grams.items():
        assert type(found.grams[name]) is type(gram) and found.grams[name].rows == gram.rows
        assert torch.equal(found.grams[name].dense(), gram.dense())
    assert found.grams["c"].rank == 6
    assert (found.num_examples, found.num_clients) == (wanted.num_examples, wanted.num_clients)
    assert (found.name, found.metrics) == (wanted.name, wanted.metrics)


@pytest.mark.parametrize("memory", [0, 700, 10**9])
def test_updates_can_be_read_again_and_again(tmp_path, memory):
    held = HeldUpdates(tmp_path, memory)
    for number in range(4):
        held.add(update(number))
    assert len(held) == 4
    for _ in range(2):
        for number, found in enumerate(held):
            assert_same(found, update(number))
    (third,) = held.some([2])
    assert_same(third, update(2))
    held.close()


@given(st.integers(0, 14), st.integers(0, 15), st.sampled_from([0, 10**9]))
def test_a_part_of_a_tensor_is_what_the_tensor_has_there(first, length, memory):
    held = HeldUpdates(memory=memory)
    for number in range(3):
        held.add(update(number))
    part = slice(first, min(15, first + length))
    for name in ("w", "across"):
        for number in range(3):
            wanted = update(number).state[name].reshape(-1)[part]
            assert torch.equal(held.part(number, name, part), wanted)
    held.close()


def test_nothing_is_left_in_the_folder_not_even_by_a_process_that_is_killed(tmp_path):
    held = HeldUpdates(tmp_path / "state", memory=0)
    held.add(update(0))
    assert not list((tmp_path / "state").iterdir())
    held.close()
    code = f"""
        import os, torch
        from hfedatm_core import Update
        from hfedatm_core.robust.held import HeldUpdates
        held = HeldUpdates({str(tmp_path)!r}, memory=0)
        held.add(Update({{"w": torch.ones(1000)}}))
        os.kill(os.getpid(), 9)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=False)
    assert done.returncode == -9
    assert [path.name for path in tmp_path.iterdir()] == ["state"]


def test_what_is_in_the_file_holds_numbers_and_no_code():
    held = HeldUpdates(memory=0)
    held.add(Update({"w": torch.arange(4, dtype=torch.float32)}))
    held._file.seek(0)
    assert held._file.read() == torch.arange(4, dtype=torch.float32).numpy().tobytes()
    held.close()
