"""Lines of a results folder: what a reader may rely on, whoever wrote them."""

import json

import pytest

from hfedatm.base.errors import UserError
from hfedatm.base.results import read_rounds
from hfedatm.base.roundlines import BadLine, read_line

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
    assert read_line(json.dumps(line)) == line


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
        read_line(json.dumps(LINE | change))


@pytest.mark.parametrize(
    "text", ["", "3", "[]", "null", "{", "[" * 10**5, '{"a":' * 10**5, "9" * 5000]
)
def test_what_is_no_record_is_refused(text):
    with pytest.raises(BadLine):
        read_line(text)


def test_text_of_a_line_only_shows(tmp_path):
    line = LINE | {
        "kept": "\x1b[2J\n" + "x" * 10**6,
        "failures": [{"node": "\u202e", "reason": "\r"}],
    }
    found = read_line(json.dumps(line))
    assert found["kept"].startswith(r"\x1b[2J\n") and len(found["kept"]) == 1000
    assert found["failures"] == [{"node": r"\u202e", "reason": r"\r"}]


def test_the_message_names_file_and_line(tmp_path):
    lines = [LINE, LINE | {"round": 2}, LINE | {"round": "three"}]
    (tmp_path / "rounds.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(UserError, match="rounds.jsonl cannot be read: line 3: round"):
        read_rounds(tmp_path)
