"""Replies: what is accepted, what is refused by name, and how little it costs."""

import math
import tracemalloc

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from helpers import small_settings
from hypothesis import given, settings
from hypothesis import strategies as st

from hfedatm.base.answering import reply_with_failure
from hfedatm.base.records import BadReply, arrays_to_record, grams_to_record, state_to_record
from hfedatm.base.wire import Expected, checked, open_reply, read_identity, read_scores, read_update
from hfedatm_core import FactorGram, Gram

REFERENCE = {"w": torch.zeros(2, 3), "n": torch.tensor(0)}
SETTINGS = small_settings(gram_max_dim=4, gram_rank=3)
MODEL = Expected(SETTINGS, "client", arrays=REFERENCE)
GRAMS = Expected(SETTINGS, "client", layers={"narrow": 3, "wide": 6})


def message(content):
    return Message(content, reply_to=Message(RecordDict(), 1, "train"))


def update(model=None, metrics=None, **records):
    content = {"model": state_to_record(REFERENCE) if model is None else model}
    content["metrics"] = MetricRecord({"num-examples": 5} if metrics is None else metrics)
    return message(RecordDict(content | records))


# --- replies that are none


def test_a_failure_says_what_and_where():
    def broken():
        raise KeyError("weights")

    try:
        broken()
    except KeyError as error:
        reply = reply_with_failure(message(RecordDict()), error)
    with pytest.raises(BadReply, match=r"KeyError: 'weights' \(broken, test_wire.py:\d+\)"):
        open_reply(reply, 10**6)


def test_flowers_own_errors_are_passed_on():
    with pytest.raises(BadReply, match="gone"):
        open_reply(message(Error(3, "gone")), 10**6)
    with pytest.raises(BadReply, match="Flower error 3"):
        open_reply(message(Error(3)), 10**6)


@pytest.mark.parametrize("reason", [7, ["a"], b"x", ""], ids=str)
def test_a_failure_without_a_text_is_a_failure(reason):
    with pytest.raises(BadReply, match="it failed"):
        open_reply(message(RecordDict({"failure": ConfigRecord({"reason": reason})})), 10**6)


@pytest.mark.parametrize(
    "record",
    [
        ConfigRecord({"x": "a" * 10**6}),
        ConfigRecord({"x": [b"a" * 10**5] * 10}),
        MetricRecord({"x": [1] * 10**6}),
        ArrayRecord({"x": Array(np.zeros(10**6, np.uint8))}),
    ],
    ids=["text", "bytes", "numbers", "array"],
)
def test_what_is_larger_than_the_model_can_make_it_is_refused(record):
    with pytest.raises(BadReply, match=r"reply of \d.\d MB is larger than the 0.3 MB"):
        read_update(update(junk=record), MODEL)


def test_a_limit_that_is_given_is_obeyed_too():
    expected = Expected(small_settings(max_reply_mb=0.0001), "client", arrays=REFERENCE)
    with pytest.raises(BadReply, match="larger than the"):
        read_update(update(), expected)


def test_the_limit_follows_from_the_model_and_its_grams():
    layers = {"a": 4000, "b": 5000}
    large = Expected(small_settings(gram_rank=256), "station", REFERENCE, layers=layers)
    packed, factor = 4000 * 4001 // 2 * 4, 256 * 5000 * 4
    assert packed + factor < large.most_bytes < packed + factor + 400_000


# --- one reply after the other


@pytest.mark.parametrize(
    "error", [BadReply, ValueError, RecursionError, MemoryError, OverflowError, AssertionError]
)
def test_any_error_is_the_failure_of_that_node_alone(error):
    def parse(reply):
        if reply.content["metrics"]["num-examples"] == 2:
            raise error("\x1b[31m" + "x" * 10**6)
        return reply.content["metrics"]["num-examples"]

    failures = []
    replies = [update(metrics={"num-examples": n}) for n in (1, 2, 3)]
    assert list(checked(replies, parse, "client", failures.append)) == [1, 3]
    [failure] = failures
    assert failure.node == "client 1" and len(failure.reason) <= 200
    assert failure.reason.isprintable()


def test_what_is_done_with_a_value_is_not_the_nodes_failure():
    failures = []
    with pytest.raises(KeyError):
        for _ in checked([update()], lambda reply: 1, "client", failures.append):
            raise KeyError("ours")
    assert failures == []


def test_a_keyboard_interrupt_is_ours():
    def interrupt(reply):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(checked([update()], interrupt, "client", print))


# --- tensors


def test_an_honest_update_is_read():
    found = read_update(update(metrics={"num-examples": 5.0, "loss": 0.5}), MODEL)
    assert found.examples == 5 and found.weight == 5.0 and found.clients == 1
    assert found.state.keys() == REFERENCE.keys() and found.metrics["loss"] == 0.5
    assert found.name == "client 1"


@given(st.binary(max_size=200), st.sampled_from(["float32", "int64", "object", "<U3", "nonsense"]))
@settings(max_examples=100, deadline=None)
def test_whatever_bytes_arrive_only_bad_reply_is_raised(data, dtype):
    arrays = {"w": Array(dtype, (2, 3), "numpy.ndarray", data), "n": Array(np.array(1))}
    with pytest.raises(BadReply):
        read_update(update(ArrayRecord(arrays)), MODEL)


def test_an_object_array_is_never_unpickled(tmp_path):
    class Evil:
        def __reduce__(self):
            return (open, (str(tmp_path / "owned"), "w"))

    path = tmp_path / "evil.npy"
    np.save(path, np.array([Evil()], dtype=object), allow_pickle=True)
    (tmp_path / "owned").unlink(missing_ok=True)
    evil = Array("object", (1,), "numpy.ndarray", path.read_bytes())
    with pytest.raises(BadReply, match="w cannot be read"):
        read_update(update(ArrayRecord({"w": evil, "n": Array(np.array(1))})), MODEL)
    assert not (tmp_path / "owned").exists()


def test_a_shape_that_lies_is_refused():
    array = Array(np.zeros((2, 3), np.float32))
    array.shape = (6,)
    with pytest.raises(BadReply, match="w cannot be read: it says shape"):
        read_update(update(ArrayRecord({"w": array, "n": Array(np.array(1))})), MODEL)


def test_a_wrong_shape_is_refused_before_it_takes_memory():
    expected = Expected(SETTINGS, "client", arrays={"w": torch.zeros(10**6)})
    reply = update(ArrayRecord({"w": Array(np.zeros((10**3, 10**3), np.float32))}))
    tracemalloc.start()
    with pytest.raises(BadReply, match="w has shape"):
        read_update(reply, expected)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1e6


# --- numbers


@given(
    st.one_of(
        st.integers(-(10**18), 10**18),
        st.floats(allow_nan=True, allow_infinity=True),
        st.lists(st.integers(0, 5), max_size=2),
        st.just(10**400),
        st.just(-(10**400)),
    )
)
@settings(max_examples=200, deadline=None)
def test_a_count_is_a_positive_whole_number_of_plausible_size(count):
    reply = update(metrics={"num-examples": count})
    most = SETTINGS.max_examples
    if isinstance(count, int | float) and 0 < count <= most and count == int(count):
        assert read_update(reply, MODEL).examples == count
    else:
        with pytest.raises(BadReply):
            read_update(reply, MODEL)


@pytest.mark.parametrize(
    "metrics",
    [
        {f"m{n}": 1 for n in range(65)},
        {"line\nbreak": 1},
        {"<script>": 1},
        {"\x1b[2J": 1},
        {r"$\frac{$": 1},
        {"": 1},
        {"x" * 101: 1},
        {"\u202e": 1},
        {"x": 1e16},
        {"x": 10**400},
        {"seconds": -1.0},
        {"gram-seconds": 1e10},
        {"epsilon": -3.0},
        {"bytes-up": -5},
    ],
    ids=range(14),
)
def test_numbers_and_names_that_nobody_can_mean_are_refused(metrics):
    with pytest.raises(BadReply, match="metrics: "):
        read_update(update(metrics={"num-examples": 5} | metrics), MODEL)


@pytest.mark.parametrize("weight", [math.nan, math.inf, -1.0, 1e300])
def test_a_weight_that_cannot_be_used_is_the_nodes_failure(weight):
    with pytest.raises(BadReply, match="weight"):
        read_update(update(), MODEL, lambda metrics: weight)


def test_a_station_may_speak_for_its_clients_only():
    station = Expected(SETTINGS, "station", arrays=REFERENCE, together=2)
    said = {"num-examples": 2 * SETTINGS.max_examples, "num-clients": 2}
    assert read_update(update(metrics=said), station).clients == 2
    for wrong in ({"num-examples": 2 * SETTINGS.max_examples + 1}, {"num-clients": 0}):
        with pytest.raises(BadReply, match="plausible count"):
            read_update(update(metrics=said | wrong), station)


# --- Grams


def grams(narrow=None, wide=None):
    x = torch.randn(9, 3, generator=torch.Generator().manual_seed(0))
    return {
        "narrow": narrow or Gram.from_dense(x.T @ x / 9, rows=9),
        "wide": wide or FactorGram(torch.ones(2, 6), rows=5, rank=3),
    }


def with_grams(record):
    counts = MetricRecord({"num-examples": 5, "num-clients": 1})
    return message(RecordDict({"grams": record, "metrics": counts}))


def test_honest_grams_are_read():
    found = read_update(with_grams(grams_to_record(grams())), GRAMS)
    assert list(found.grams) == ["narrow", "wide"] and found.state == {}
    torch.testing.assert_close(found.grams["narrow"].dense(), grams()["narrow"].dense())
    assert found.gram_bytes == found.bytes


def test_a_small_rank_of_the_first_does_not_decide_that_of_all():
    said = FactorGram(torch.ones(1, 6), rows=5, rank=1)
    found = read_update(with_grams(grams_to_record(grams(wide=said))), GRAMS)
    assert found.grams["wide"].rank == SETTINGS.gram_rank


@pytest.mark.parametrize(
    "change",
    [
        {"wide": FactorGram(torch.ones(4, 6), rows=5)},
        {"wide": FactorGram(torch.ones(2, 5), rows=5)},
        {"wide": Gram.from_dense(torch.eye(6))},
        {"narrow": FactorGram(torch.ones(2, 3))},
        {"narrow": Gram.from_dense(torch.eye(4))},
        {"narrow": Gram.from_dense(torch.eye(3), rows=2**62)},
        {"narrow": Gram.from_dense(torch.eye(3).double())},
        {"narrow": Gram.from_dense(-torch.eye(3))},
    ],
    ids=range(8),
)
def test_grams_of_another_size_or_form_are_refused(change):
    record = grams_to_record(grams(**change), dtype=None)
    with pytest.raises(BadReply, match="grams"):
        read_update(with_grams(record), GRAMS)


@pytest.mark.parametrize(
    "table",
    [b"", b"[", b"[" * 5000, b"{}", b"[[]]", b"[[1]]", b'[["narrow"]]', b'[["narrow"],["narrow"]]'],
)
def test_a_table_of_layers_that_is_none_is_refused(table):
    arrays = {name: array.numpy() for name, array in grams_to_record(grams()).items()}
    arrays["layers"] = np.frombuffer(table, np.uint8)
    with pytest.raises(BadReply, match="grams"):
        read_update(with_grams(arrays_to_record(arrays)), GRAMS)


APART = 2 * torch.eye(3) - 1  # every two of its features alone could be those of a Gram


@pytest.mark.parametrize("tier", ["client", "station"])
@pytest.mark.parametrize(
    "change",
    [
        {"narrow": Gram.from_dense(APART)},
        {"narrow": Gram.from_dense(torch.tensor([[1.0, 9, 0], [9, 1, 0], [0, 0, 1]]))},
        {"wide": FactorGram(torch.ones(2, 6), torch.full((6,), 0.1), rows=5)},
    ],
    ids=["all apart", "two alike", "factor beyond its diagonal"],
)
def test_a_matrix_that_is_no_gram_is_refused(change, tier):
    expected = Expected(SETTINGS, tier, layers=GRAMS.layers)
    shrunk = {name: gram.shrink(SETTINGS.alpha) for name, gram in grams().items()}
    read_update(with_grams(grams_to_record(shrunk)), expected)
    with pytest.raises(BadReply, match="is not positive semi-definite"):
        read_update(with_grams(grams_to_record(shrunk | change)), expected)


def test_noise_excuses_a_client_and_not_a_station_which_repairs_what_it_did():
    noised = small_settings(**{"privacy.mechanism": "client", "privacy.sigma": 1.0, "gram-rank": 3})
    record = grams_to_record({"narrow": Gram.from_dense(APART)}, dtype=noised.gram_dtype)
    layers = {"narrow": 3}
    read_update(with_grams(record), Expected(noised, "client", layers=layers))
    with pytest.raises(BadReply, match="is not positive semi-definite"):
        read_update(with_grams(record), Expected(noised, "station", layers=layers))


def test_layers_of_different_widths_cannot_share_a_gram():
    both = grams()["narrow"]
    with pytest.raises(BadReply, match="grams"):
        read_update(with_grams(grams_to_record({"narrow": both, "wide": both})), GRAMS)


def test_a_large_factor_is_refused_before_it_is_read(monkeypatch):
    """It would cost minutes: the work grows with the cube of its rows."""
    wide = {"wide": 8000}
    expected = Expected(small_settings(gram_rank=1024), "client", layers=wide)
    record = grams_to_record({"wide": FactorGram(torch.ones(1025, 8000))})
    read = []
    monkeypatch.setattr(FactorGram, "__init__", lambda gram, *_: read.append(gram))
    with pytest.raises(BadReply, match="grams|larger"):
        read_update(with_grams(record), expected)
    assert read == []


# --- scores

TEN = Expected(small_settings(max_examples=10), "client")


def scores(**counts):
    said = {"loss": 0.5, "correct": 3.0, "num-examples": 4.0}
    said |= {name.replace("_", "-"): value for name, value in counts.items()}
    return message(RecordDict({"metrics": MetricRecord(said)}))


def test_honest_scores_are_read():
    reply = scores(**{"num-examples/a": 4.0, "correct/a": 3.0, "seconds": 1.0})
    found = read_scores(reply, TEN)
    assert found.examples == 4 and found.loss_sum == 2.0
    assert found.counts == {
        "correct": 3.0,
        "num-examples": 4.0,
        "num-examples/a": 4.0,
        "correct/a": 3.0,
    }
    assert read_scores(scores(correct=0.0, num_examples=0.0), TEN).examples == 0


@pytest.mark.parametrize(
    "counts",
    [
        {"num_examples": 11},
        {"correct": 5},
        {"correct": -1},
        {"correct": 1.5},
        {"num-examples/a": 4},
        {"num-examples/a": 3, "correct/a": 3},
        {"num-examples/a": 4, "correct/a": 2},
        {"loss": 1e10},
        {"loss": math.nan},
    ],
    ids=str,
)
def test_counts_that_do_not_add_up_are_refused(counts):
    with pytest.raises(BadReply, match="metrics: "):
        read_scores(scores(**counts), TEN)


# --- who a node is


def identity(**said):
    record = {"tier": "client", "index": 3, "siblings": 0} | said
    return message(RecordDict({"node": ConfigRecord(record)}))


def test_a_place_in_the_tree_is_read():
    found = read_identity(identity())
    assert (found.node_id, found.tier, found.index, found.siblings) == (1, "client", 3, 0)


@pytest.mark.parametrize(
    "said",
    [
        {"tier": "server"},
        {"tier": b"client"},
        {"tier": 1},
        {"index": -2},
        {"index": 10**12},
        {"index": "3"},
        {"index": True},
        {"index": [3]},
        {"siblings": -1},
        {"siblings": 2**62},
        {"siblings": 1.0},
    ],
    ids=str,
)
def test_an_odd_place_is_refused(said):
    with pytest.raises(BadReply):
        read_identity(identity(**said))


def test_no_place_is_refused():
    with pytest.raises(BadReply, match="no usable answer"):
        read_identity(message(RecordDict({"node": MetricRecord({"index": 1})})))
