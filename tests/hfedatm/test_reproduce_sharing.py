"""Cells that share the work of their clients give what separate runs give, bit for bit."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from flwr.app import ArrayRecord, Message, RecordDict
from helpers import SMALL
from rich.console import Console
from safetensors.torch import load_file

from client_app.app import app
from hfedatm.base.records import Task
from hfedatm.base.resolving import resolve
from hfedatm.reproduce import runner, sharing
from hfedatm.reproduce.cells import Cell, Store
from hfedatm.reproduce.sharing import SharedWork, can_share, trajectory
from hfedatm.runtime.local import run_locally

NO_REPEAT = ("seconds", "train_seconds", "merge_seconds", "gram_seconds")
TRAININGS = 2 * 2 * 2 * 2  # stations, clients, rounds, station rounds

ROWS: dict[str, dict[str, Any]] = {
    "Avg": {"server-rule": "avg"},
    "HFedATM": {},
    "w/o RegMean": {"server-rule": "hfedatm-no-regmean"},
    "beta": {"rule-params": "beta=1.5", "alpha": 0.25, "regmean-weights": "examples"},
    "other Grams": {"regmean-conv": True, "regmean-bias": "exact", "gram-dtype": "float16"},
    "at the station": {"gram-model": "station"},
    "the paper's loop": {"broadcast": "merged"},
}


def plain(result: dict[str, Any]) -> dict[str, Any]:
    """Return a result without what no two runs have in common."""
    rounds = [{k: v for k, v in r.items() if k not in NO_REPEAT} for r in result["rounds"]]
    return {k: v for k, v in result.items() if k != "reused"} | {"rounds": rounds}


class Counted:
    """Clients that count what they do."""

    def __init__(self) -> None:
        self.done: Counter[str] = Counter()

    def __call__(self, message, context):
        self.done[Task.from_record(message.content["task"]).kind] += 1
        return app(message, context)


@pytest.fixture
def counted(monkeypatch) -> Counted:
    found = Counted()
    monkeypatch.setattr("client_app.app.app", found)
    return found


def results(folder: Path, rows: dict[str, Any], shared: bool, **given: Any) -> dict[str, Any]:
    store = Store.of("table", folder)
    where = folder / "unfinished" / "shared" if shared else None
    return {
        row: store.run(Cell.of({**SMALL, **changes, **given}), where)
        for row, changes in rows.items()
    }


def test_every_row_has_the_result_of_a_run_by_itself_and_clients_train_once(tmp_path, counted):
    together = results(tmp_path / "together", ROWS, shared=True)
    trained = counted.done["train"]
    alone = results(tmp_path / "alone", ROWS, shared=False)
    for row in ROWS:
        assert plain(together[row]) == plain(alone[row]), row
    assert together["HFedATM"]["best_by_source"]["source_accuracy"] is not None
    losses = {result["rounds"][-1]["unseen"]["loss"] for result in together.values()}
    assert len(losses) >= 5  # the rows are not all alike
    # The paper's loop shares round 1 and trains round 2 by itself.
    assert trained == TRAININGS + TRAININGS // 2
    assert "reused" not in together["Avg"] and "reused" not in alone["HFedATM"]
    assert together["HFedATM"]["reused"] == TRAININGS
    assert together["the paper's loop"]["reused"] == TRAININGS // 2


@pytest.mark.parametrize("method", ["fedsr", "fediir"])
def test_methods_that_remember_or_share_arrays_are_the_same_too(tmp_path, method, counted):
    rows = {row: ROWS[row] for row in ("Avg", "beta")}
    given = {"client-method": method, "bound-factor": 0}
    together = results(tmp_path / "together", rows, shared=True, **given)
    assert counted.done["train"] == TRAININGS
    alone = results(tmp_path / "alone", rows, shared=False, **given)
    assert {row: plain(r) for row, r in together.items()} == {
        row: plain(r) for row, r in alone.items()
    }


def test_the_models_are_the_same_to_the_last_bit(tmp_path):
    for row in ("avg", "hfedatm"):
        given = {**SMALL, "server-rule": row, "run-name": row}
        clients = SharedWork(app, tmp_path / "shared")
        run_locally({**given, "output": str(tmp_path / "together")}, clients)
        run_locally({**given, "output": str(tmp_path / "alone")})
    assert clients.reused == TRAININGS
    for file in ("last.safetensors", "best.safetensors"):
        one, other = (
            load_file(tmp_path / which / "hfedatm" / file) for which in ("together", "alone")
        )
        assert all((one[name] == other[name]).all() for name in one | other)


def test_a_message_without_the_model_is_left_to_the_client(tmp_path):
    asked = []
    clients = SharedWork(lambda message, context: asked.append(message), tmp_path)
    task = Task("evaluate", resolve(SMALL), round=1).to_record()
    clients(Message(RecordDict({"task": task, "changes": ArrayRecord()}), 1, "evaluate"), None)
    assert len(asked) == 1 and not any(tmp_path.iterdir())


def test_a_full_disk_costs_time_and_no_result(tmp_path, counted, monkeypatch):
    monkeypatch.setattr(sharing, "MOST_BYTES", 10_000)
    rows = {row: ROWS[row] for row in ("Avg", "HFedATM")}
    together = results(tmp_path / "together", rows, shared=True)
    assert TRAININGS < counted.done["train"] < 2 * TRAININGS
    alone = results(tmp_path / "alone", rows, shared=False)
    assert plain(together["HFedATM"]) == plain(alone["HFedATM"])


@pytest.mark.parametrize(
    "given",
    [
        {"server-rule": "mtgc"},
        {"server-rule": "fedrc"},
        {"secure-aggregation": True},
        {"privacy.mechanism": "example", "privacy.epsilon": 1.0},
        {"train-fn": "helpers:own_training"},
    ],
    ids=lambda given: next(iter(given)),
)
def test_what_no_other_row_may_have_is_not_shared(given):
    assert can_share(resolve(SMALL))
    assert not can_share(resolve({**SMALL, **given}))


@pytest.mark.parametrize(
    "given",
    [{"lr": 0.5}, {"seed": 1}, {"lambda": 1.0}, {"rounds": 3}, {"client-method": "fedsr"}],
    ids=lambda given: next(iter(given)),
)
def test_rows_that_train_otherwise_are_not_in_one_group(given):
    assert trajectory(resolve(SMALL)) != trajectory(resolve({**SMALL, **given}))
    assert trajectory(resolve(SMALL)) == trajectory(resolve({**SMALL, "server-rule": "avg"}))


def test_a_table_runs_its_groups_and_leaves_no_shared_work_behind(tmp_path):
    store = Store.of("table", tmp_path)
    rows = [{}, {"server-rule": "avg"}, {"server-rule": "mtgc"}, {"target-domain": "nowhere"}]
    cells = [Cell.of({**SMALL, "rounds": 1, **row}) for row in rows]
    outcome = runner.run_cells(cells, store, 1, Console(quiet=True))
    assert list(outcome.failed) == [cells[3]]
    found = store.finished(cells)
    assert found.keys() == set(cells[:3])
    assert [found[cell].get("reused", 0) for cell in cells[:3]] == [0, TRAININGS // 2, 0]
    assert not list(store.work.glob("shared-*"))


def test_seconds_are_never_those_of_a_cell_that_shared(tmp_path):
    store = Store.of("table", tmp_path)
    cell = Cell.of({**SMALL, "rounds": 1})
    for _ in range(2):
        shared = store.run(cell, tmp_path / "shared")
        store.file.unlink()
    assert shared["reused"]
    store.run(cell, tmp_path / "shared")
    timed = Store.of("latency", tmp_path, timed=True)
    assert cell in store.finished([cell]) and cell not in timed.finished([cell])
    assert len(runner._groups([cell, Cell.of({**SMALL, "server-rule": "avg"})], timed)) == 2
