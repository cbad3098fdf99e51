"""What nodes say reaches people as text: in the terminal, the log, JSON and the report."""

import json

import pytest
from flwr.app import ConfigRecord, Error, Message, MetricRecord, RecordDict
from helpers import Saboteur, failures_of, lines_of, log_lines, run_small
from rich.console import Console

import hfedatm.runtime.local as local
import hfedatm.runtime.stations as stations
from hfedatm.cli.compare import _show, describe
from hfedatm.cli.watch import view
from hfedatm.report import render
from hfedatm.runs import read_run

FORGED = "ill\nround   9/9 | stations 2/2 | clients 4 | loss 0.000 | source 100.0 %"
SAID = {
    "a forged line": FORGED,
    "escape sequences": "\x1b[2J\x1b]0;owned\x07\x1b[31mred\x9b2J",
    "other ends of a line": "a\rb\x0bc\x0cd\x1ce\x85f\u2028g\u2029h",
    "another direction": "evil\u202egnp.exe\u200b\ufeff",
    "a script": "<script>alert(1)</script><img src=x onerror=alert(1)>",
    "markup of rich": "[/bold][link=http://evil]x[/link][red]",
    "mathematics": r"$\\frac{$ $x^",
    "a template": "{{ 7*7 }}{% for x in y %}",
    "nothing": "",
}


def failing_with(reason):
    def spoil(message, reply):
        return Message(RecordDict({"failure": ConfigRecord({"reason": reason})}), reply_to=message)

    return spoil


def shown_everywhere(folder):
    """Return all that a person may read of a run."""
    run = read_run(folder)
    console = Console(width=400, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(view(run))
    return console.export_text(), render([run])


@pytest.fixture
def hostile(tmp_path, monkeypatch):
    """Run the small federation with client 1 answering as told."""

    def run(spoil, message_type="train", **given):
        saboteur = Saboteur(spoil, {1}, message_type)
        monkeypatch.setattr(local, "client_app", saboteur)
        with log_lines() as lines:
            folder = run_small(tmp_path, rounds=1, station_rounds=1, **given)
        return folder, lines

    return run


@pytest.mark.parametrize("kind", SAID)
def test_a_reason_is_one_harmless_line_wherever_it_is_read(hostile, kind):
    folder, lines = hostile(failing_with(SAID[kind]))
    [failure] = failures_of(folder)
    assert failure["node"] == "station 0, client 1"
    assert failure["reason"].isprintable() and len(failure["reason"]) <= 200
    for line in lines:
        assert line.replace("\n", "").isprintable(), "only our own lines break"
    assert not any(line.startswith("round   9/9") for text in lines for line in text.split("\n"))
    for line in (folder / "rounds.jsonl").read_text().splitlines():
        json.loads(line)
    terminal, page = shown_everywhere(folder)
    assert "\x1b" not in terminal and "\x9b" not in terminal
    assert "<script>alert" not in page and "<img src=x" not in page
    assert "\u202e" not in page + terminal


def test_flowers_own_error_is_text_too(hostile):
    def spoil(message, reply):
        return Message(Error(7, FORGED + "\x1b[2J"), reply_to=message)

    folder, lines = hostile(spoil)
    [failure] = failures_of(folder)
    assert failure["reason"].startswith(r"ill\nround")


def test_a_hundred_megabytes_of_reason_cost_a_line(hostile):
    endless = "x" * 10**8
    folder, lines = hostile(failing_with(endless))
    [failure] = failures_of(folder)
    assert failure["reason"].endswith("xx…") and len(failure["reason"]) == 200
    assert (folder / "rounds.jsonl").stat().st_size < 20_000
    assert (folder / "last.safetensors").stat().st_size < 50_000
    assert max(map(len, lines)) < 2000


@pytest.mark.parametrize("name", ["name", "bytes_up", "round", "failures", "seconds"])
def test_a_metric_may_have_the_name_of_anything_of_ours(hostile, name):
    def spoil(message, reply):
        content = dict(reply.content)
        content["metrics"] = MetricRecord({**content["metrics"], name: 7.0})
        return Message(RecordDict(content), reply_to=message)

    folder, _ = hostile(spoil)
    assert failures_of(folder) == []
    shown_everywhere(folder)


def through_a_station(monkeypatch, spoil):
    """Let station 0 answer as told, whatever its clients say."""
    honest = stations.LocalStationsGrid._work

    def work(self, message):
        reply = honest(self, message)
        return spoil(message, reply) if message.metadata.dst_node_id == 0 else reply

    monkeypatch.setattr(stations.LocalStationsGrid, "_work", work)


def test_many_long_failures_of_a_station_do_not_end_the_run(tmp_path, monkeypatch):
    """110 MB of reasons made the checkpoint unwritable."""

    def spoil(message, reply):
        content = dict(reply.content)
        content["failures"] = ConfigRecord(
            {"nodes": ["client"] * 1100, "reasons": ["x\x1b" * 50_000] * 1100}
        )
        return Message(RecordDict(content), reply_to=message)

    through_a_station(monkeypatch, spoil)
    folder = run_small(tmp_path, rounds=1, station_rounds=1)
    assert (folder / "last.safetensors").stat().st_size < 100_000
    for failure in failures_of(folder):
        assert len(failure["reason"]) <= 200 and failure["reason"].isprintable()
        assert failure["node"].startswith("station 0")


def test_names_and_failures_of_a_station_are_text(tmp_path, monkeypatch):
    def spoil(message, reply):
        content = dict(reply.content)
        content["failures"] = ConfigRecord(
            {"nodes": [kind + SAID[kind] for kind in SAID], "reasons": list(SAID.values())}
        )
        content["metrics"] = MetricRecord({**content["metrics"], "name": 3, "bytes_up": 1})
        return Message(RecordDict(content), reply_to=message)

    through_a_station(monkeypatch, spoil)
    folder = run_small(tmp_path, rounds=1, station_rounds=1)
    [record] = lines_of(folder)
    assert record["stations"]["answered"] == 2
    assert [s["name"] for s in record["per_station"]] == ["station 0", "station 1"]
    assert all(f["node"].isprintable() and f["reason"].isprintable() for f in record["failures"])
    terminal, page = shown_everywhere(folder)
    assert "\x1b" not in terminal and "<script>alert" not in page


def test_what_is_on_the_disk_does_no_harm_either(tmp_path, capsys):
    """A results folder from elsewhere never passed our checks."""
    folder, other = run_small(tmp_path), run_small(tmp_path, "other", lr=0.1)
    lines = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    for line in lines:
        line["failures"] = [{"node": text, "reason": text * 1000} for text in SAID.values()]
        line["per_station"][0]["name"] = SAID["escape sequences"]
        line["source"]["domains"] = {
            text: {"accuracy": 0.5, "examples": 3} for text in SAID.values()
        }
        line["unseen"]["domain"] = SAID["a script"] + SAID["mathematics"]
        line["kept"] = FORGED + SAID["escape sequences"]
    (folder / "rounds.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    config = json.loads((folder / "config.json").read_text())
    config["settings"]["server-rule"] = SAID["markup of rich"] + SAID["escape sequences"]
    config["settings"]["model"] = SAID["a script"]
    (folder / "config.json").write_text(json.dumps(config))
    terminal, page = shown_everywhere(folder)
    _show(describe([read_run(folder), read_run(other)]))
    terminal += capsys.readouterr().out
    for harm in ("\x1b", "\x9b", "\u202e", "\x07"):
        assert harm not in terminal and harm not in page
    assert "<script>alert" not in page and "<img src=x" not in page
    assert not any(line.startswith("round   9/9") for line in terminal.splitlines())


def test_reading_a_hostile_reply_takes_little_memory(hostile):
    def spoil(message, reply):
        content = dict(reply.content)
        content["metrics"] = MetricRecord({f"m{n}": 1.0 for n in range(200_000)})
        return Message(RecordDict(content), reply_to=message)

    folder, _ = hostile(spoil)
    assert "larger than the" in failures_of(folder)[0]["reason"]
