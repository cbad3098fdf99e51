from zipfile import ZIP_DEFLATED, BadZipFile, ZipFile

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from hfedatm.handover import recordfile

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
    content = RecordDict({"config": ConfigRecord({"base64": "YQ==", "b": b"\x00\xff"})})
    recordfile.save(content, tmp_path / "content")
    assert recordfile.load(tmp_path / "content") == content


def test_a_damaged_file_is_refused(tmp_path):
    content = RecordDict({"a": ArrayRecord({"w": Array(np.arange(100.0))})})
    path = tmp_path / "content"
    recordfile.save(content, path)
    damaged = bytearray(path.read_bytes())
    damaged[300] ^= 1
    path.write_bytes(damaged)
    with pytest.raises(Exception, match="Bad CRC"):
        recordfile.load(path)


def test_a_small_file_cannot_become_a_large_content(tmp_path):
    path = tmp_path / "content"
    recordfile.save(RecordDict(), path)
    with ZipFile(path, "a", ZIP_DEFLATED) as archive:
        archive.writestr("0/0", bytes(10**6))
    with pytest.raises(BadZipFile, match="compressed"):
        recordfile.load(path)
