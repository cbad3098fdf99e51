"""Run the example as its README says."""

import json
from pathlib import Path

import pytest
import torch
from segments import Segmentation, load
from typer.testing import CliRunner

from hfedatm.cli.main import typer_app
from hfedatm.contracts import BadTargets

CONFIG = Path(__file__).parent / "config.yaml"


def test_it_learns_to_find_the_digit(tmp_path):
    command = ["run", "--config", str(CONFIG), f"output={tmp_path}", "run-name=one", "rounds=1"]
    shown = CliRunner().invoke(typer_app, command, catch_exceptions=False)
    assert shown.exit_code == 0, shown.output
    line = json.loads((tmp_path / "one" / "rounds.jsonl").read_text().splitlines()[-1])
    assert line["failures"] == [] and line["unseen"]["measure"] == "mean IoU"
    data = load()
    task, targets = Segmentation(data.spec), data.domains["75"].targets
    nothing = torch.tensor([1.0, 0.0]).view(1, 2, 1, 1).expand(len(targets), 2, 16, 16)
    assert line["unseen"]["accuracy"] > 0.1 + float(task.scores(nothing, targets).mean())


def test_the_score_is_the_mean_intersection_over_union():
    task = Segmentation(load().spec)
    targets = torch.zeros(2, 16, 16, dtype=torch.long)
    targets[:, :8] = 1
    outputs = torch.nn.functional.one_hot(targets, 2).permute(0, 3, 1, 2).float()
    outputs[1] = torch.tensor([0.0, 1.0]).view(2, 1, 1)  # all ink
    assert task.scores(outputs, targets).tolist() == [1.0, 0.25]


def test_targets_without_a_class_for_each_pixel_are_refused():
    with pytest.raises(BadTargets, match="shape"):
        Segmentation(load().spec).check(torch.zeros(4, dtype=torch.long))
