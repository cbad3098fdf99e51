"""A run that trains a part of the model: what travels, what is kept, what it equals."""

import pytest
import torch
from helpers import assert_same_model, last_model, lines_of, log_lines, run_small, tiny_data
from helpers import tiny_net as whole_net
from torch import nn

from hfedatm.base import trained_part
from hfedatm.base.errors import UserError
from hfedatm.base.evaluation import evaluate
from hfedatm.exporting import export_run
from hfedatm.runs import read_run


def frozen_net(spec):
    """The small network whose convolution gets no gradients but is sent and merged as ever."""
    model = whole_net(spec)
    model[0].requires_grad_(False)
    return model


def norm_net(spec):
    return nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.BatchNorm2d(4),
        nn.Flatten(),
        nn.Linear(144, 8),
        nn.Linear(8, spec.num_classes),
    )


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HFEDATM_CACHE", str(tmp_path / "cache"))
    trained_part.activations.cache_clear()


def up(folder):
    return [line["bytes_up"]["clients"] for line in lines_of(folder)]


def test_it_equals_training_with_the_front_frozen_and_sends_less(tmp_path):
    part = run_small(tmp_path, "part", train_only="4,6")
    whole = run_small(tmp_path, "whole", model="test_train_only:frozen_net")
    ours, theirs = last_model(part), last_model(whole)
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name], atol=1e-5, rtol=1e-4)
    assert torch.equal(ours["0.weight"], theirs["0.weight"])
    saved = 4 * (4 * 9 + 4)  # bytes of the convolution, sent by 4 clients in 2 station rounds
    assert [a - b for a, b in zip(up(whole), up(part), strict=True)] >= [8 * saved] * 2


def test_the_saved_model_is_whole_and_scores_as_the_run_says(tmp_path):
    folder = run_small(tmp_path, train_only="last 1")
    model = whole_net(tiny_data().spec)
    model.load_state_dict(last_model(folder))
    unseen = tiny_data().domains["c"]
    found = evaluate(model, [(unseen.inputs, unseen.targets)])
    assert found.correct / found.examples == lines_of(folder)[-1]["unseen"]["accuracy"]


def test_activations_are_computed_once(tmp_path, monkeypatch):
    asked = []
    fill = trained_part.FrozenPart.fill
    monkeypatch.setattr(
        trained_part.FrozenPart,
        "fill",
        lambda self, array, domain, device: (
            asked.append(domain.name) or fill(self, array, domain, device)
        ),
    )
    first = run_small(tmp_path, "first", train_only="6")
    assert asked == ["a", "b", "c"]
    trained_part.activations.cache_clear()  # as a new process begins
    assert_same_model(first, run_small(tmp_path, "second", train_only="6"))
    run_small(tmp_path, "other", train_only="6", seed=1)  # other frozen weights
    assert asked == ["a", "b", "c"] * 2


def test_frozen_statistics_stay(tmp_path):
    given = {"model": "test_train_only:norm_net", "rounds": 1}
    part = last_model(run_small(tmp_path, "part", train_only="4", **given))
    assert torch.equal(part["1.running_mean"], torch.zeros(4))
    assert part["1.num_batches_tracked"] == 0
    all_of_it = last_model(run_small(tmp_path, "all", **given))
    assert all_of_it["1.num_batches_tracked"] > 0


def test_a_run_is_resumed_and_exported_whole(tmp_path):
    straight = run_small(tmp_path, "straight", train_only="6")
    halted = run_small(tmp_path, "halted", train_only="6", rounds=1, schedule="constant")
    run_small(tmp_path, "straight2", train_only="6", schedule="constant")
    from hfedatm.runtime.local import run_locally

    run_locally({"resume": str(halted), "rounds": 2})
    assert_same_model(halted, tmp_path / "straight2")
    files = export_run(read_run(straight), "last", tmp_path / "export")
    assert files[0].read_bytes() == (straight / "last.safetensors").read_bytes()


@pytest.mark.parametrize(
    "given",
    [
        {"secure_aggregation": True, "clients_per_station": 3, "gram_min_rows": 32},
        {"client_method": "fedsr"},
        {"client_method": "fediir", "bound_factor": 0},
        {"station_start": "own"},
        {"robust_clients": "median"},
        {"dp_sgd": True, "privacy.epsilon": 50.0},
    ],
    ids=str,
)
def test_it_goes_together_with(tmp_path, given):
    folder = run_small(tmp_path, train_only="4,6", rounds=1, **given)
    assert not lines_of(folder)[-1].get("kept") and not lines_of(folder)[-1]["failures"]
    assert torch.isfinite(last_model(folder)["0.weight"]).all()


def test_the_run_says_what_travels(tmp_path):
    with log_lines() as lines:
        run_small(tmp_path, rounds=1, train_only="6")
    assert "trains only 6: 51 of 683 numbers (7.5 %) travel" in "\n".join(lines)


def test_a_wrong_layer_is_named(tmp_path):
    with pytest.raises(UserError, match="train-only: the model has no layer 'head'"):
        run_small(tmp_path, train_only="head")
    with pytest.raises(UserError, match="this model has no BatchNorm2d"):
        run_small(tmp_path, train_only="6", client_method="gperxan")
