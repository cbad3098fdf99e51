"""Adapters of peft in a network: where they are, what they change, what is cut."""

import copy
import sys

import pytest
import torch
from torch import nn

from hfedatm_core import collect_grams, models
from hfedatm_core.adapters import LoraOptions, adapter_modules, add_adapters, is_lora
from hfedatm_core.data import DataSpec
from hfedatm_core.freezing import cut

TEXTS = DataSpec("text", 3, (12,), vocab_size=40, tokenizer="hash")
QUERY = {"minilm": "attention.self.query", "mpnet-base": "attention.attn.q"}
VALUE = {"minilm": "attention.self.value", "mpnet-base": "attention.attn.v"}

pytest.importorskip("peft", reason="peft is not installed (extra 'lora')")


def adapted(name, **options):
    torch.manual_seed(0)
    model = models.build(name, TEXTS, tiny=True).eval()
    before = copy.deepcopy(model)
    add_adapters(model, LoraOptions(**options))
    return model, before


@pytest.mark.parametrize("name", ["minilm", "mpnet-base"])
def test_fresh_adapters_change_nothing_and_trained_ones_add_the_product(name):
    model, before = adapted(name, rank=2, alpha=6)
    inputs = TEXTS.example()
    with torch.no_grad():
        assert torch.equal(model(**inputs), before(**inputs))
        path = f"encoder.encoder.layer.1.{QUERY[name]}"
        layer = model.get_submodule(path)
        layer.lora_B.default.weight.normal_()
        added = layer.lora_B.default.weight @ layer.lora_A.default.weight
        before.get_submodule(path).weight += 6 / 2 * added
        torch.testing.assert_close(model(**inputs), before(**inputs))


@pytest.mark.parametrize("name", ["minilm", "mpnet-base"])
def test_only_adapters_and_the_head_are_shown_and_the_rest_is_cached(name):
    model, _ = adapted(name, rank=2, last=1)
    layers = [f"encoder.encoder.layer.1.{part[name]}" for part in (QUERY, VALUE)]
    factors = [f"{layer}.{factor}" for layer in layers for factor in ("lora_A", "lora_B")]
    assert sorted(adapter_modules(model)) == sorted([*factors, "head"])
    parts = cut(model, adapter_modules(model), TEXTS.example())
    assert {array.shape for array in parts.arrays} == {(12, 32), (12,)}
    end = copy.deepcopy(parts.end_of(model))
    shown = {f"{factor}.default.weight" for factor in factors} | {"head.weight", "head.bias"}
    assert set(end.state_dict()) == shown
    assert {n for n, p in end.named_parameters() if p.requires_grad} == shown
    assert set(parts.frozen) | shown == set(model.state_dict())
    inputs = TEXTS.example()
    with torch.no_grad():
        found = end(*parts.front(**inputs))
        assert torch.equal(found, model(**inputs))
    crossing = dict(zip([a.name for a in parts.arrays], parts.front(**inputs), strict=True))
    grams = collect_grams(end, [(crossing, None)])
    assert set(grams) == {f"{layer}.lora_A.default" for layer in layers} | {"head"}
    first, second = (grams[f"{layer}.lora_A.default"] for layer in layers)
    assert first is second and first.dim == 32  # they see one input


def test_layers_are_chosen_by_name():
    model, _ = adapted("minilm", targets="key+dense", last=1)
    leaves = {name.split(".")[-2] for name in adapter_modules(model) if "lora" in name}
    assert leaves == {"key", "dense"}
    model, _ = adapted("minilm", targets="all")
    assert len(adapter_modules(model)) == 2 * 2 * 6 + 1
    model = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 2))
    add_adapters(model, LoraOptions(rank=1, targets="0"))
    assert adapter_modules(model) == ["0.lora_A", "0.lora_B", "2"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"targets": "keys"}, "no Linear layer before head is called keys; there are: dense, key"),
        ({"rank": 33}, "rank=33 is more than encoder.encoder.layer.0.attention.self.query has"),
        ({"rank": 0}, "rank must be at least 1"),
        ({"alpha": 0.0}, "alpha positive"),
    ],
)
def test_wrong_options_are_explained(options, message):
    with pytest.raises(ValueError, match=message):
        adapted("minilm", **options)


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'hfedatm\[lora\]'"):
        add_adapters(nn.Linear(2, 2), LoraOptions())


def test_the_word_means_adapters():
    assert is_lora(" LoRA ") and not is_lora("last 2") and not is_lora("lora_head")
