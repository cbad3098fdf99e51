"""Run the package as its README says, and check that each of its parts did its work."""

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from mylab.data import load
from mylab.methods import Smoothed
from mylab.nets import build
from mylab.rules import Median
from typer.testing import CliRunner

from hfedatm.base.resolving import resolve
from hfedatm.cli.main import typer_app
from hfedatm.contracts import Situation
from hfedatm_core import ChannelGraph, Update

CONFIG = Path(__file__).parent / "config.yaml"


def run(folder: Path, *settings: str) -> tuple[list[dict], Path]:
    command = ["run", "--config", str(CONFIG), f"output={folder}", "run-name=lab", *settings]
    shown = CliRunner().invoke(typer_app, command, catch_exceptions=False)
    assert shown.exit_code == 0, shown.output
    lines = (folder / "lab" / "rounds.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines], folder / "lab"


def test_model_data_method_and_rule_together(tmp_path):
    rounds, folder = run(tmp_path)
    assert [r["round"] for r in rounds] == [1, 2, 3]
    assert all(r["failures"] == [] and r["clients"]["answered"] == 6 for r in rounds)
    assert rounds[-1]["unseen"]["domain"] == "shaky"
    assert rounds[-1]["unseen"]["accuracy"] > 0.3, "chance is 0.1"
    assert rounds[-1]["source"]["accuracy"] > 0.6
    assert all(s["gram-bytes-up"] == 0 for s in rounds[-1]["per_station"])
    stored = json.loads((folder / "config.json").read_text())["settings"]
    assert stored["client-method"] == "mylab.methods:Smoothed"


def test_training_function_under_the_projects_own_rule(tmp_path):
    rounds, _ = run(tmp_path, "server-rule=hfedatm", "train-fn=mylab.train:train", "rounds=2")
    assert all(r["failures"] == [] for r in rounds)
    assert rounds[-1]["source"]["accuracy"] > 0.6
    assert all(s["gram-bytes-up"] > 0 for s in rounds[-1]["per_station"])
    assert {layer["how"] for layer in rounds[-1]["merge"]["layers"].values()} >= {"regmean"}


def test_the_data_set_has_four_lamps_of_the_same_digits():
    data = load(noise=0.5)
    assert list(data.domains) == ["daylight", "dim", "grainy", "shaky"]
    assert {len(domain) for domain in data.domains.values()} == {1797}
    grain = data.domains["grainy"].inputs - data.domains["daylight"].inputs
    assert float(grain.std()) == pytest.approx(0.5, rel=0.02)


def test_the_method_smooths_labels():
    model = build(load().spec)
    inputs, targets = torch.randn(4, 1, 8, 8), torch.tensor([1, 2, 3, 4])
    logs = model(inputs).log_softmax(1)
    expected = 0.8 * F.nll_loss(logs, targets) - 0.2 * logs.mean()
    torch.testing.assert_close(Smoothed(0.2).loss(model, inputs, targets), expected)


def test_the_rule_takes_the_median_and_a_step_towards_it():
    spec = load().spec
    model = build(spec)
    start = {name: torch.zeros_like(t) for name, t in model.state_dict().items()}
    updates = [
        Update(state={n: torch.full_like(t, value) for n, t in start.items()}, name=str(value))
        for value in (1.0, 3.0, 1e6)
    ]
    graph = ChannelGraph.trace(model, (spec.example(),))
    merged = Median(step=0.5).merge(iter(updates), Situation(resolve({}), graph, start, 1))
    assert all(torch.equal(t, torch.full_like(t, 1.5)) for t in merged.state.values())
    with pytest.raises(ValueError, match="no station"):
        Median().merge(iter([]), Situation(resolve({}), graph, start, 1))
