"""Log lines as JSON, under one run id."""

import json
import logging

import pytest
from flwr.app import ConfigRecord, Context, Message, RecordDict
from helpers import run_small

from hfedatm.base import logs
from hfedatm.base.answering import failure
from hfedatm.base.noting import noted
from hfedatm.flower_internals import identify_process


@pytest.fixture
def lines(monkeypatch, capsys):
    """Return what is logged as JSON; all loggers are as before afterwards."""
    loggers = [
        logging.getLogger(name)
        for name in ("", "hfedatm", "flwr", "uvicorn.error", "uvicorn.access")
    ]
    before = [(logger, logger.handlers[:], logger.propagate, logger.level) for logger in loggers]
    monkeypatch.setenv(logs.VARIABLE, "json")
    monkeypatch.setenv(logs.PROCESS, "station-1-node")
    logs.configure()
    yield lambda: [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    logs.about("")
    for logger, handlers, propagate, level in before:
        logger.handlers[:], logger.propagate = handlers, propagate
        logger.setLevel(level)


def test_every_logger_writes_one_object_per_line(lines):
    logs.about("run-7")
    logging.getLogger("flwr").info("hello\n%s", "world")
    logging.getLogger("flwr").debug("too much")
    logging.getLogger("flwr").info("")
    logging.getLogger("uvicorn.access").info("a node asks for work")
    logging.getLogger("uvicorn.error").warning("refused")
    try:
        raise ValueError("wrong")
    except ValueError:
        logging.getLogger("hfedatm").exception("it failed")
    flwr, gateway, own = found = lines()
    assert (flwr["logger"], flwr["message"], flwr["level"]) == ("flwr", "hello\nworld", "info")
    assert {line["run"] for line in found} == {"run-7"}
    assert {line["process"] for line in found} == {"station-1-node"}
    assert gateway["level"] == "warning"
    assert own["message"] == "it failed" and own["error"].endswith("ValueError: wrong")


def test_lines_stay_as_they_are_unless_json_is_wanted(monkeypatch):
    monkeypatch.delenv(logs.VARIABLE, raising=False)
    handlers = logging.getLogger("flwr").handlers[:]
    logs.configure()
    assert logging.getLogger("flwr").handlers == handlers


@pytest.mark.parametrize(
    ("reply", "said"),
    [(RecordDict(), "done in"), (failure(ValueError("no disk")), "failed: ValueError: no disk")],
)
def test_a_task_is_noted_with_its_run_and_outcome(lines, reply, said):
    identify_process()
    task = ConfigRecord({"run": "run-9", "kind": "train", "round": 3})
    message = Message(RecordDict({"task": task}), 5, "train")
    context = Context(1, 5, {}, RecordDict(), {})
    noted(message, context, lambda asked, _: Message(reply, reply_to=asked))
    begun, ended = lines()
    assert begun["run"] == ended["run"] == "run-9"
    assert begun["message"] == "train of round 3: begun"
    assert ended["message"].startswith(f"train of round 3: {said}")


def test_all_tiers_of_a_run_write_the_same_id(lines, tmp_path):
    folder = run_small(tmp_path, rounds=1)
    said = lines()
    tasks = [line for line in said if line["logger"] == "hfedatm.tasks"]
    rounds = [line for line in said if "unseen" in line["message"] and "run" in line]
    assert tasks and rounds, said
    assert len({line["run"] for line in tasks + rounds}) == 1
    run = json.loads((folder / "config.json").read_text())
    assert rounds[0]["run"] in json.dumps(run)
