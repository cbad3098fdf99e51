"""Index maps on the wire: only permutations of the model's axes, from a few earlier rounds."""

import pytest
import torch
from flwr.app import RecordDict

from hfedatm.base.index_maps import MOST_ROUNDS, RECORD, StationMaps, read_maps
from hfedatm.base.records import BadTask, state_to_record
from hfedatm_core.channels.index_maps import IndexMap

MODEL = {"conv.weight": torch.zeros(3, 2), "conv.bias": torch.zeros(3), "step": torch.tensor(1)}
ORDER = torch.tensor([1, 0, 2])
SWAP = IndexMap({("conv.weight", 0): ORDER, ("conv.bias", 0): ORDER})


def sent(arrays) -> RecordDict:
    return RecordDict({RECORD: state_to_record(arrays)})


def test_maps_arrive_as_they_were_sent():
    maps = StationMaps().plus(2, SWAP).plus(5, SWAP).plus(6, IndexMap())
    assert sorted(maps.rounds) == [2, 5]
    found = read_maps(RecordDict({RECORD: maps.to_record()}), MODEL, 6)
    kept = {"z.conv.bias": torch.tensor([1.0, 2.0, 3.0])}
    for saved, expected in ((1, [1, 2, 3]), (2, [2, 1, 3]), (4, [1, 2, 3]), (5, [2, 1, 3])):
        assert found.moved(saved, kept, MODEL, {})["z.conv.bias"].tolist() == expected
    assert sorted(maps.before(5).rounds) == [2]


def test_a_message_without_maps_has_none():
    assert not read_maps(RecordDict(), MODEL, 1)


def test_only_some_rounds_are_kept_and_older_state_is_given_up():
    maps = StationMaps()
    for round in range(1, MOST_ROUNDS + 3):
        maps = maps.plus(round, SWAP)
    assert sorted(maps.rounds) == list(range(3, MOST_ROUNDS + 3)) and maps.forgotten == 2
    found = read_maps(RecordDict({RECORD: maps.to_record()}), MODEL, MOST_ROUNDS + 3)
    assert found.moved(2, {"x": torch.ones(1)}, MODEL, {}) == {}
    assert found.moved(3, {"x": torch.ones(1)}, MODEL, {}) == {"x": torch.ones(1)}


GOOD = torch.tensor([1, 0, 2], dtype=torch.int32)


@pytest.mark.parametrize(
    ("arrays", "why"),
    [
        ({"1/conv.bias:0": GOOD - 1}, "not a permutation"),
        ({"1/conv.bias:0": torch.tensor([0, 0, 1], dtype=torch.int32)}, "not a permutation"),
        ({"1/conv.bias:0": GOOD.long()}, "type int64"),
        ({"1/conv.bias:0": GOOD[:2]}, "shape"),
        ({"1/conv.bias:1": GOOD}, "has no axis"),
        ({"1/step:0": GOOD}, "has no axis"),
        ({"1/other:0": GOOD}, "has no axis"),
        ({"3/conv.bias:0": GOOD}, "round 3 has no place in round 3"),
        ({"0/conv.bias:0": GOOD}, "round 0 has no place"),
        ({"conv.bias:0": GOOD}, "not the name of a map"),
        ({"forgotten": torch.tensor(3)}, "round 3 has no place"),
        ({"forgotten": torch.tensor([1])}, "shape"),
    ],
)
def test_what_is_no_map_is_refused(arrays, why):
    with pytest.raises(BadTask, match=why):
        read_maps(sent(arrays), MODEL, 3)


def test_too_many_rounds_are_refused():
    arrays = {f"{round}/conv.bias:0": GOOD for round in range(1, MOST_ROUNDS + 2)}
    with pytest.raises(BadTask, match="has no place"):
        read_maps(sent(arrays), MODEL, 100)
