import json
import tracemalloc
from zlib import crc32

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from hfedatm.base.handover import recordfile

names = st.text(min_size=1, max_size=8)
numbers = st.integers(-(2**62), 2**62) | st.floats(allow_nan=False)
scalars = numbers | st.text(max_size=8) | st.binary(max_size=8) | st.booleans()
lists = st.one_of(
    st.lists(st.integers(-9, 9), max_size=3),
    st.lists(st.binary(max_size=4), max_size=3),
    st.lists(st.text(max_size=4), max_size=3),
)
arrays = hnp.arrays(
    st.sampled_from(["float32", "float64", "float16", "int64", "uint8", "bool"]),
    hnp.array_shapes(min_dims=0, min_side=0, max_side=4),
)
records = st.one_of(
    st.dictionaries(names, arrays, max_size=3).map(
        lambda given: ArrayRecord({key: Array(np.asarray(value)) for key, value in given.items()})
    ),
    st.dictionaries(names, scalars | lists, max_size=3).map(ConfigRecord),
    st.dictionaries(names, numbers, max_size=3).map(MetricRecord),
)


@given(content=st.dictionaries(names, records, max_size=4).map(RecordDict))
@settings(max_examples=25)
def test_everything_comes_back(tmp_path_factory, content):
    path = tmp_path_factory.mktemp("record") / "content"
    recordfile.save(content, path)
    loaded = recordfile.load(path)
    assert list(loaded) == list(content)
    for name, record in content.items():
        assert type(loaded[name]) is type(record)
        assert list(loaded[name].items()) == list(record.items())
        for key, value in record.items():
            assert type(loaded[name][key]) is type(value)
    assert [file.name for file in path.parent.iterdir()] == ["content"]


def test_keys_that_look_like_the_encoding_of_bytes(tmp_path):
    content = RecordDict({"config": ConfigRecord({"bytes": "YQ==", "b": b"\x00\xff"})})
    recordfile.save(content, tmp_path / "content")
    assert recordfile.load(tmp_path / "content") == content


def test_numbers_that_are_not_finite_come_back():
    content = RecordDict({"m": MetricRecord({"a": float("inf"), "b": float("-inf")})})
    assert recordfile.from_bytes(recordfile.to_bytes(content)) == content


CONTENT = RecordDict(
    {
        "a": ArrayRecord({"w": Array(np.arange(100.0)), "v": Array(np.arange(3))}),
        "c": ConfigRecord({"key": b"12345", "names": ["x", "y"]}),
    }
)


@given(at=st.integers(0, len(recordfile.to_bytes(CONTENT)) - 1), bit=st.integers(0, 7))
@settings(deadline=None, max_examples=100)
def test_a_damaged_file_is_refused_wherever_the_damage_is(at, bit):
    damaged = bytearray(recordfile.to_bytes(CONTENT))
    damaged[at] ^= 1 << bit
    with pytest.raises(recordfile.BadRecords):
        recordfile.from_bytes(bytes(damaged))


@given(length=st.integers(0, len(recordfile.to_bytes(CONTENT)) - 1))
@settings(deadline=None, max_examples=50)
def test_a_file_that_was_cut_is_refused(length):
    with pytest.raises(recordfile.BadRecords):
        recordfile.from_bytes(recordfile.to_bytes(CONTENT)[:length])


def forged(index, rest=b"", length=None):
    """Return a file with a good checksum and any index."""
    text = index if isinstance(index, bytes) else json.dumps(index).encode()
    body = (len(text) if length is None else length).to_bytes(4, "little") + text + rest
    return recordfile.MAGIC + crc32(body).to_bytes(4, "little") + body


def array(size, name="w"):
    return [name, "float32", [1], "numpy.ndarray", size]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"PK\x03\x04",
        forged([["a", "array", [array(5)]]], b"1234"),
        forged([["a", "array", [array(4)]]], b"12345"),
        forged([["a", "array", [array(-1)]]], b"1234"),
        forged([["a", "array", [array(True)]]], b"1"),
        forged([["a", "array", [array(2.0)]]], b"12"),
        forged([["a", "array", [array(10**30)]]], b"12"),
        forged([["a", "array", [array(1), array(1)]]], b"12"),
        forged([["a", "config", []], ["a", "config", []]]),
        forged([["a", "config", [["k", 1], ["k", 2]]]]),
        forged([["a", "config", [["k", {"bytes": 9}]]]], b"12"),
        forged([["a", "config", [["k", {}]]]]),
        forged([["a", "config", [["k", None]]]]),
        forged([["a", "config", [["k", [[1]]]]]]),
        forged([["a", "pickle", []]]),
        forged([[["a"], "config", []]]),
        forged([[1, "config", []]]),
        forged({"a": 1}),
        forged(7),
        forged(b"[" * 900_000),
        forged(b"[" * 40_000),
        forged(b"[" + b"9" * 5000 + b"]"),
        forged(b" " * (recordfile.MOST_INDEX + 1)),
        forged(b"[]", length=2**32 - 1),
        forged(b"\xff\xfe"),
    ],
    ids=range(26),
)
def test_only_bad_records_is_raised_whatever_an_index_says(data):
    with pytest.raises(recordfile.BadRecords):
        recordfile.from_bytes(data)


def test_reading_takes_no_more_memory_than_the_file_has():
    """Not by overlapping entries, compression, nor an index that unfolds."""
    many = forged(b"[" + b"[],[],[]," * 5000 + b"[]]")
    tracemalloc.start()
    with pytest.raises(recordfile.BadRecords):
        recordfile.from_bytes(many)
    with pytest.raises(recordfile.BadRecords):
        recordfile.from_bytes(forged(b"[" + b"[]," * 300_000 + b"[]]"))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8e6


def test_a_message_with_an_endless_index_is_not_sent():
    with pytest.raises(ValueError, match="index"):
        recordfile.to_bytes(RecordDict({"c": ConfigRecord({"k": "x" * recordfile.MOST_INDEX})}))
