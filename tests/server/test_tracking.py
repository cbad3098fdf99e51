"""Trackers: they get the numbers, and none of them can end a run."""

import os
import sys

import pytest
from helpers import a_record, log_lines, run_small, small_settings

from hfedatm.base.errors import UserError
from hfedatm.runs import read_run
from server_app.tracking import Tracker, check_trackers, open_trackers, scalars

NOTED: list[tuple[str, int | None, dict[str, float]]] = []


class Notebook(Tracker):
    """A tracker of one's own."""

    def __init__(self, settings, folder, done=0):
        NOTED.append(("start", done, {"seed": settings.seed}))

    def log(self, step, values):
        NOTED.append(("round", step, dict(values)))

    def finish(self, values):
        NOTED.append(("end", None, dict(values)))


class Failing(Notebook):
    """One whose server is gone."""

    def log(self, step, values):
        raise ConnectionError("no route to the tracker")


@pytest.fixture(autouse=True)
def _importable(monkeypatch):
    NOTED.clear()
    monkeypatch.setitem(sys.modules, "my_trackers", sys.modules[__name__])


def test_an_own_tracker_gets_every_round(tmp_path):
    folder = run_small(tmp_path, track="my_trackers:Notebook")
    assert [(kind, step) for kind, step, _ in NOTED] == [
        ("start", 0),
        ("round", 1),
        ("round", 2),
        ("end", None),
    ]
    rounds = read_run(folder).rounds
    for record, (_, _, values) in zip(rounds, NOTED[1:3], strict=True):
        assert values["unseen/accuracy"] == record.unseen_accuracy
        assert values["source/domains/a/accuracy"] == record.source.domains["a"].accuracy


def test_a_tracker_that_fails_is_dropped_and_the_run_goes_on(tmp_path):
    with log_lines() as lines:
        folder = run_small(tmp_path, track="my_trackers:Failing, my_trackers:Notebook")
    assert len(read_run(folder).rounds) == 2
    assert sum("no route to the tracker" in line for line in lines) == 1
    assert [kind for kind, _, _ in NOTED].count("end") == 1  # the other one was closed


def test_tensorboard_has_the_curve(tmp_path):
    pytest.importorskip("tensorboard", reason="install hfedatm[tensorboard]")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = run_small(tmp_path, track="tensorboard")
    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    curve = [(event.step, event.value) for event in events.Scalars("unseen/accuracy")]
    assert len(curve) == 2
    assert curve == [
        (record.round, pytest.approx(record.unseen_accuracy)) for record in read_run(folder).rounds
    ]


def test_mlflow_has_the_curve(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow", reason="install hfedatm[mlflow]")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    folder = run_small(tmp_path, track="mlflow")
    run = (folder / "mlflow-run").read_text()
    history = mlflow.MlflowClient().get_metric_history(run, "unseen/accuracy")
    assert len(history) == 2
    shown = read_run(folder).curve(lambda r: r.unseen_accuracy)
    assert [(m.step, m.value) for m in history] == shown


def test_wandb_writes_offline(tmp_path, monkeypatch):
    pytest.importorskip("wandb", reason="install hfedatm[wandb]")
    monkeypatch.setenv("WANDB_MODE", "offline")
    folder = run_small(tmp_path, track="wandb")
    assert list((folder / "wandb").glob("offline-run-*/*.wandb"))


@pytest.mark.parametrize("name", ["mlflow", "wandb", "tensorboard"])
def test_what_is_not_installed_is_said_before_round_1(name, monkeypatch, tmp_path):
    monkeypatch.setattr("hfedatm.contracts.tracker.find_spec", lambda package: None)
    with pytest.raises(UserError, match=rf"pip install 'hfedatm\[{name}\]'"):
        run_small(tmp_path, track=name)
    assert not os.listdir(tmp_path)


def test_an_unknown_tracker_is_refused_with_those_there_are():
    with pytest.raises(UserError, match="mlflow, tensorboard, wandb"):
        check_trackers(small_settings(track="comet"))


def test_no_tracker_is_the_default(tmp_path):
    open_trackers(small_settings(), tmp_path).log(a_record())
    assert not os.listdir(tmp_path)


def test_only_numbers_are_sent():
    record = {"round": 1, "kept": "text", "failures": [{}, {}], "a": {"b": 0.5, "ok": True}}
    assert dict(scalars(record)) == {"round": 1.0, "failures": 2.0, "a/b": 0.5}
