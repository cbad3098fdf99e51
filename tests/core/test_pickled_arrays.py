"""Arrays are read from a pickle, and no code of it runs."""

import os
import pickle
import pickletools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from hfedatm_core.checkpoints.pickled_arrays import read_arrays


def written(folder, content, protocol=4):
    path = folder / "arrays.ckpt"
    path.write_bytes(content if isinstance(content, bytes) else pickle.dumps(content, protocol))
    return path


NUMBERS = arrays.arrays(
    st.sampled_from(["<f4", ">f4", "<f8", "<f2", "<i8", ">i4", "|u1"]),
    arrays.array_shapes(min_dims=0, max_dims=4, max_side=4),
)


@given(array=NUMBERS, fortran=st.booleans(), protocol=st.sampled_from([3, 4]))
def test_every_array_of_numbers_comes_back(tmp_path_factory, array, fortran, protocol):
    array = np.asfortranarray(array) if fortran else array
    content = {"layer": {"kernel": array, "bias": array[..., None]}, "again": array}
    found = read_arrays(written(tmp_path_factory.getbasetemp(), content, protocol))
    assert list(found) == ["layer", "again"]
    for read, wanted in ((found["again"], array), (found["layer"]["bias"], array[..., None])):
        assert read.dtype == wanted.dtype and read.shape == wanted.shape
        assert read.tobytes() == np.ascontiguousarray(wanted).tobytes()


class Calls:
    """An object whose pickle calls a function."""

    def __init__(self, function, *args):
        self.call = (function, args)

    def __reduce__(self):
        return self.call


def test_code_does_not_run(tmp_path):
    trace = tmp_path / "ran"
    for call in (
        Calls(os.system, f"touch {trace}"),
        Calls(eval, f"open({str(trace)!r}, 'w')"),
        Calls(np.save, str(trace), np.zeros(1)),
        Calls(np.frombuffer, b"1234"),
    ):
        for content in (call, {"layer": call}, {"layer": [call]}):
            with pytest.raises(ValueError, match="it asks for .*objects are never unpickled"):
                read_arrays(written(tmp_path, content))
    assert [path.name for path in tmp_path.iterdir()] == ["arrays.ckpt"]


@pytest.mark.parametrize(
    "content",
    [
        [np.zeros(2)],
        {"a": "text"},
        {"a": {1: np.zeros(2)}},
        {"a": np.dtype("f4")},
        {"a": np.ndarray},
        {"a": np.array([{}, "x"], object)},
        {"a": np.array(["x"])},
        {"a": np.zeros(2, [("x", "f4")])},
        {"a": np.zeros(2, complex)},
        np.zeros(2),
        {"a": np.float32(1)},
    ],
    ids=str,
)
def test_other_content_is_refused(tmp_path, content):
    with pytest.raises(ValueError, match="cannot read the arrays in"):
        read_arrays(written(tmp_path, content))


def test_deep_nesting_is_refused(tmp_path):
    content = np.zeros(1)
    for _ in range(20):
        content = {"a": content}
    with pytest.raises(ValueError, match="something else than arrays by name"):
        read_arrays(written(tmp_path, content))


def test_bytes_that_do_not_fit_the_shape_are_refused(tmp_path):
    good = pickle.dumps({"a": np.zeros((2, 3), np.float32)}, 3)
    assert b"K\x02K\x03\x86" in good  # the shape
    with pytest.raises(ValueError, match="do not fit its shape"):
        read_arrays(written(tmp_path, good.replace(b"K\x02K\x03\x86", b"K\x02K\x04\x86")))
    with pytest.raises(ValueError, match="do not fit its shape"):
        read_arrays(
            written(tmp_path, good.replace(b"K\x02K\x03\x86", b"J\xff\xff\xff\xffK\x03\x86"))
        )


@given(data=st.data())
def test_a_spoilt_file_raises_one_kind_of_error(tmp_path_factory, data):
    good = bytearray(pickle.dumps({"a": {"k": np.arange(6, dtype=np.float32)}}, 4))
    for _ in range(data.draw(st.integers(1, 6))):
        place = data.draw(st.integers(0, len(good) - 1))
        good[place] = data.draw(st.integers(0, 255))
    cut = bytes(good[: data.draw(st.integers(0, len(good)))])
    if any(op.name in ("LONG4", "BINBYTES8", "BINUNICODE8", "LONG_BINPUT") for op in _ops(cut)):
        return  # asks for memory, which the size of a real file bounds
    try:
        found = read_arrays(written(tmp_path_factory.getbasetemp(), cut))
    except ValueError:
        return
    assert isinstance(found, dict)


def _ops(content):
    try:
        yield from (op for op, _, _ in pickletools.genops(content))
    except Exception:
        return
