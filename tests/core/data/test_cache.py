import multiprocessing
import time

import numpy as np
import pytest
import torch

from hfedatm_core.cache_folder import cache_dir
from hfedatm_core.data.cache import cached_array, digest


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HFEDATM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def counting_fill(calls, value=7):
    def fill(array):
        calls.append(1)
        array[:] = value

    return fill


def test_the_second_time_nothing_is_made():
    calls = []
    first = cached_array("x", "k", (3, 2), np.uint8, counting_fill(calls))
    second = cached_array("x", "k", (3, 2), np.uint8, counting_fill(calls))
    assert len(calls) == 1
    assert isinstance(second, np.memmap)
    assert np.array_equal(first, second) and (second == 7).all()


def test_another_key_or_shape_is_made_anew():
    calls = []
    cached_array("x", "k", (3, 2), np.uint8, counting_fill(calls))
    cached_array("x", "other", (3, 2), np.uint8, counting_fill(calls))
    cached_array("x", "k", (4, 2), np.uint8, counting_fill(calls))
    cached_array("x", "k", (4, 2), np.int32, counting_fill(calls))
    assert len(calls) == 4


def test_writing_to_the_array_does_not_reach_the_file(recwarn):
    array = cached_array("x", "k", (3,), np.uint8, counting_fill([]))
    torch.from_numpy(np.asarray(array)).zero_()
    assert (cached_array("x", "k", (3,), np.uint8, counting_fill([])) == 7).all()
    assert not [w for w in recwarn if "writable" in str(w.message)]


def test_a_failure_leaves_nothing_behind(own_cache):
    def fail(array):
        raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        cached_array("x", "k", (3,), np.uint8, fail)
    assert [path.name for path in own_cache.iterdir() if path.suffix != ".lock"] == []
    assert (cached_array("x", "k", (3,), np.uint8, counting_fill([])) == 7).all()


@pytest.mark.parametrize("damage", [b"", b"nonsense", None])
def test_a_damaged_file_is_made_again(own_cache, damage, caplog):
    cached_array("x", "k", (1000,), np.uint8, counting_fill([]))
    path = own_cache / "x-k.npy"
    path.write_bytes(path.read_bytes()[:500] if damage is None else damage)
    calls = []
    assert (cached_array("x", "k", (1000,), np.uint8, counting_fill(calls)) == 7).all()
    assert len(calls) == 1
    assert "x-k.npy is damaged" in caplog.text


def test_a_folder_that_cannot_be_written_is_named(own_cache):
    own_cache.write_text("a file where the folder should be")
    with pytest.raises(PermissionError, match="set the environment variable HFEDATM_CACHE"):
        cached_array("x", "k", (3,), np.uint8, counting_fill([]))


def _race(log):
    def fill(array):
        with open(log, "a") as file:
            file.write("x")
        for row in range(len(array)):
            array[row] = row
            time.sleep(0.02)

    array = cached_array("race", "k", (10,), np.int32, fill)
    assert array.tolist() == list(range(10))


def test_processes_that_ask_at_once_make_it_once(tmp_path, own_cache):
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=_race, args=(tmp_path / "log",)) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0] * 4
    assert (tmp_path / "log").read_text() == "x"


def test_where_the_cache_is(monkeypatch, tmp_path):
    monkeypatch.delenv("HFEDATM_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_dir() == tmp_path / "hfedatm"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_dir() == tmp_path / "home" / ".cache" / "hfedatm"


def test_digests_do_not_run_into_each_other():
    assert digest(["ab", "c"]) != digest(["a", "bc"])
    assert digest(["a", 1]) == digest(["a", 1])
