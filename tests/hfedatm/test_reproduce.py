"""hfedatm reproduce: cells, statistics, tables, and stopping in between."""

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from rich.console import Console
from typer.testing import CliRunner

from hfedatm.base.building import build_rule, measures_all
from hfedatm.base.errors import UserError
from hfedatm.base.resolving import resolve
from hfedatm.cli.main import typer_app
from hfedatm.reproduce import runner, tables
from hfedatm.reproduce.cells import Cell, Store
from hfedatm.reproduce.results import overhead, panels, paper_values, per_round
from hfedatm.reproduce.runfile import append_run
from hfedatm.reproduce.statistics import estimate, paired_p, significant
from hfedatm.reproduce.typeset import entry_text, latex, markdown, picture
from hfedatm_core.data.partition import heterogeneous_partition

TINY = {
    "stations": 2,
    "clients-per-station": 1,
    "rounds": 1,
    "station-rounds": 1,
    "local-epochs": 1,
    "batch-size": 64,
}


def ablation(seeds=(0,), targets=("45",), **given) -> tables.Table:
    return tables.make("ablation", "digits", {**TINY, **given}, seeds, [0.0], list(targets))


def finished(store: Store, cell: Cell, unseen: float, best: float | None = None) -> None:
    """Put a made-up result where a run would put its own."""
    record = {
        "round": 1, "seconds": 4.0, "gram_seconds": 0.5, "merge_seconds": 0.5,
        "bytes_up": {"clients": 2000, "stations": 1000},
    }  # fmt: skip
    append_run(store.file, {
        "key": cell.key,
        "settings": cell.settings,
        "last": {"unseen_accuracy": unseen},
        "best_by_source": {"unseen_accuracy": unseen if best is None else best},
        "rounds": [record, {**record, "round": 2, "seconds": 6.0}],
    })  # fmt: skip


@pytest.fixture
def store(tmp_path) -> Store:
    return Store.of("ablation-digits", tmp_path)


# --- cells


def test_a_key_depends_on_what_is_computed_and_not_on_where():
    here = Cell.of({**TINY, "data-dir": "/one", "output": "a", "threads": 1})
    there = Cell.of({**TINY, "data-dir": "/two", "output": "b", "threads": 2})
    assert here.key == there.key
    assert "data-dir" not in here.settings
    assert Cell.of({**TINY, "seed": 1}).key != here.key


def test_a_preset_and_its_settings_spelt_out_are_the_same_cell():
    assert Cell.of({"preset": "demo"}).key == Cell.of({"dataset": "digits", "lr": 0.05}).key


def test_a_cell_made_under_other_defaults_does_not_count(store):
    cell = Cell.of(TINY)
    finished(store, cell, 0.5)
    assert cell in store.finished([cell])
    store.file.write_text(store.file.read_text().replace('"alpha":0.75', '"alpha":0.5'))
    assert store.finished([cell]) == {}
    finished(store, cell, 0.25)  # run again, it stands beside the old one
    assert store.finished([cell])[cell]["last"]["unseen_accuracy"] == 0.25


def test_a_setting_that_did_not_exist_yet_does_not_make_a_cell_run_again(store):
    cell = Cell.of(TINY)
    finished(store, cell, 0.5)
    result = json.loads(store.file.read_text())
    del result["settings"]["station-start"]
    store.file.write_text(json.dumps(result) + "\n")
    assert cell in store.finished([cell])


def test_a_cell_that_another_table_has_run_is_not_run_again(store, tmp_path):
    cell = Cell.of(TINY)
    finished(store, cell, 0.5)
    assert cell in Store.of("hfl-digits", tmp_path).finished([cell])


def test_two_rows_with_the_same_settings_share_a_cell(store):
    named, spelt = Cell.of({"preset": "demo"}), Cell.of({"dataset": "digits"})
    finished(store, named, 0.5)
    assert store.finished([named, spelt]).keys() == {named, spelt}


# --- running, stopping, going on


def test_finished_cells_are_never_run_again(store):
    made = ablation()
    for cell in made.cells()[1:]:
        finished(store, cell, 0.5)
    outcome = runner.run_cells(made.cells(), store, 1, Console(quiet=True))
    assert (outcome.finished, outcome.failed) == (1, {})
    assert made.cells()[0] in store.finished(made.cells())
    assert not any(store.work.iterdir())
    assert runner.run_cells(made.cells(), store, 1, Console(quiet=True)).finished == 0


def test_a_cell_that_another_process_finished_meanwhile_is_not_run_again(store, monkeypatch):
    cell = Cell.of(TINY)
    finished(store, cell, 0.5)
    monkeypatch.setattr("hfedatm.runtime.local.run_locally", None)  # running it would raise
    assert store.run(cell)["last"]["unseen_accuracy"] == 0.5
    assert not any(store.work.iterdir())


def test_a_result_holds_no_path_of_this_machine_and_what_plots_need(store, tmp_path):
    cell = Cell.of({**TINY, "server-rule": "avg", "data-dir": str(tmp_path / "nowhere")})
    store.run(cell)
    text = store.file.read_text()
    (record,) = json.loads(text)["rounds"]
    assert record["unseen"]["accuracy"] >= 0
    assert record["source"].keys() == {"accuracy", "loss"}
    assert str(tmp_path) not in text
    assert os.path.expanduser("~") not in text


def test_a_cell_that_fails_is_named_and_the_others_go_on(store):
    good = Cell.of({**TINY, "server-rule": "avg"})
    bad = Cell.of({**TINY, "target-domain": "90"})
    outcome = runner.run_cells([bad, good], store, 1, Console(quiet=True))
    assert list(outcome.failed) == [bad]
    assert "target-domain" in outcome.failed[bad]
    assert store.finished([good, bad]).keys() == {good}


@pytest.mark.slow
def test_a_killed_table_goes_on_from_the_last_round_of_its_unfinished_cell(tmp_path):
    words = [f"{k}={v}" for k, v in {**TINY, "rounds": 30}.items()]
    command = [
        sys.executable, "-c", "from hfedatm.cli.main import app; app()", "reproduce", "ablation",
        "--seeds", "0", "--lambdas", "0", "--targets", "45", "--output", str(tmp_path), *words,
    ]  # fmt: skip
    process = subprocess.Popen(command, start_new_session=True, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 300
    try:
        while not (rounds := list(tmp_path.glob("unfinished/*/run/rounds.jsonl"))):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.1)
        family = psutil.Process(process.pid).children(recursive=True)
        process.kill()  # only the command itself; those who work for it end with it
        assert family and not psutil.wait_procs(family, timeout=120)[1]
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    done = len(rounds[0].read_text().splitlines())
    cell = next(c for c in tables.make(
        "ablation", "digits", {**TINY, "rounds": 30}, [0], [0.0], ["45"]
    ).cells() if c.key == rounds[0].parts[-3])  # fmt: skip
    log = rounds[0].parents[1] / "log"
    stopped = log.read_text()
    saved = tmp_path / "log"
    os.link(log, saved)
    result = Store.of("ablation-digits", tmp_path).run(cell)
    again = saved.read_text().removeprefix(stopped)
    assert 1 <= done < 30
    assert "resuming after round" in again
    assert [record["round"] for record in result["rounds"]] == list(range(1, 31))


# --- statistics


def test_standard_error():
    found = estimate([1.0, 2.0, 3.0])
    assert found.mean == 2.0
    assert found.error == pytest.approx(1 / math.sqrt(3))
    assert estimate([4.0]).error is None
    assert estimate([]) is None


def test_paired_test_needs_three_pairs_that_differ():
    assert paired_p([1.0, 2.0], [0.0, 1.1]) is None
    assert paired_p([1.0, 2.0, 3.0], [0.0, 1.0, 2.0]) is None
    assert paired_p([1.0, 2.1, 3.2, 4.0], [0.0, 1.0, 2.0, 3.1]) < 0.01


def test_holm_is_stricter_the_more_is_tested():
    assert significant({"a": 0.04}) == {"a"}
    assert significant({"a": 0.04, "b": 0.5}) == set()
    assert significant({"a": 0.001, "b": 0.04, "c": None}) == {"a", "b"}
    assert significant({"a": 0.001, "b": 0.03, "c": 0.04}) == {"a"}


# --- tables


@pytest.mark.parametrize("name", tables.TABLES)
def test_every_table_is_made_of_valid_settings(name):
    made = tables.make(name, "digits", {}, [0, 1])
    cells = made.cells()
    assert len({cell.key for cell in cells}) == len(cells)
    expected = len(made.rows) * sum(map(len, made.columns.values())) * 2
    assert len(cells) == expected


def test_flat_fedavg_trains_the_same_clients_for_as_many_epochs():
    made = tables.make("hfl", "digits", {}, [0])
    tree = made.cell("HierFAVG (Avg)", "λ = 0", "45", 0).settings
    flat = made.cell("FedAvg (no stations)", "λ = 0", "45", 0).settings
    assert flat["stations"] == 1
    assert flat["clients-per-station"] == tree["stations"] * tree["clients-per-station"]
    assert flat["rounds"] == tree["rounds"] * tree["station-rounds"]
    assert flat["local-epochs"] == tree["local-epochs"]


def test_a_row_is_compared_with_the_same_method_under_avg_or_with_the_first():
    made = tables.make("main", "digits", {}, [0])
    assert made.baseline("FedSR + HFedATM") == "FedSR + Avg"
    assert made.baseline("FedSR + Avg") == "FedSR + Avg"
    assert ablation().baseline("HFedATM") == "Avg"


def test_unknown_names_are_refused_with_what_there_is():
    with pytest.raises(UserError, match="ablation"):
        tables.make("ablaton", "digits", {}, [0])
    with pytest.raises(UserError, match="pacs"):
        tables.make("ablation", "packs", {}, [0])
    with pytest.raises(UserError, match="dataset"):
        tables.make("ablation", "pacs", {"preset": "demo"}, [0])
    with pytest.raises(UserError, match="w/o RegMean"):
        tables.make("ablation", "digits", {}, [0], only=["HFedATN"])


def test_gperxan_is_in_the_main_table_with_a_network_that_it_can_take():
    rows = tables.make("main", "digits", {}, seeds=[0]).rows
    assert rows["gPerXAN, BatchNorm + HFedATM"]["model-params"] == "batch_norm=true"
    given = {"preset": "pacs-vgg11", "model-params": "small_input=true"}
    rows = tables.make("main", "pacs", given, seeds=[0]).rows
    assert rows["gPerXAN, BatchNorm + Avg"]["model-params"] == "small_input=true,batch_norm=true"
    text = tables.make("main", "amazon-features", {}, seeds=[0]).rows
    assert not any("gPerXAN" in row for row in text)  # a network without images has none


def test_rows_can_be_chosen_and_their_cells_stay_the_same():
    some = tables.make("ablation", "digits", {}, [0], only=["HFedATM", "Avg"])
    assert list(some.rows) == ["Avg", "HFedATM"]
    assert set(some.cells()) < set(tables.make("ablation", "digits", {}, [0]).cells())


@pytest.fixture
def table(store):
    """An ablation of two targets and four seeds in which HFedATM is about 10 points better."""
    made = ablation(seeds=(0, 1, 2, 3), targets=("0", "45"))
    for number, row in enumerate(made.rows):
        for target in ("0", "45"):
            for seed in made.seeds:
                value = 0.5 + 0.01 * seed + (0.1 + 0.002 * seed) * (row == "HFedATM")
                cell = made.cell(row, "λ = 0", target, seed)
                finished(store, cell, value + 0.001 * number * (target == "0"), value / 2)
    return made


def test_table_shows_mean_error_significance_and_both_selections(table, store):
    last, best = panels(table, store)
    entry = last.rows["HFedATM"]["λ = 0", "45"]
    assert entry.estimate.mean == pytest.approx(100 * (0.5 + 0.015 + 0.1 + 0.003))
    assert entry.marked
    assert not last.rows["Avg"]["λ = 0", "45"].marked
    assert best.rows["Avg"]["λ = 0", "45"].estimate.mean == pytest.approx(100 * 0.515 / 2)
    text = markdown(table, [last, best], "hfedatm reproduce ablation", tables.conditions(table))
    assert "source validation" in text and "| HFedATM |" in text and "mean" in text
    assert "61.8 ± 0.8*" in text


def test_missing_cells_leave_a_dash_and_the_rest_stands(table, store):
    lost = {table.cell("HFedATM", "λ = 0", "45", seed).key for seed in table.seeds}
    lines = store.file.read_text().splitlines(keepends=True)
    store.file.write_text("".join(x for x in lines if json.loads(x)["key"] not in lost))
    row = panels(table, store)[0].rows["HFedATM"]
    assert entry_text(row["λ = 0", "45"]) == "–"
    assert entry_text(row["λ = 0", "mean"]) == "–"
    assert row["λ = 0", "0"].estimate.count == 4


def test_published_figures_stand_beside_ours_only_where_they_are_known(table, store, tmp_path):
    file = tmp_path / "paper.yaml"
    file.write_text("ablation: {digits: {HFedATM: {'λ = 0': {'45': 60.0}}}}")
    paper = paper_values(file, table, "digits")
    rows = panels(table, store, paper)[0].rows
    assert entry_text(rows["HFedATM"]["λ = 0", "45"]) == "61.8 ± 0.8* (paper 60.0, +1.8)"
    assert "paper" not in entry_text(rows["Avg"]["λ = 0", "45"])
    assert paper_values(tmp_path / "absent.yaml", table, "digits") == {}
    assert rows["HFedATM"]["λ = 0", "mean"].paper is None  # only one of the two targets is known
    both = {"HFedATM": {"λ = 0": {"45": 60.0, "0": 50.0}}}
    assert panels(table, store, both)[0].rows["HFedATM"]["λ = 0", "mean"].paper == 55.0


def test_latex_and_picture(table, store, tmp_path):
    found = panels(table, store)
    text = latex(table, found)
    assert text.count(r"\begin{tabular}") == 2
    assert r"61.8 $\pm$ 0.8*" in text
    assert "λ" not in text.replace("% ", "")
    picture(table, found[0], tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_measures_of_time_and_bytes(table, store):
    cell = store.finished(table.cells())[table.cells()[0]]
    assert per_round("seconds")(cell) == 5.0
    assert per_round("bytes_up", "clients", scale=1e-3)(cell) == 2.0
    assert per_round("absent")(cell) is None
    assert overhead(cell) == pytest.approx(100 * 2 / 8)


# --- the command


def test_command_prints_and_writes_what_the_finished_cells_give(table, tmp_path):
    words = [f"{k}={v}" for k, v in TINY.items()]
    result = CliRunner().invoke(typer_app, [
        "reproduce", "ablation", "--print", "--seeds", "0,1,2,3", "--lambdas", "0",
        "--targets", "0,45", "--output", str(tmp_path), *words,
    ])  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "61.8 ± 0.8*" in result.output
    for suffix in (".md", ".tex", ".png"):
        assert Path(tmp_path / f"ablation-digits{suffix}").is_file()


def test_a_table_may_have_a_name_of_its_own(table, tmp_path):
    words = ["reproduce", "ablation", "--print", *(f"{k}={v}" for k, v in TINY.items())]
    words += ["train-only=fc3", "--output", str(tmp_path / "named"), "--name"]
    result = CliRunner().invoke(typer_app, [*words, "v1.5-part"])
    assert result.exit_code == 0, result.output
    found = {path.name for path in (tmp_path / "named").iterdir()}
    assert found == {"v1.5-part.md", "v1.5-part.tex", "v1.5-part.png"}
    assert "lenet5 (trained: fc3; the rest is frozen)" in result.output
    refused = CliRunner().invoke(typer_app, [*words, "../other"])
    assert isinstance(refused.exception, UserError) and "--name" in str(refused.exception)


def test_data_that_is_not_there_is_said_once_before_any_run(tmp_path, capsys):
    cells = tables.make("ablation", "pacs", {"data-dir": str(tmp_path)}, [0, 1], None, None).cells()
    with pytest.raises(UserError, match="^dataset: PACS") as caught:
        runner.run_cells(cells, Store.of("ablation-pacs", tmp_path / "out"), 1, Console())
    assert str(caught.value).count("PACS is not") == 1
    assert "FAILED" not in capsys.readouterr().out
    assert not (tmp_path / "out").exists()


def test_command_refuses_seeds_that_are_no_numbers():
    result = CliRunner().invoke(typer_app, ["reproduce", "ablation", "--seeds", "a"])
    assert isinstance(result.exception, UserError)


def test_the_rows_of_independent_say_by_which_grams_they_merge():
    table = tables.make("independent", "digits", {}, [0])
    full = set()
    for label, row in table.rows.items():
        settings = resolve({**table.base, **row})
        if build_rule(settings).needs_grams and measures_all(settings, 1):
            full.add(label)
            assert row["gram-layers"] == "all"
    assert full == {"HFedATM (Grams of all layers)"}


def test_a_run_with_the_former_name_of_a_default_still_counts(tmp_path):
    cell = Cell.of({"preset": "demo", "server-rule": "hfedatm"})
    store = Store.of("table", tmp_path)
    assert cell.settings["reference"] == "auto"
    for reference, counts in (("first", True), ("medoid", False)):
        store.file.unlink(missing_ok=True)
        settings = cell.settings | {"reference": reference}
        append_run(store.file, {"key": cell.key, "settings": settings})
        assert (cell in store.finished([cell])) == counts


# --- bounds


def test_bounds_are_rows_of_their_own_that_train_as_long_and_are_not_tested(store):
    made = tables.make("ablation", "digits", TINY, [0], [0.0], ["45"], bounds=True)
    assert made.all_rows[-2:] == ["Central training", "Best single station"]
    assert set(made.rows) == set(ablation().rows)
    (central,) = made.choices("Central training", "λ = 0", "45", 0)
    assert (central.settings["stations"], central.settings["clients-per-station"]) == (1, 1)
    stations = made.choices("Best single station", "λ = 0", "45", 0)
    assert len(stations) == TINY["stations"]
    assert {cell.settings["rule-params"] for cell in stations} == {"station=0", "station=1"}
    assert set(stations) | {central} < set(made.cells())


def test_central_training_runs_once_for_all_lambdas():
    made = tables.make("ablation", "digits", TINY, [0], [1.0, 0.0], ["45"], bounds=True)
    for row, number in (("Central training", 1), ("Best single station", 2 * TINY["stations"])):
        cells = {c for lam in ("λ = 1", "λ = 0") for c in made.choices(row, lam, "45", 0)}
        assert len(cells) == number


def test_one_client_has_the_same_examples_at_every_lambda():
    sizes = [7, 30, 11]
    for lam in (0.0, 0.1, 1.0):
        assert heterogeneous_partition(sizes, 1, lam).tolist() == [[7], [30], [11]]


def test_the_best_single_station_is_chosen_by_source_validation(store):
    made = tables.make("ablation", "digits", TINY, [0], [0.0], ["45"], bounds=True)
    one, other = made.choices("Best single station", "λ = 0", "45", 0)
    place = ("λ = 0", "45")

    def finish(cell: Cell, source: float, unseen: float) -> None:
        chosen = {"source_accuracy": source, "unseen_accuracy": unseen}
        append_run(store.file, {
            "key": cell.key, "settings": cell.settings, "rounds": [],
            "last": chosen, "best_by_source": chosen,
        })  # fmt: skip

    finish(one, source=0.5, unseen=0.9)
    assert panels(made, store)[0].rows["Best single station"][place].estimate is None
    finish(other, source=0.6, unseen=0.2)
    found = panels(made, store)[0].rows["Best single station"][place]
    assert found.estimate.mean == pytest.approx(20.0) and not found.marked
    text = markdown(made, panels(made, store), "hfedatm", tables.conditions(made))
    assert "chosen by source validation, are not tested" in text
