"""What travels: the way there and back, and failures that say where."""

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from helpers import small_settings
from hypothesis import given, settings
from hypothesis import strategies as st

from hfedatm.handling import reply_with_failure
from hfedatm.records import (
    BadReply,
    Failure,
    Task,
    failures_to_record,
    find_record,
    grams_to_record,
    layers_to_record,
    open_metrics,
    open_reply,
    open_state,
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
    failures = [Failure("client 1", "ill"), Failure("client 2", "late")]
    assert record_to_failures(failures_to_record(failures)) == failures
    assert record_to_failures(ConfigRecord()) == []


def message():
    return Message(RecordDict(), 1, "train")


def test_a_failure_says_what_and_where():
    def broken():
        raise KeyError("weights")

    try:
        broken()
    except KeyError as error:
        reply = reply_with_failure(message(), error)
    with pytest.raises(BadReply, match=r"KeyError: 'weights' \(broken, test_records.py:\d+\)"):
        open_reply(reply, max_mb=1)


def test_an_endless_message_is_cut():
    reply = reply_with_failure(message(), ValueError("x" * 10**6))
    assert len(reply.content["failure"]["reason"]) == 4000


def test_flowers_own_errors_are_passed_on():
    with pytest.raises(BadReply, match="gone"):
        open_reply(Message(Error(3, "gone"), reply_to=message()), max_mb=1)
    with pytest.raises(BadReply, match="Flower error 3"):
        open_reply(Message(Error(3), reply_to=message()), max_mb=1)


def test_a_record_of_another_kind_is_as_good_as_none():
    content = RecordDict({"model": ConfigRecord({"a": 1}), "metrics": ArrayRecord()})
    assert find_record(content, "model", ArrayRecord) is None
    with pytest.raises(BadReply, match="no 'model' arrays"):
        open_state(content, {})
    with pytest.raises(BadReply, match="no 'metrics'"):
        open_metrics(content)


REFERENCE = {"w": torch.zeros(2, 3), "n": torch.tensor(0)}


@given(st.binary(max_size=200), st.sampled_from(["float32", "int64", "object", "<U3", "nonsense"]))
@settings(max_examples=100)
def test_whatever_bytes_arrive_only_bad_reply_is_raised(data, dtype):
    arrays = {"w": Array(dtype, (2, 3), "numpy.ndarray", data), "n": Array(np.array(1))}
    with pytest.raises(BadReply):
        open_state(RecordDict({"model": ArrayRecord(arrays)}), REFERENCE)


def test_an_object_array_is_never_unpickled(tmp_path):
    class Evil:
        def __reduce__(self):
            return (open, (str(tmp_path / "owned"), "w"))

    path = tmp_path / "evil.npy"
    np.save(path, np.array([Evil()], dtype=object), allow_pickle=True)
    (tmp_path / "owned").unlink(missing_ok=True)
    arrays = {"w": Array("object", (1,), "numpy.ndarray", path.read_bytes())}
    with pytest.raises(BadReply, match="w cannot be read"):
        open_state(RecordDict({"model": ArrayRecord(arrays)}), {"w": torch.zeros(1)})
    assert not (tmp_path / "owned").exists()


def test_a_shape_that_lies_is_refused():
    array = Array(np.zeros((2, 3), np.float32))
    array.shape = (6,)
    content = RecordDict({"model": ArrayRecord({"w": array, "n": Array(np.array(1))})})
    with pytest.raises(BadReply, match="w cannot be read: says shape"):
        open_state(content, REFERENCE)


@given(
    st.one_of(
        st.integers(-(10**18), 10**18),
        st.floats(allow_nan=True, allow_infinity=True),
        st.lists(st.integers(0, 5), max_size=2),
    )
)
@settings(max_examples=200)
def test_a_count_is_a_positive_whole_number_of_plausible_size(count):
    content = RecordDict({"metrics": MetricRecord({"num-examples": count})})
    plausible = isinstance(count, int | float) and 0 < count <= 1e12 and count == int(count)
    if plausible:
        assert open_metrics(content)["num-examples"] == count
    else:
        with pytest.raises(BadReply):
            open_metrics(content)
