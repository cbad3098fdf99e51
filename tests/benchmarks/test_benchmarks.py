"""Every benchmark runs, at tiny sizes, and writes what the table needs."""

import copy
import gc
import importlib
import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from hfedatm_core import ChannelGraph
from hfedatm_core.data import DataSpec

FOLDER = Path(__file__).parents[2] / "benchmarks"
DIGITS = DataSpec("image", 10, (1, 28, 28))
DEPLOYED = ("deployment_overhead", "trust_cost")


@pytest.fixture(autouse=True)
def scripts(monkeypatch):
    """Let the scripts import each other as they do when they are run."""
    monkeypatch.syspath_prepend(str(FOLDER))


def script_names() -> list[str]:
    """Return the scripts that share the common command line."""
    return sorted(
        path.stem
        for path in FOLDER.glob("*.py")
        if "publish(__file__" in path.read_text(encoding="utf-8")
    )


def test_the_driver_knows_every_script():
    assert sorted(importlib.import_module("run_all").SCRIPTS) == script_names()


@pytest.mark.skipif(sys.platform != "linux", reason="peak memory is read from /proc")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.e2e if name in DEPLOYED else pytest.mark.slow)
        for name in script_names()
    ],
)
def test_a_script_writes_its_figures(name, tmp_path):
    importlib.import_module(name).main(["--smoke", "--output", str(tmp_path)])
    result = json.loads((tmp_path / f"{name}.json").read_text(encoding="utf-8"))
    assert result["smoke"] and result["threads"] == 1 and result["machine"]["cores"] >= 1
    assert result["figures"]
    for figure in result["figures"]:
        assert figure["name"] and figure["compared_with"] and math.isfinite(figure["value"])
        kept = figure["value"] >= figure["limit"] if figure["at_least"] else None
        kept = figure["value"] <= figure["limit"] if kept is None else kept
        assert figure["reached"] == kept


def test_a_pair_is_compared_in_turn(monkeypatch):
    measure, order, now = importlib.import_module("measure"), [], 100.0
    monkeypatch.setattr(measure.time, "process_time", lambda: now)
    frozen = gc.get_freeze_count()

    def job(name: str, *seconds: float):
        left = iter(seconds)

        def run() -> None:
            nonlocal now
            order.append(name)
            now += next(left)

        return run

    # The first of each is for warming up; 2, 4 and 3 times as long are compared.
    pair = measure.paired(job("a", 90, 4, 8, 6), job("b", 1, 2, 2, 2), repeats=3)
    assert order == ["a", "b"] * 4
    assert (pair["ratio"], pair["ours"], pair["theirs"]) == (3.0, 6.0, 2.0)
    assert gc.get_freeze_count() == frozen, "triton complains at exit of what is still frozen"


def fill(megabytes: int):
    """Return a job that needs this much."""
    return lambda: bytearray(b"x" * (megabytes * 10**6))


def test_the_peak_is_what_the_job_adds(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    measure = importlib.import_module("measure")
    prepare = importlib.import_module("test_benchmarks").fill
    small, large = (measure.peak_bytes(prepare, size) for size in (10, 100))
    assert 150e6 < large - small < 210e6  # the literal and its copy


def test_a_figure_that_is_no_number_is_not_published(tmp_path):
    measure = importlib.import_module("measure")
    chosen = measure.options("nothing", ["--output", str(tmp_path)])
    with pytest.raises(ValueError, match="is no figure"):
        measure.publish("x.py", [measure.Figure("x", math.nan, 1.0, "y")], chosen)
    assert not list(tmp_path.iterdir())


def test_the_table_goes_between_its_marks(tmp_path):
    run_all = importlib.import_module("run_all")
    page = tmp_path / "page.md"
    page.write_text(f"before\n{run_all.BEGIN}\nold\n{run_all.END}\nafter\n")
    run_all.write_page("new", page)
    assert page.read_text() == f"before\n{run_all.BEGIN}\nnew\n{run_all.END}\nafter\n"


@pytest.mark.slow
def test_poison_runs_and_shows_what_it_missed(tmp_path, capsys):
    poison = importlib.import_module("poison")
    poison.main(["--quick", "--folder", str(tmp_path), "--attacks", "sign flip", "NaN"])
    record = json.loads((tmp_path / "poison-digits.json").read_text(encoding="utf-8"))
    assert len(record["runs"]) == 2 * (1 + 2 + 2 * 2 + 1)  # one of the two also undefended
    by = {(r["tier"], r["defence"], r["attack"]): r for r in record["runs"]}
    for tier in poison.SHAPES:
        absent, refused = by[tier, "default", "absent"], by[tier, "default", "NaN"]
        assert (refused["unseen"], refused["source"]) == (absent["unseen"], absent["source"])
    last = ("station", "robust", "sign flip", 20)  # most of it was answered from memory
    given = {k: v for k, v in record["settings"].items() if k != "robust"}
    fresh, replayed = poison.run_one(last, given), by[last[:3]]
    assert (fresh["unseen"], fresh["source"]) == (replayed["unseen"], replayed["source"])
    for run in record["runs"]:
        if run["defence"] == "default" and run["attack"] == "sign flip":
            run["unseen"] -= 0.5
    text = poison.table(record)
    assert text.count("miss |") >= 2
    assert "sign flip by one client, default; " in text.split("Misses")[1]
    record["code"] = "another"
    (tmp_path / "poison-digits.json").write_text(json.dumps(record), encoding="utf-8")
    with pytest.raises(SystemExit, match="of other code; remove it"):
        poison.main(["--quick", "--folder", str(tmp_path)])


def test_merge_quality_compares_all_rows_and_shows_what_it_missed(tmp_path, capsys):
    quality = importlib.import_module("merge_quality")
    folder = tmp_path / "digits4"
    folder.mkdir()
    numbers = np.random.default_rng(0)
    for domain in ("mnist", "mnistm", "usps"):
        images = numbers.integers(0, 256, (80, 12, 12), dtype=np.uint8)
        parts = {"x_train": images[:60], "x_test": images[60:]}
        labels = {"y_train": np.arange(60) % 10, "y_test": np.arange(20) % 10}
        np.savez(folder / f"digits_{domain}.npz", **parts, **labels)
    given = ["--data-dir", str(tmp_path), "--cache", str(tmp_path), "--output", str(tmp_path)]
    given += ["--architectures", "vgg-bn", "--seeds", "0", "--epochs", "1"]
    quality.main(given)
    record = json.loads((tmp_path / "merge_quality.json").read_text(encoding="utf-8"))
    assert [entry["task"] for entry in record["sets"]] == ["digits-data", "digits-domains"]
    for entry in record["sets"]:
        assert all(0 <= value <= 100 for value in entry["rows"].values())
    rows = dict.fromkeys(record["sets"][0]["rows"], 50.0)
    worse = {"task": "digits-data", "networks": 3, "architecture": "mlp", "seed": 0}
    text = quality.table({"sets": [{**worse, "rows": {**rows, quality.OURS: 40.0}}]})
    assert (text.count("missed"), text.count("reached")) == (3, 3)  # in one step, with `refine`
    text = quality.table({"sets": [{**worse, "rows": {**rows, quality.REFINED: 40.0}}]})
    assert (text.count("missed"), text.count("reached")) == (3, 3)
    capsys.readouterr()


@pytest.mark.parametrize("name", ["mlp", "lenet5", "vgg-bn", "resnet18-bn", "mobilenet"])
def test_the_rivals_bring_a_permuted_copy_back(name):
    """A rival that could not do this would be beaten by nothing."""
    rivals, networks = (importlib.import_module(f"merge_{part}") for part in ("rivals", "networks"))
    torch.manual_seed(0)
    model, images = networks.ARCHITECTURES[name].build(DIGITS), torch.randn(40, *DIGITS.input_shape)
    with torch.no_grad():
        for _ in range(20):  # BatchNorms find their statistics
            model.train()(images)
        wanted = model.eval()(images)
    graph = ChannelGraph.trace(model, images[:2])
    shuffle = {group.name: torch.randperm(group.size) for group in graph.groups}
    twin, merged = copy.deepcopy(model), copy.deepcopy(model)
    twin.load_state_dict(graph.permute(model.state_dict(), shuffle))

    def error(state):
        merged.load_state_dict(state)
        with torch.no_grad():
            return float((merged.eval()(images) - wanted).norm() / wanted.norm())

    pair = [model, twin]
    by_weights = rivals.weight_matching(pair, graph)
    by_data = rivals.activation_matching(pair, graph, images)
    assert error(rivals.average(pair)) > 0.1
    assert error(rivals.permuted_mean(pair, graph, by_weights)) < 1e-5
    assert error(rivals.repair(pair, graph, by_weights, images)) < 1e-5
    for state in (
        rivals.permuted_mean(pair, graph, by_data),
        rivals.repair(pair, graph, by_data, images),
    ):
        assert error(state) < 0.05  # units that these images leave dead match in any order


@pytest.mark.slow
def test_budgets_share_a_training_and_end_as_if_each_run_were_alone(tmp_path, capsys, monkeypatch):
    from hfedatm.base.results import read_rounds
    from hfedatm.runtime.local import run_locally

    script = importlib.import_module("privacy_accuracy")
    trained, original = [], script.train_locally
    monkeypatch.setattr(
        script, "train_locally", lambda *given: trained.append(1) or original(*given)
    )
    small = {"stations": 2, "clients-per-station": 2, "rounds": 1, "station-rounds": 2}
    given = small | {"local-epochs": 1, "secure-aggregation": True, "target-domain": "0"}
    words = [f"{key}={value}" for key, value in given.items() if key != "target-domain"]
    script.main(
        [*words, *"--seeds 1 --first-seed 5 --targets 0 --epsilons 8 1 --folder".split()]
        + [str(tmp_path), "--variant", "secure-aggregated noise"]
    )
    assert len(trained) == 2 * 2 * 2  # clients and station rounds, once for four runs
    runs = json.loads((tmp_path / "privacy-digits.json").read_text())["runs"]
    assert [(r["variant"], r["epsilon"]) for r in runs][:2] == [
        ("no noise", None),
        ("averaging", None),
    ]
    assert [r["spent"] for r in runs] == [
        0,
        0,
        pytest.approx(8, rel=0.01),
        pytest.approx(1, rel=0.01),
    ]
    assert len({r["unseen"] for r in runs}) > 1, "no budget makes a difference"
    for run, rule in zip(runs[:2], ("hfedatm", "avg"), strict=True):
        own = {"seed": 5, "server-rule": rule, "gram-weights": "examples", "run-name": rule}
        run_locally(given | own | {"output": str(tmp_path)})
        assert read_rounds(tmp_path / rule)[-1].unseen_accuracy == run["unseen"]
    assert "| 8 | secure-aggregated noise |" in capsys.readouterr().out
