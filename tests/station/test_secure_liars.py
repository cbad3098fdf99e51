"""One lying client costs its station nothing but that client, whatever it says and when."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord, Message, MetricRecord, RecordDict
from flwr.common import Array, ArrayRecord
from helpers import SPEC, last_model, run_small, small_settings, tiny_net
from secure_station import CLIENTS, PLAIN, UNBOUNDED, Spied, gather, silent
from torch import nn

from hfedatm.base.errors import UserError
from hfedatm.base.masked_reply import ReplyLayout, check_range, flatten, mean_reply, read_groups
from hfedatm.base.records import BadReply
from hfedatm_core.secagg import FixedPoint
from station_app.hearing import TooFewClients

LIAR = 2
STATE = tiny_net(SPEC).state_dict()


def close(one, other, tolerance=2e-6):
    return all(torch.allclose(one[name], other[name], atol=tolerance, rtol=0) for name in other)


def saying(**records):
    """Make a lie: some records of the reply are others, or are not there."""

    def lie(message, reply):
        content = {**reply.content, **records}
        return Message(
            RecordDict({k: v for k, v in content.items() if v is not None}), reply_to=message
        )

    return lie


def with_message(change):
    def lie(message, reply):
        key = "keys" if "keys" in reply.content else "secure"
        fields = json.loads(reply.content[key]["message"])
        record = ConfigRecord({"message": json.dumps(change(fields)).encode()})
        return saying(**{key: record})(message, reply)

    return lie


def flipped(text):
    return text[:-1] + ("0" if text[-1] != "0" else "1")


def spoil_map(name):
    return with_message(
        lambda m: {**m, name: {key: flipped(value) for key, value in m[name].items()}}
    )


def vector_of(values):
    return saying(masked=ArrayRecord({"vector": Array(values)}))


ODD_MESSAGES = [b"", b"{}", b"[]", b"\xff", b"[" * 50_000, "text", 7, 1.5, [b"a"]]
ANY = {
    "nothing": lambda message, reply: Message(RecordDict(), reply_to=message),
    "metrics only": lambda message, reply: Message(
        RecordDict({"metrics": MetricRecord({"num-examples": 5})}), reply_to=message
    ),
}
EVERYWHERE = {
    **ANY,
    **{
        f"message {str(odd)[:10]!r}": saying(
            keys=ConfigRecord({"message": odd}), secure=ConfigRecord({"message": odd})
        )
        for odd in ODD_MESSAGES
    },
    "records of other kinds": saying(
        keys=MetricRecord({"message": 1}), secure=MetricRecord({"message": 1})
    ),
}
LIES = {
    "train": {
        **EVERYWHERE,
        "no layout": saying(layout=None),
        "layout of other layers": saying(layout=ConfigRecord({"groups": '[["x"]]', "digest": ""})),
        "layout of no layers": saying(layout=ConfigRecord({"groups": "[]", "digest": ""})),
        "layout that is none": saying(layout=ConfigRecord({"groups": "{", "digest": ""})),
        "layout that is deep": saying(layout=ConfigRecord({"groups": "[" * 50_000, "digest": ""})),
        "layout of numbers": saying(layout=ConfigRecord({"groups": 7, "digest": 7})),
        "layout of another size": saying(
            layout=ConfigRecord({"groups": '[["4"], ["6"]]', "digest": "00"})
        ),
        "all layers share": saying(layout=ConfigRecord({"groups": '[["4", "6"]]', "digest": ""})),
        "layout in the arrays": saying(layout=ArrayRecord({"groups": Array(np.zeros(3))})),
        "no metrics": saying(metrics=None),
        "infinite metrics": saying(metrics=MetricRecord({"seconds": float("inf")})),
        "negative epsilon": saying(metrics=MetricRecord({"epsilon": -1.0})),
        "a list of metrics": saying(metrics=MetricRecord({"seconds": [1.0, 2.0]})),
        "huge metrics": saying(metrics=MetricRecord({"seconds": 1e300})),
        "no mask key": with_message(lambda m: {**m, "mask_key": ""}),
        "mask key of zeros": with_message(lambda m: {**m, "mask_key": "00" * 32}),
        "share key of zeros": with_message(lambda m: {**m, "share_key": "00" * 32}),
        "a long certificate": with_message(lambda m: {**m, "certificate": "00" * 100_000}),
    },
    "train.share": {
        **EVERYWHERE,
        "boxes nobody can open": spoil_map("sealed"),
        "boxes for nobody": with_message(lambda m: {**m, "sealed": {}}),
        "a box too few": with_message(
            lambda m: {**m, "sealed": dict(list(m["sealed"].items())[1:])}
        ),
        "boxes of another size": with_message(
            lambda m: {**m, "sealed": {k: v + "00" for k, v in m["sealed"].items()}}
        ),
        "other commitments": with_message(
            lambda m: {**m, "commitments": m["commitments"][64:] + m["commitments"][:64]}
        ),
        "commitments that are no points": with_message(
            lambda m: {**m, "commitments": "02" + m["commitments"][2:]}
        ),
        "few commitments": with_message(lambda m: {**m, "commitments": m["commitments"][:64]}),
    },
    "train.check": {
        **EVERYWHERE,
        "everybody lies": with_message(
            lambda m: {"false": [c for c in range(CLIENTS) if c != LIAR]}
        ),
        "somebody lies": with_message(lambda m: {"false": [0]}),
        "itself lies": with_message(lambda m: {"false": [LIAR]}),
        "nobody it knows lies": with_message(lambda m: {"false": [77]}),
        "no list": with_message(lambda m: {"false": 3}),
    },
    "train.mask": {
        **ANY,
        "a short vector": vector_of(np.zeros(3, dtype=np.uint64)),
        "an empty vector": vector_of(np.zeros(0, dtype=np.uint64)),
        "a vector of floats": vector_of(np.zeros(700)),
        "a vector of rows": vector_of(np.zeros((2, 3), dtype=np.uint64)),
        "a vector of half the bits": vector_of(np.zeros(700, dtype=np.uint32)),
        "a vector in the metrics": saying(masked=MetricRecord({"vector": 1})),
        "a vector that is no array": saying(
            masked=ArrayRecord({"vector": Array("uint64", (5,), "numpy.ndarray", b"junk")})
        ),
        "a vector of another name": saying(
            masked=ArrayRecord({"weights": Array(np.zeros(3, dtype=np.uint64))})
        ),
    },
    "train.sign": {
        **EVERYWHERE,
        "a signature under nothing": with_message(lambda m: {"signature": "00" * 64}),
        "a short signature": with_message(lambda m: {"signature": "00"}),
    },
    "train.reveal": {
        **EVERYWHERE,
        "false seeds": spoil_map("seeds"),
        "one false seed": with_message(
            lambda m: {**m, "seeds": {**m["seeds"], "0": flipped(m["seeds"]["0"])}}
        ),
        "seeds of some": with_message(lambda m: {**m, "seeds": dict(list(m["seeds"].items())[1:])}),
        "keys of somebody": with_message(lambda m: {**m, "keys": {"0": "00" * 32}}),
        "long seeds": with_message(
            lambda m: {**m, "seeds": {k: v + "00" for k, v in m["seeds"].items()}}
        ),
        "seeds of nobody": with_message(lambda m: {**m, "seeds": {"x": "00" * 32}}),
    },
}
BEFORE = ("train", "train.share", "train.check", "train.mask")


@pytest.fixture(scope="module")
def means(tmp_path_factory):
    """The mean models with and without the liar, by plain averaging."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HFEDATM_STATE", str(tmp_path_factory.mktemp("plain")))
        whole = gather(run="whole", **PLAIN)[1]
        rest = gather(Spied({("train", LIAR): silent}), run="rest", **PLAIN)[1]
    return whole, rest


@pytest.mark.parametrize(("stage", "lie"), [(s, name) for s in LIES for name in LIES[s]])
def test_a_lie_costs_its_client_and_nobody_else(stage, lie, means):
    whole, rest = means
    strategy, model, _ = gather(Spied({(stage, LIAR): LIES[stage][lie]}))
    if stage in BEFORE:
        (failure,) = strategy.failures
        assert failure.node == f"client {LIAR}"
        assert failure.reason
        assert "\n" not in failure.reason
        assert len(failure.reason) < 500
        assert close(model, rest)
        assert strategy.num_clients == CLIENTS - 1
    else:  # it has delivered
        assert strategy.failures == []
        assert close(model, whole)
        assert strategy.num_clients == CLIENTS


def test_so_many_lies_were_tried():
    assert sum(map(len, LIES.values())) > 70


def test_the_layout_of_most_decides_and_not_that_of_the_first():
    """The first client says, soundly, that its layers share otherwise than those of the others."""

    def otherwise(message, reply):
        arrays = [("model", n, "float32", tuple(v.shape)) for n, v in sorted(STATE.items())]
        honest = ReplyLayout(("loss",), tuple(arrays), ((("4",), 36), (("6",), 16)))
        assert honest.digest == reply.content["layout"]["digest"]
        other = replace(honest, grams=honest.grams[::-1])
        return saying(layout=other.to_record())(message, reply)

    strategy, *_ = gather(Spied({("train", 0): otherwise}))
    (failure,) = strategy.failures
    assert (failure.node, strategy.num_clients) == ("client 0", CLIENTS - 1)
    assert "its layers share Grams in another way" in failure.reason


def test_layouts_follow_from_what_was_asked_for():
    layers = {"q": 4, "k": 4, "out": 8}
    arrays = {"w": torch.zeros(2, 3), "n": torch.zeros((), dtype=torch.int64)}
    made = ReplyLayout.expected(["loss"], "model", arrays, layers, (("q", "k"), ("out",)))
    assert made.size == 1 + 1 + (6 + 1) + 1 + 10 + 36
    assert made.arrays[0] == ("model", "n", "int64", ())
    for groups in ((("q",), ("out",)), (("q", "k"), ("out", "q")), (("q", "out"), ("k",)), ()):
        with pytest.raises(BadReply):
            ReplyLayout.expected(["loss"], "model", arrays, layers, groups)
    with pytest.raises(BadReply):
        read_groups(ConfigRecord({"groups": "[[]]", "digest": ""}))


# --- numbers that do not fit


def batch_norm_net(spec) -> nn.Module:
    net = tiny_net(spec)
    net.insert(1, nn.BatchNorm2d(4))
    return net


def test_batch_norm_is_summed_as_it_is_averaged_after_any_number_of_batches(tmp_path, monkeypatch):
    """Its count of batches, times the examples, soon has no room beside a fraction."""
    given = {"model": "test_secure_liars:batch_norm_net", "rounds": 1, "clients-per-station": 3}
    build = batch_norm_net

    def worn(spec):
        net = build(spec)
        net[1].num_batches_tracked += 50_000_000
        return net

    monkeypatch.setattr("test_secure_liars.batch_norm_net", worn)
    given |= UNBOUNDED
    plain = run_small(tmp_path, "plain", **given, **{"gram-min-rows": 1})
    secure = run_small(
        tmp_path, "secure", **given, **{"gram-min-rows": 1, "secure-aggregation": True}
    )
    one, other = last_model(plain), last_model(secure)
    assert int(one["1.num_batches_tracked"]) > 50_000_000
    assert torch.equal(one["1.num_batches_tracked"], other["1.num_batches_tracked"])
    assert close(other, one, 1e-4)


def test_a_number_without_room_is_named_before_keys_leave():
    settings = small_settings(**PLAIN)
    app = Spied()
    gather(app, **PLAIN)
    reply = app.seen[0][2].content
    layout, vector = flatten(reply, settings)
    check_range(layout, vector, CLIENTS)
    at = 1 + 1
    vector[at] = FixedPoint().limit(CLIENTS)
    name = layout.arrays[0][1]
    with pytest.raises(UserError, match=f"'{name}' times the examples is 4.295e.08"):
        check_range(layout, vector, CLIENTS)
    vector[at] = np.nan
    with pytest.raises(UserError, match="is nan"):
        check_range(layout, vector, CLIENTS)


def test_a_spoilt_sum_is_noticed_by_its_counts():
    layout = ReplyLayout(("loss",), (("model", "n", "uint8", (1,)),), ((("a",), 1),))
    sound = np.array([10.0, 5.0, 10 * 3 * 2.0**-24, 2.0, 1.0])
    reply = mean_reply(layout, sound, 2)
    assert reply["metrics"]["num-examples"] == 10
    for place, value in ((0, 10.5), (0, 1.0), (0, -3.0), (0, 1e13), (3, 0.5), (3, 11.0), (2, 1.0)):
        spoilt = sound.copy()
        spoilt[place] = value
        with pytest.raises(BadReply, match="spoilt"):
            mean_reply(layout, spoilt, 2)


def test_a_vector_of_nonsense_is_not_seen_and_not_hidden():
    """By design nobody sees what a vector holds; that the sum is nonsense shows in its counts."""

    def nonsense(message, reply):
        size = reply.content["masked"]["vector"].numpy().size
        return vector_of(np.full(size, 12345, dtype=np.uint64))(message, reply)

    with pytest.raises(TooFewClients, match="the secure sum is spoilt"):
        gather(Spied({("train.mask", LIAR): nonsense}))
