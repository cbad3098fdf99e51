"""What travels: the way there and back, and failures that say where."""

import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, RecordDict
from helpers import small_settings

from hfedatm.base.records import (
    MOST_FAILURES,
    BadReply,
    BadTask,
    Failure,
    Task,
    failures_to_record,
    find_record,
    grams_to_record,
    layers_to_record,
    record_to_failures,
    record_to_grams,
    record_to_layers,
    record_to_state,
    state_to_record,
)
from hfedatm_core import FactorGram, Gram


def test_task_there_and_back():
    task = Task("train", small_settings(lr=0.3), 3, station=1, station_round=2, client=5, run="r-1")
    assert Task.from_record(task.to_record()) == task


def test_a_client_without_a_place_goes_by_flowers_number_for_it():
    task = Task("train", small_settings(), 1, client=2**64 - 1)
    assert Task.from_record(task.to_record()) == task


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(3, 4),
        torch.randn(3, dtype=torch.float64),
        torch.tensor(7),
        torch.tensor([True, False]),
        torch.zeros(0, 3),
        torch.randn(4, 3).T,
    ],
    ids=["matrix", "float64", "integer", "booleans", "empty", "transposed"],
)
def test_tensors_keep_value_shape_and_type(tensor):
    found = record_to_state(state_to_record({"x": tensor}))["x"]
    assert found.dtype == tensor.dtype and found.shape == tensor.shape
    assert torch.equal(found, tensor)


def test_grams_there_and_back_and_shared_ones_once():
    x = torch.randn(9, 4)
    shared = Gram.from_dense(x.T @ x / 9, rows=9)
    wide = FactorGram(torch.randn(2, 6), rows=5)
    alone = grams_to_record({"q": shared})
    record = grams_to_record({"q": shared, "k": shared, "up": wide})
    found = record_to_grams(record)
    assert found["q"] is found["k"] and found["q"].rows == 9
    torch.testing.assert_close(found["q"].dense(), shared.dense())
    torch.testing.assert_close(found["up"].dense(), wide.dense())
    both = grams_to_record({"q": shared, "k": shared})
    assert both.count_bytes() - alone.count_bytes() < 20


def test_layers_and_failures_there_and_back():
    assert record_to_layers(layers_to_record({"a": 3, "b": 5})) == {"a": 3, "b": 5}
    assert record_to_layers(layers_to_record({})) == {}
    failures = [Failure(node="client 1", reason="ill"), Failure(node="client 2", reason="late")]
    assert record_to_failures(failures_to_record(failures)) == failures
    assert record_to_failures(ConfigRecord()) == []


def test_a_long_list_of_failures_is_cut_and_says_so():
    listed = [Failure(node=f"client {n}", reason="x" * 1000 + "\x1b[2J\n") for n in range(100)]
    found = record_to_failures(failures_to_record(listed))
    assert len(found) == MOST_FAILURES + 1
    assert found[-1].reason == "36 more failures are not listed"
    assert max(len(f.reason) for f in found) <= 200


@pytest.mark.parametrize(
    "record",
    [
        {"nodes": ["a"], "reasons": [b"x"]},
        {"nodes": [1], "reasons": ["x"]},
        {"nodes": ["a"], "reasons": []},
        {"nodes": "a", "reasons": "b"},
        {"nodes": [], "reasons": [], "total": -1},
        {"nodes": [], "reasons": [], "total": 2**40},
        {"nodes": [], "reasons": [], "total": 1.5},
    ],
    ids=range(7),
)
def test_failures_that_are_no_text_are_refused(record):
    with pytest.raises(BadReply, match="failures: "):
        record_to_failures(ConfigRecord(record))


SETTINGS = small_settings()


@pytest.mark.parametrize(
    "change",
    [
        {"run": "../../etc"},
        {"run": ".hidden"},
        {"run": "a/b"},
        {"run": "a" * 101},
        {"run": ""},
        {"run": "run\n"},
        {"run": 5},
        {"client": 2**64},
        {"client": -2},
        {"client": "../x"},
        {"client": True},
        {"station": 1.0},
        {"round": -1},
        {"round": 2**63 - 1},
        {"station_round": [1]},
        {"kind": "exec"},
        {"send_grams": 1},
        {"settings": "{}" + " " * 10**6},
        {"settings": "[" * 90_000},
        {"settings": b"{}"},
        {"settings": "{}x"},
        {"extra": 1},
        {"kind": None},
    ],
    ids=str,
)
def test_a_task_with_an_odd_field_is_refused(change):
    record = dict(Task("train", SETTINGS, 3).to_record()) | change
    record = {key: value for key, value in record.items() if value is not None}
    with pytest.raises(ValueError, match="task|settings|Settings"):
        Task.from_record(ConfigRecord(record))


@pytest.mark.parametrize("record", [None, ArrayRecord(), "task"], ids=str)
def test_a_message_without_a_task_is_refused(record):
    with pytest.raises(BadTask, match="no task"):
        Task.from_record(record)


@pytest.mark.parametrize(
    "record",
    [
        {},
        {"names": ["a"], "widths": []},
        {"names": ["a"], "widths": [0]},
        {"names": ["a"], "widths": [2**40]},
        {"names": ["a", "a"], "widths": [1, 1]},
        {"names": "a", "widths": [1]},
        {"names": [1], "widths": [1]},
        {"names": ["a"], "widths": [1.0]},
    ],
    ids=range(8),
)
def test_layers_without_a_name_or_a_width_are_refused(record):
    with pytest.raises(BadTask, match="layers: "):
        record_to_layers(ConfigRecord(record))


def test_a_record_of_another_kind_is_as_good_as_none():
    content = RecordDict({"model": ConfigRecord({"a": 1})})
    assert find_record(content, "model", ArrayRecord) is None
