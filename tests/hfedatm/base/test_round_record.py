"""Lines of a results folder: what a reader may rely on, whoever wrote them."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from hfedatm.base.errors import UserError
from hfedatm.base.results import read_rounds
from hfedatm.base.round_record import BadLine, Failure, RoundRecord

LINE = {
    "round": 1,
    "seconds": 1.0,
    "failures": [{"node": "station 0", "reason": "ill"}],
    "bytes_up": {"clients": 1, "stations": 1},
    "stations": {"asked": 2, "answered": 2},
    "clients": {"answered": 4},
    "per_station": [{"name": "station 1", "num-examples": 5, "num-clients": 2, "loss": 0.5}],
    "source": {"accuracy": 0.5, "loss": 1.0, "domains": {"a": {"accuracy": 1, "examples": 3}}},
    "unseen": {"domain": "c", "accuracy": 0.25, "loss": None},
}


def test_an_honest_line_comes_back_as_it_is():
    line = LINE | {"something": {"of a later": ["version"]}}
    assert RoundRecord.from_line(json.dumps(line)).to_dict() == line


def test_a_record_is_a_value():
    record = RoundRecord.from_line(json.dumps(LINE))
    assert record.but(moved=3).moved == 3 and record.moved is None
    with pytest.raises(ValidationError, match="frozen"):
        record.moved = 3


def test_what_did_not_happen_is_none_and_not_in_the_line():
    record = RoundRecord.from_line(json.dumps(LINE)).but(unseen=None, kept=None)
    assert record.unseen_accuracy is None and record.merge is None and record.loss is None
    assert record.to_dict() == {key: value for key, value in LINE.items() if key != "unseen"}


def test_a_line_of_an_older_run_ranks_by_its_accuracy():
    old = RoundRecord.from_line(json.dumps(LINE)).source
    new = RoundRecord.from_line(json.dumps(LINE | {"source": {"accuracy": 0.5, "score": 0.75}}))
    assert old.rank == (0.5, 0.5) and new.source.rank == (0.75, 0.5)


@given(
    numbers=st.dictionaries(
        st.sampled_from(["steps", "grad_norm", "a b", "num_examples", "to_dict", "model_config"]),
        st.integers(-(10**9), 10**9) | st.floats(-1e9, 1e9),
    )
)
def test_what_a_station_reports_comes_back_by_its_name(numbers):
    line = LINE | {"per_station": [{**LINE["per_station"][0], **numbers}]}
    text = RoundRecord.from_line(json.dumps(line)).to_line()
    assert json.loads(text) == line


@pytest.mark.parametrize(
    "change",
    [
        {"round": "1"},
        {"round": 0},
        {"round": True},
        {"round": 10**30},
        {"seconds": "long"},
        {"seconds": -1},
        {"seconds": float("nan")},
        {"failures": 3},
        {"failures": [{}]},
        {"failures": [{"node": 1, "reason": "x"}]},
        {"bytes_up": []},
        {"bytes_up": {"clients": 1}},
        {"stations": {"asked": "many", "answered": 1}},
        {"clients": None},
        {"per_station": [{"name": 3, "num-examples": 1, "num-clients": 1}]},
        {"per_station": [{"name": "a", "num-examples": 1, "num-clients": 1, "x": "text"}]},
        {"source": {"accuracy": 7}},
        {"source": {"accuracy": 0.5, "domains": []}},
        {"unseen": {"accuracy": 0.5}},
        {"privacy": {"epsilon": "much"}},
        {"merge": {"reference": "a", "stations": [], "layers": {}}},
        {"moved": 1.5},
        {"kept": 1},
        {"loss": None},
        {"source": None},
        {"source": {"accuracy": 0.5, "score": 10**400}},
        {"unseen": None},
        {"cuts": [1]},
        {"taken_back": []},
    ],
    ids=str,
)
def test_a_line_with_an_odd_value_is_refused_by_its_name(change):
    with pytest.raises(BadLine, match=next(iter(change))):
        RoundRecord.from_line(json.dumps(LINE | change))


@pytest.mark.parametrize(
    "text", ["", "3", "[]", "null", "{", "[" * 10**5, '{"a":' * 10**5, "9" * 5000]
)
def test_what_is_no_record_is_refused(text):
    with pytest.raises(BadLine):
        RoundRecord.from_line(text)


def test_text_of_a_line_only_shows(tmp_path):
    line = LINE | {
        "kept": "\x1b[2J\n" + "x" * 10**6,
        "failures": [{"node": "\u202e", "reason": "\r"}],
    }
    found = RoundRecord.from_line(json.dumps(line))
    assert found.kept.startswith(r"\x1b[2J\n") and len(found.kept) == 1000
    assert found.failures == [Failure(node=r"\u202e", reason=r"\r")]


def test_the_message_names_file_and_line(tmp_path):
    lines = [LINE, LINE | {"round": 2}, LINE | {"round": "three"}]
    (tmp_path / "rounds.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(UserError, match="rounds.jsonl cannot be read: line 3: round"):
        read_rounds(tmp_path)
