"""A run that trains a part of the model: what travels, what is kept, what it equals."""

import json

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
from hfedatm_core import models
from hfedatm_core.data import DataSpec, Domain, DomainData


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
    line = "trains only 6: 51 of 683 numbers (7.5 %) travel, 0.2 kB instead of 2.7 kB a model"
    assert line in "\n".join(lines)


def test_a_wrong_layer_is_named(tmp_path):
    with pytest.raises(UserError, match="train-only: the model has no layer 'head'"):
        run_small(tmp_path, train_only="head")
    with pytest.raises(UserError, match="this model has no BatchNorm2d"):
        run_small(tmp_path, train_only="6", client_method="gperxan")


def texts(data_dir=None, **params):
    """Two classes of texts of different lengths, in three domains."""
    generator = torch.Generator().manual_seed(0)
    domains = {}
    for name in "abc":
        labels = torch.arange(160) % 2
        ids = torch.randint(4, 40, (160, 12), generator=generator, dtype=torch.int32)
        ids[:, 0] = 2 + labels
        mask = (torch.arange(12) < torch.randint(2, 12, (160, 1), generator=generator)).int()
        domains[name] = Domain(name, {"input_ids": ids, "attention_mask": mask}, labels)
    return DomainData(DataSpec("text", 2, (12,), vocab_size=40, tokenizer="hash"), domains)


def frozen_text_net(spec, name="minilm"):
    """A text model without dropout whose first block gets no gradients but is sent as ever."""
    model = text_net(spec, name)
    model.encoder.embeddings.requires_grad_(False)
    model.encoder.encoder.layer[0].requires_grad_(False)
    if name == "mpnet-base":
        model.encoder.encoder.relative_attention_bias.requires_grad_(False)
    return model


def text_net(spec, name="minilm"):
    model = models.build(name, spec, tiny=True)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


@pytest.mark.parametrize("name", ["minilm", "mpnet-base"])
def test_the_last_blocks_of_a_text_model_train_from_the_cache(tmp_path, name):
    given = {"dataset": "test_train_only:texts", "model_params": f"name={name}", "lr": 0.02}
    given |= {"rounds": 1, "ot_scope": "all", "gram_dtype": "float32"}
    part = run_small(
        tmp_path, "part", model="test_train_only:text_net", train_only="last 2", **given
    )
    whole = run_small(tmp_path, "whole", model="test_train_only:frozen_text_net", **given)
    ours, theirs = last_model(part), last_model(whole)
    assert ours.keys() == theirs.keys()
    moved = {n for n, t in ours.items() if not torch.equal(t, theirs[n])}
    assert not any("embeddings" in n or "layer.0" in n or "relative" in n for n in moved)
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name], atol=1e-4, rtol=1e-3)
    assert up(part)[0] < up(whole)[0] / 2


LORA = {
    "dataset": "test_train_only:texts",
    "model": "test_train_only:text_net",
    "train_only": "lora",
    "lora_params": "rank=2,last=1",
    "lr": 0.05,
}


def adapted_names(folder):
    return {name for name in last_model(folder) if "lora_" in name}


@pytest.mark.parametrize("name", ["minilm", "mpnet-base"])
def test_adapters_travel_and_the_base_stays(tmp_path, name):
    pytest.importorskip("peft", reason="peft is not installed (extra 'lora')")
    given = LORA | {"model_params": f"name={name}"}
    with log_lines() as lines:
        folder = run_small(tmp_path, rounds=2, **given)
    assert not lines_of(folder)[-1].get("kept") and not lines_of(folder)[-1]["failures"]
    state = last_model(folder)
    start = last_model(run_small(tmp_path, "start", rounds=1, **{**given, "lr": 1e-12}))
    moved = {n for n, t in state.items() if not torch.allclose(t, start[n], atol=1e-6)}
    assert moved <= adapted_names(folder) | {"head.weight", "head.bias"}
    assert any("lora_B" in n for n in moved) and "head.weight" in moved
    assert len(adapted_names(folder)) == 4
    assert "trains only adapters of 2 layers, head: 322 of" in "\n".join(lines)
    merged = lines_of(folder)[-1]["merge"]["layers"]
    assert {layer["how"] for n, layer in merged.items() if "lora" in n} == {"regmean"}


@pytest.mark.parametrize(
    "given",
    [
        {"secure_aggregation": True, "clients_per_station": 3},
        {"server_rule": "avg"},
        {"robust_clients": "median"},
        {"client_method": "fedprox"},
        {"client_method": "fedsr"},
        {"dp_sgd": True, "privacy.epsilon": 50.0},
        {"ot_scope": "all"},
    ],
    ids=str,
)
def test_adapters_go_together_with(tmp_path, given):
    pytest.importorskip("peft", reason="peft is not installed (extra 'lora')")
    folder = run_small(tmp_path, rounds=1, **LORA, gram_min_rows=32, **given)
    assert not lines_of(folder)[-1].get("kept") and not lines_of(folder)[-1]["failures"]
    assert all(torch.isfinite(tensor).all() for tensor in last_model(folder).values())


def test_adapters_are_resumed_and_exported_whole(tmp_path):
    pytest.importorskip("peft", reason="peft is not installed (extra 'lora')")
    from hfedatm.runtime.local import run_locally

    straight = run_small(tmp_path, "straight", schedule="constant", **LORA)
    halted = run_small(tmp_path, "halted", rounds=1, schedule="constant", **LORA)
    run_locally({"resume": str(halted), "rounds": 2})
    assert_same_model(halted, straight)
    files = export_run(read_run(straight), "last", tmp_path / "export")
    assert files[0].read_bytes() == (straight / "last.safetensors").read_bytes()


def test_what_does_not_fit_adapters_is_refused(tmp_path):
    pytest.importorskip("peft", reason="peft is not installed (extra 'lora')")
    for given, message in (
        ({"station_start": "own"}, "as station-start=own needs"),
        ({"gram_layers": "all"}, "as gram-layers=all needs"),
        ({"rule_params": "beta=0.5"}, "beta and beta_end mix tensors"),
        ({"tiers": "2x1x2", "reference": "previous"}, "train-only: got 'lora'; with tiers=2x1x2"),
        ({"lora_params": "rank=99"}, "lora-params: rank=99 is more than"),
        ({"lora_params": "ranks=2"}, "lora-params: LoraOptions has no parameter 'ranks'"),
        ({"train_only": "last 1"}, "lora-params: got 'rank=2,last=1'; it needs train-only=lora"),
    ):
        with pytest.raises(UserError, match=message):
            run_small(tmp_path, **(LORA | given))


def unfollowable_net(spec):
    return Unfollowable(spec.num_classes)


class Unfollowable(nn.Module):
    """A network whose code depends on values, with a BatchNorm before its head."""

    def __init__(self, classes):
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8))
        self.head = nn.Linear(8, classes)

    def forward(self, x):
        hidden = self.body(x)
        return self.head(hidden if hidden.sum() < 1e9 else -hidden)


def test_a_model_that_cannot_be_cut_computes_its_frozen_part_in_every_pass(tmp_path):
    with log_lines() as lines:
        folder = run_small(tmp_path, model="test_train_only:unfollowable_net", train_only="head")
    text = "\n".join(lines)
    assert "and computed in every pass, because the code of Unfollowable cannot be foll" in text
    assert "computing" not in text
    state = last_model(folder)
    torch.manual_seed(0)
    assert torch.equal(state["body.2.running_mean"], torch.zeros(8))
    assert state["body.2.num_batches_tracked"] == 0
    layers = lines_of(folder)[-1]["merge"]["layers"]
    assert layers == {"head": {"how": "regmean", "reason": ""}}


def test_layers_in_the_middle_are_trained_alone(tmp_path):
    middle = run_small(tmp_path, "middle", train_only="4")
    start = last_model(run_small(tmp_path, "start", train_only="4", rounds=1, lr=1e-12))
    state = last_model(middle)
    moved = {n for n, t in state.items() if not torch.allclose(t, start[n], atol=1e-7)}
    assert moved == {"4.weight", "4.bias"}


def test_the_summary_says_what_is_saved(tmp_path):
    with log_lines() as lines:
        folder = run_small(tmp_path, rounds=1, train_only="6")
    saved = json.loads((folder / "summary.json").read_text())["frozen"]
    assert saved["bytes_per_model"] == 4 * 632 and saved["seconds_per_example"] > 0
    assert "Frozen: 2.5 kB of a model not sent" in "\n".join(lines)
