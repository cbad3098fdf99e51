"""The file of finished runs: a run is a whole line or nothing, whoever writes and dies."""

import json
import multiprocessing

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hfedatm.base.errors import UserError
from hfedatm.reproduce.runfile import append_run, read_runs


def run(key: str, size: int = 1) -> dict:
    return {"key": key, "settings": {"λ": 0.5}, "rounds": list(range(size))}


@pytest.fixture
def file(tmp_path):
    return tmp_path / "runs" / "table.jsonl"


def test_what_was_added_is_read_in_order(file):
    for key in "abc":
        append_run(file, run(key))
    assert list(read_runs(file)) == [run("a"), run("b"), run("c")]


def test_a_run_is_one_line_whose_keys_are_in_order(file):
    append_run(file, {"settings": {"b": 1, "a": 2}, "key": "x"})
    assert file.read_text() == '{"key":"x","settings":{"a":2,"b":1}}\n'


def with_settings(key: str, **chosen) -> dict:
    return {"key": key, "settings": {"seed": 0, "λ": 0.5, **chosen}, "versions": {"torch": "2"}}


def test_a_line_names_only_what_differs_from_the_first_run(file):
    runs = [with_settings("a"), with_settings("b", seed=1), with_settings("c", new=3)]
    runs.append({"key": "d", "settings": {"seed": 0}, "versions": {"torch": "2"}})  # lacks one
    for each in runs:
        append_run(file, each)
    assert list(read_runs(file)) == runs
    second, third, last = map(json.loads, file.read_text().splitlines()[1:])
    assert second == {"key": "b", "like": "a", "settings": {"seed": 1}, "versions": {}}
    assert third["settings"] == {"new": 3}
    assert last == runs[-1]


def test_lines_of_two_files_may_be_put_together(tmp_path):
    one, other = tmp_path / "one.jsonl", tmp_path / "other.jsonl"
    for file, lam in ((one, 0.0), (other, 1.0)):
        for seed in range(2):
            append_run(file, with_settings(f"{lam} {seed}", λ=lam, seed=seed))
    expected = [*read_runs(one), *read_runs(other)]
    one.write_bytes(one.read_bytes() + other.read_bytes())
    assert list(read_runs(one)) == expected


def test_a_run_that_is_like_an_unknown_one_is_named(file):
    append_run(file, with_settings("a"))
    append_run(file, with_settings("b"))
    file.write_text(file.read_text().splitlines(keepends=True)[1])
    with pytest.raises(UserError, match=r"table\.jsonl, line 1"):
        list(read_runs(file))


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_writer_may_die_after_any_byte(tmp_path, data):
    file = tmp_path / "runs.jsonl"
    file.unlink(missing_ok=True)
    append_run(file, run("a"))
    before = file.stat().st_size
    append_run(file, run("b", data.draw(st.sampled_from([1, 40_000]))))
    whole = file.stat().st_size
    with file.open("r+b") as opened:
        opened.truncate(data.draw(st.integers(before, whole - 1)))
    assert list(read_runs(file)) == [run("a")]
    append_run(file, run("c"))
    assert list(read_runs(file)) == [run("a"), run("c")]


def test_a_first_line_that_was_cut_off_is_replaced(file):
    file.parent.mkdir()
    file.write_text('{"key":"a","sett')
    assert list(read_runs(file)) == []
    append_run(file, run("b"))
    assert list(read_runs(file)) == [run("b")]


@pytest.mark.parametrize("line", ["<<<<<<< mine", "[]", '"key"', '{"key": "a"}'])
def test_a_line_that_is_no_run_is_named(file, line):
    append_run(file, run("a"))
    file.write_text(file.read_text() + line + "\n")
    with pytest.raises(UserError, match=r"table\.jsonl, line 2"):
        list(read_runs(file))


def write_many(file, name: str) -> None:
    for number in range(50):
        append_run(file, run(f"{name}{number}", 5_000))  # longer than what is written at once


def test_several_processes_add_without_mixing_lines(file):
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=write_many, args=(file, name)) for name in "abcd"]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    lines = file.read_bytes().splitlines()
    keys = [json.loads(line)["key"] for line in lines]
    assert sorted(keys) == sorted(f"{name}{number}" for name in "abcd" for number in range(50))
