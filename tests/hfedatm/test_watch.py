"""`hfedatm watch`: the state of a run from its files alone."""

import json
import os
import time

import pytest

from hfedatm.base.errors import UserError
from hfedatm.runs import GRACE, newest_run, read_run


def test_a_finished_run_is_shown_whole(hfedatm, results):
    shown = hfedatm("watch", results / "hfedatm-0", "--once")
    assert shown.exit_code == 0
    assert "hfedatm-0  finished" in shown.stdout
    for bar in ("2/2", "4/4"):  # rounds and stations, clients
        assert bar in shown.stdout
    accuracy = read_run(results / "hfedatm-0").rounds[-1].unseen_accuracy
    assert f"{100 * accuracy:.1f} %" in shown.stdout


def test_without_once_it_returns_when_the_run_is_finished(hfedatm, results):
    assert hfedatm("watch", results / "hfedatm-0").exit_code == 0


def test_slow_and_failing_nodes_are_named(hfedatm, broken_run):
    shown = hfedatm("watch", broken_run, "--once")
    assert "slow: station 1" in shown.stdout
    assert "failing: station 1, client 3 (1x)" in shown.stdout
    assert "failing: station 0 (1x): time out" in shown.stdout


def test_json_carries_the_state(hfedatm, broken_run):
    state = json.loads(hfedatm("watch", broken_run, "--json").stdout)
    assert state["status"] == "running"
    assert state["rounds"] == {"done": 2, "total": 2}
    assert state["slow"] == ["station 1"]
    assert state["failing"] == {"station 1, client 3": 1, "station 0": 1}


def test_time_left_is_by_the_latest_rounds(broken_run, monkeypatch):
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now)
    lines = (broken_run / "rounds.jsonl").read_text().splitlines()
    (broken_run / "rounds.jsonl").write_text(lines[0] + "\n")
    run = read_run(broken_run)
    each = run.rounds[0].seconds
    assert run.seconds_left == max(0.0, each - run.idle)
    (broken_run / "rounds.jsonl").unlink()
    assert read_run(broken_run).seconds_left is None


def test_a_run_that_went_silent_has_another_exit_code(hfedatm, broken_run):
    longest = max(r.seconds for r in read_run(broken_run).rounds)
    past = time.time() - GRACE - 10 * longest
    for path in broken_run.glob("*.json*"):
        os.utime(path, (past, past))
    shown = hfedatm("watch", broken_run, "--once")
    assert shown.exit_code == 1
    assert "silent" in shown.stdout


def test_a_half_written_line_is_not_read(broken_run):
    with (broken_run / "rounds.jsonl").open("a") as file:
        file.write('{"round": 3, "fail')
    assert len(read_run(broken_run).rounds) == 2


def test_the_newest_run_is_the_default(hfedatm, results, monkeypatch, tmp_path):
    (tmp_path / "results").symlink_to(results)
    monkeypatch.chdir(tmp_path)
    newest = max(results.iterdir(), key=lambda p: (p / "config.json").stat().st_mtime)
    assert newest_run() == newest.resolve()
    assert newest.name in hfedatm("watch", "--once").stdout
    assert "avg-0" in hfedatm("watch", "avg-0", "--once").stdout  # by name, in results


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda path: (path / "config.json").unlink(), "is not a run's folder"),
        (lambda path: (path / "config.json").write_text("{"), "config.json cannot be read"),
        (lambda path: (path / "config.json").write_text("[]"), "must hold a JSON object"),
        (
            lambda path: (path / "rounds.jsonl").write_text("{\n"),
            "rounds.jsonl cannot be read",
        ),
    ],
)
def test_a_spoilt_folder_is_one_clear_message(broken_run, spoil, message):
    spoil(broken_run)
    with pytest.raises(UserError, match=message):
        read_run(broken_run)


def test_what_is_not_a_run_is_refused_with_what_there_is(results):
    with pytest.raises(UserError, match="it holds the runs .*avg-0"):
        read_run(results)
    with pytest.raises(UserError, match="there is no folder"):
        read_run("nowhere")
