"""Arrays of a message: the same as Flower reads them, and nothing that is not plain numbers."""

from io import BytesIO

import numpy as np
import pytest
from flwr.app import Array
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from hfedatm.base.npy import read_array, write_array

plain_numbers = hnp.arrays(
    st.sampled_from([np.float16, np.float32, np.float64, np.int64, np.uint8, np.bool_]),
    hnp.array_shapes(min_dims=0, min_side=0, max_side=4),
    elements=st.integers(0, 1),
)


def sent(data: bytes, shape=(2,), dtype="float32", stype="numpy.ndarray") -> Array:
    return Array(dtype=dtype, shape=shape, stype=stype, data=data)


@given(plain_numbers)
def test_arrays_are_read_as_flower_reads_them(values):
    array = Array(np.ascontiguousarray(values).reshape(values.shape))
    ours, flower = read_array(array), array.numpy()
    assert ours.dtype == flower.dtype and ours.shape == flower.shape
    assert np.array_equal(ours, flower)
    assert ours.flags.writeable and ours.flags.owndata


@given(plain_numbers, st.booleans())
def test_arrays_are_written_as_flower_writes_them(values, transposed):
    values = values.T if transposed else values
    ours, flower = write_array(values), Array(np.ascontiguousarray(values).reshape(values.shape))
    assert (ours.dtype, ours.shape, ours.stype) == (flower.dtype, flower.shape, flower.stype)
    assert ours.data == flower.data


def test_two_reads_share_nothing():
    array = Array(np.zeros(3))
    read_array(array)[:] = 1
    assert not read_array(array).any()


def npy(values, header: str | None = None) -> bytes:
    stream = BytesIO()
    np.save(stream, values, allow_pickle=True)
    data = stream.getvalue()
    if header is None:
        return data
    text = header.encode() + b"\n"
    return data[:8] + len(text).to_bytes(2, "little") + text + values.tobytes()


def npz(values) -> bytes:
    stream = BytesIO()
    np.savez(stream, values)
    return stream.getvalue()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x93NUMPY",
        b"\x93NUMPY\x01\x00\xff\xff",
        npy(np.zeros(2, np.float32))[:-1],
        npy(np.array([print, print], dtype=object)),
        npy(np.zeros(2), "{'descr': '<f8', 'fortran_order': False, 'shape': (-1,)}"),
        npy(np.zeros(2), "{'descr': '<f8', 'fortran_order': False, 'shape': (-2, -1)}"),
        npy(np.zeros(2), "{'descr': '<f8', 'fortran_order': False, 'shape': (3,)}"),
        npy(np.zeros(2), "__import__('os').abort()"),
        npy(np.zeros(2, np.float32)) + b"x",
        npy(np.zeros((2, 3), np.float32).T),
        npy(np.zeros(2, np.complex64)),
        npy(np.zeros(2, "U3")),
        npy(np.zeros(2, [("a", "f4")])),
        npy(np.zeros(2, ">f4")),
        npy(np.zeros(2), "{'descr': '<f8', 'fortran_order': False, 'shape': (2,), }" + " " * 2000),
        npy(
            np.zeros(2),
            "{'descr': '<f8', 'fortran_order': False, 'shape': (" + "1, " * 300 + "), }",
        ),
        npy(
            np.zeros(2), "{'descr': '<f8', 'fortran_order': False, 'shape': (" + "1" * 900 + "), }"
        ),
        npz(np.zeros(2, np.float32)),
        b"\x93NUMPY\x02\x00" + npy(np.zeros(2, np.float32))[8:],
    ],
)
def test_what_is_no_array_of_numbers_is_refused(data):
    with pytest.raises(ValueError, match="it|its"):
        read_array(sent(data))


def test_a_shape_that_lies_is_refused():
    with pytest.raises(ValueError, match="says shape"):
        read_array(sent(npy(np.zeros(2, np.float32)), shape=(1, 2)))


def test_another_kind_of_serialisation_is_refused():
    with pytest.raises(ValueError, match="not a .npy file"):
        read_array(sent(npy(np.zeros(2, np.float32)), stype="torch.tensor"))
