"""A network cut in two computes what the whole network computes."""

import pytest
import torch
from torch import nn

from hfedatm_core import models
from hfedatm_core.data import DataSpec
from hfedatm_core.freezing import blocks, cut, trained_modules

IMAGES = DataSpec("image", 5, (3, 32, 32))


class Pooled(nn.Module):
    """An encoder whose code cannot be followed, and a head; called by keyword as text models."""

    def __init__(self):
        super().__init__()
        self.encoder, self.head = Unfollowable(), nn.Linear(4, 3)

    def forward(self, input_ids, attention_mask):
        mask = attention_mask.unsqueeze(-1)
        return self.head((self.encoder(input_ids) * mask).sum(1) / mask.sum(1))


class Unfollowable(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(9, 4)

    def forward(self, ids):
        return self.table(ids) if ids.sum() > 0 else -self.table(ids)


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return x + self.second(self.first(x).relu())


class OtherInTraining(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(nn.functional.dropout(self.body(x), 0.5, self.training))


def build(name, **options):
    torch.manual_seed(0)
    return models.build(name, IMAGES, **options).eval()


@pytest.mark.parametrize(
    ("name", "options", "chosen", "shape"),
    [
        ("lenet5", {}, "fc3", (84,)),
        ("lenet5", {"batch_norm": True}, "conv2,norm2,fc1,fc2,fc3", (6, 14, 14)),
        ("resnet18", {"small_input": True}, "layer4,fc", (256, 8, 8)),
        ("resnet18", {"small_input": True}, "last 2", (512, 4, 4)),
    ],
)
def test_both_parts_together_are_the_network(name, options, chosen, shape):
    model, example = build(name, **options), IMAGES.example()
    parts = cut(model, trained_modules(model, chosen), example)
    end = parts.end_of(model)
    assert parts.shape == shape
    with torch.no_grad():
        assert torch.equal(end(parts.front(example)), model(example))
    whole = model.state_dict()
    assert set(parts.frozen) | set(end.state_dict()) == set(whole)
    assert not set(parts.frozen) & set(end.state_dict())
    assert not parts.front.training and not any(p.requires_grad for p in parts.front.parameters())
    assert all(p.requires_grad for p in end.parameters())


def test_a_frozen_encoder_may_hold_any_code():
    model = Pooled().eval()
    example = {"input_ids": torch.tensor([[1, 2, 3]] * 2), "attention_mask": torch.ones(2, 3)}
    parts = cut(model, ["head"], example)
    assert torch.equal(parts.end_of(model)(parts.front(**example)), model(**example))


def test_blocks_are_counted_from_the_end():
    model = build("resnet18")
    assert blocks(model)[-3:] == ["layer4.0", "layer4.1", "fc"]
    assert trained_modules(model, "last 2") == ["layer4.1", "fc"]
    assert trained_modules(model, "Last:1") == ["fc"]


def test_the_digest_changes_with_any_frozen_weight_and_with_no_trained_one():
    model, example = build("lenet5"), IMAGES.example()
    before = cut(model, ["fc3"], example).digest
    with torch.no_grad():
        model.fc3.weight += 1
    assert cut(model, ["fc3"], example).digest == before
    with torch.no_grad():
        model.conv1.bias[0] += 1
    assert cut(model, ["fc3"], example).digest != before


@pytest.mark.parametrize(
    ("model", "chosen", "message"),
    [
        ("lenet5", "fc4", r"no layer 'fc4' with weights; its last ones are .*fc3\. Did you mean"),
        ("lenet5", "relu1", "no layer 'relu1' with weights"),
        ("lenet5", "last 9", "the model has 5 layers and blocks, not 9"),
        ("lenet5", "last 5", "nothing would be frozen"),
        ("lenet5", "conv1,fc3", "conv2 comes behind trained layers but is not trained"),
        (Residual, "second", "2 tensors cross the cut"),
        (Pooled, "encoder", "head comes behind trained layers"),
        (OtherInTraining, "head", "does different things in training and evaluation"),
    ],
)
def test_what_cannot_be_cut_is_explained(model, chosen, message):
    network = build(model) if isinstance(model, str) else model()
    example = IMAGES.example() if isinstance(model, str) else torch.randn(2, 4)
    with pytest.raises(ValueError, match=message):
        cut(network, trained_modules(network, chosen), example)
