"""The runs of a deployment, with Flower's command line replaced by a table."""

import json
from pathlib import Path

import pytest
from helpers import run_small

from hfedatm import submissions
from hfedatm.base import presence
from hfedatm.base.errors import UserError
from hfedatm.base.results import RunFolder
from hfedatm.deploy import flower


@pytest.fixture
def flwr(monkeypatch, tmp_path):
    """Return what Flower lists, by the id of the run; runs start and stop in this table."""
    table, apps = {}, []

    def answer(arguments, home):
        if arguments[0] == "run":
            apps.append(Path(arguments[1], "pyproject.toml").read_text())
            number = str(100 + len(table))
            table[number] = {
                "status": "running",
                "running-at": f"at {number}",
                "pending-at": number,
            }
            return {"run-id": number}
        if arguments[0] == "stop":
            table[arguments[1]] |= {"status": "finished:stopped", "finished-at": "then"}
            return {}
        assert arguments[0] == "list"
        return {"runs": [{"run-id": id, **row} for id, row in table.items()]}

    monkeypatch.setattr(flower, "_flwr", answer)
    home = tmp_path / "operator"
    home.mkdir()
    return home, table, apps


def test_each_run_gets_its_own_settings_and_leaves_no_app_behind(flwr, tmp_path):
    home, _, apps = flwr
    for seed in range(3):
        submissions.submit(home, {"seed": seed, "output": str(tmp_path)})
    assert [f"seed = {seed}" in app for seed, app in enumerate(apps)] == [True] * 3
    assert not list(home.glob("app-*"))


def test_a_run_is_listed_with_its_folder(flwr, tmp_path):
    home, table, _ = flwr
    first = submissions.submit(home, {"output": str(tmp_path / "results")})
    second = submissions.submit(home, {"output": str(tmp_path / "results")})
    folder = run_small(tmp_path / "results", rounds=1)
    RunFolder.reopen(str(folder), {}).note_flower_run(first)
    newest, oldest = submissions.submissions(home)
    assert (newest.id, newest.name, newest.rounds) == (str(second), "", "")
    assert oldest.plain() == {
        "id": str(first), "state": "running", "since": f"at {first}",
        "name": "run", "rounds": "1/1", "results": str(folder),
    }  # fmt: skip


def test_a_resumed_run_is_found_under_both_ids(flwr, tmp_path):
    home, *_ = flwr
    folder = run_small(tmp_path, rounds=1)
    for given in ({"output": str(tmp_path)}, {"resume": str(folder), "output": "elsewhere"}):
        RunFolder.reopen(str(folder), {}).note_flower_run(submissions.submit(home, given))
    assert {each.name for each in submissions.submissions(home)} == {"run"}
    assert len(json.loads((folder / "config.json").read_text())["flower-runs"]) == 2


def test_stopping(flwr, tmp_path):
    home, table, _ = flwr
    going = str(submissions.submit(home, {"output": str(tmp_path)}))
    other = str(submissions.submit(home, {"output": str(tmp_path)}))
    assert submissions.stop(home, going).id == going
    assert table[going]["status"] == "finished:stopped"
    with pytest.raises(UserError, match=rf"run {going} is over \(finished:stopped\).* {other}"):
        submissions.stop(home, going)
    with pytest.raises(UserError, match=f"there is no run nobody; runs that go on: {other}"):
        submissions.stop(home, "nobody")


def test_stop_waits_for_a_round_that_the_process_still_saves(flwr, tmp_path, monkeypatch):
    home, _, _ = flwr
    run_id = submissions.submit(home, {"output": str(tmp_path / "results")})
    folder = run_small(tmp_path / "results", rounds=3)
    RunFolder.reopen(str(folder), {}).note_flower_run(run_id)
    lines = (folder / "rounds.jsonl").read_text().splitlines(keepends=True)
    (folder / "rounds.jsonl").write_text("".join(lines[:1]))
    presence.announce(folder)

    def the_round_ends(_):
        (folder / "rounds.jsonl").write_text("".join(lines[:2]))
        presence.say_stopped(folder, "the run was stopped")

    monkeypatch.setattr(submissions.time, "sleep", the_round_ends)
    assert submissions.stop(home, str(run_id)).rounds == "2/3"


def test_a_run_is_stopped_when_its_round_is_finished(flwr, tmp_path, monkeypatch):
    """The next round's line appears while the command waits."""
    home, table, _ = flwr
    run = submissions.submit(home, {"output": str(tmp_path)})
    folder = run_small(tmp_path, rounds=2)
    RunFolder.reopen(str(folder), {}).note_flower_run(run)
    lines = (folder / "rounds.jsonl").read_text().splitlines(keepends=True)
    (folder / "rounds.jsonl").write_text(lines[0])
    looks = []

    def sleep(_):
        looks.append(table[str(run)]["status"])
        if len(looks) == 3:
            (folder / "rounds.jsonl").write_text("".join(lines))

    monkeypatch.setattr(submissions.time, "sleep", sleep)
    stopped = submissions.stop(home, str(run), after_round=True)
    assert looks == ["running"] * 3
    assert (stopped.rounds, table[str(run)]["status"]) == ("2/2", "finished:stopped")


def test_a_run_that_ends_meanwhile_needs_no_stop(flwr, tmp_path, monkeypatch):
    home, table, _ = flwr
    run = submissions.submit(home, {"output": str(tmp_path)})
    monkeypatch.setattr(submissions.time, "monotonic", iter(range(0, 10**6, 100)).__next__)
    real = flower.list_runs
    asked = []

    def list_runs(*given):
        asked.append(1)
        if len(asked) == 3:
            table[str(run)]["status"] = "finished:completed"
        return real(*given)

    monkeypatch.setattr(flower, "list_runs", list_runs)
    stopped = submissions.stop(home, str(run), after_round=True)
    assert stopped.state == table[str(run)]["status"] == "finished:completed"


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("Task failed with unknown error.", "its process was ended"),
        ("No heartbeat received from the task", "its process has ended, or stood still"),
        ("ServerApp failed with exception: no data", "ServerApp failed with exception: no data"),
    ],
)
def test_why_a_run_has_ended_is_said_in_our_words(flwr, theirs, ours):
    home, table, _ = flwr
    table["7"] = {"status": "finished:failed", "status-details": theirs}
    status, details = flower.run_status(7, "server", home)
    assert status == "finished:failed" and details.startswith(ours)
