"""A network cut in two computes what the whole network computes."""

import copy

import pytest
import torch
from torch import nn

from hfedatm_core import ChannelGraph, models
from hfedatm_core.data import DataSpec
from hfedatm_core.freezing import blocks, cut, trained_modules
from hfedatm_core.hiding import hidden_names

IMAGES = DataSpec("image", 5, (3, 32, 32))
TEXTS = DataSpec("text", 3, (12,), vocab_size=40, tokenizer="hash")


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


class Scaled(nn.Module):
    """The end uses a frozen weight that no input passes through."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 3)
        self.scale = nn.Parameter(torch.rand(3))

    def forward(self, x):
        return self.head(self.body(x)) * self.scale.exp()


class Late(nn.Module):
    """The frozen weights are not before the trained ones."""

    def __init__(self):
        super().__init__()
        self.head, self.scale = nn.Linear(4, 3), nn.Parameter(torch.rand(3))

    def forward(self, x):
        return self.head(x) * self.scale


class Counted(nn.Module):
    """What crosses the cut is the same for all examples."""

    def __init__(self):
        super().__init__()
        self.body, self.head = Batchwise(), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.body(x)) + x.sum(1, keepdim=True)


class Batchwise(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return self.layer(x).mean(0, keepdim=True)


class Unfollowed(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.body(x)) if x.sum() < 1e9 else self.body(x)


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
        ("vgg16", {"pretrained": False}, "last 4", (512, 2, 2)),
    ],
)
def test_both_parts_together_are_the_network(name, options, chosen, shape):
    model, example = build(name, **options), IMAGES.example()
    parts = cut(model, trained_modules(model, chosen), example)
    end = parts.end_of(model)
    assert [array.shape for array in parts.arrays] == [shape]
    with torch.no_grad():
        assert torch.equal(end(*parts.front(example)), model(example))
    whole = model.state_dict()
    assert set(parts.frozen) | set(end.state_dict()) == set(whole)
    assert not set(parts.frozen) & set(end.state_dict())
    assert not parts.front.training and not any(p.requires_grad for p in parts.front.parameters())
    assert all(p.requires_grad for p in end.parameters())


def test_a_frozen_encoder_may_hold_any_code():
    model = Pooled().eval()
    example = {"input_ids": torch.tensor([[1, 2, 3]] * 2), "attention_mask": torch.ones(2, 3)}
    parts = cut(model, ["head"], example)
    assert torch.equal(parts.end_of(model)(*parts.front(**example)), model(**example))


@pytest.mark.parametrize("name", ["minilm", "mpnet-base"])
def test_a_transformer_is_cut_between_its_blocks(name):
    torch.manual_seed(0)
    model = models.build(name, TEXTS, tiny=True).eval()
    assert blocks(model)[-2:] == ["encoder.encoder.layer.1", "head"]
    parts = cut(model, trained_modules(model, "last 2"), TEXTS.example())
    arrays = {array.name: array for array in parts.arrays}
    tokens = arrays.pop(next(name for name in arrays if name != "attention_mask"))
    assert (tokens.shape, tokens.by_token) == ((12, 32), True)
    assert list(arrays) == ["attention_mask"] and arrays["attention_mask"].by_token
    end = copy.deepcopy(parts.end_of(model))
    trained = {"head", "encoder.encoder.layer.1"}
    assert {n.rpartition(".")[0] for n in end.state_dict() if n.startswith("head")} == {"head"}
    assert all(any(n.startswith(f"{part}.") for part in trained) for n in end.state_dict())
    assert set(end.state_dict()) | set(parts.frozen) == set(model.state_dict())
    for length in (12, 5):  # of another length than the example, and padded
        ids = torch.randint(2, 40, (3, length), generator=torch.Generator().manual_seed(0))
        mask = (torch.arange(length) < torch.tensor([[length], [3], [1]])).long()
        with torch.no_grad():
            found = end(*parts.front(input_ids=ids, attention_mask=mask))
            assert torch.equal(found, model(input_ids=ids, attention_mask=mask))


def test_several_tensors_may_cross():
    model, example = nn.Sequential(nn.Linear(4, 4), Residual()).eval(), torch.randn(2, 4)
    parts = cut(model, ["1.second"], example)
    assert len(parts.arrays) == 2
    assert torch.equal(parts.end_of(model)(*parts.front(example)), model(example))


def test_what_follows_from_frozen_weights_alone_is_a_constant():
    model, example = Scaled().eval(), torch.randn(2, 4)
    parts = cut(model, ["head"], example)
    end = parts.end_of(model)
    assert torch.equal(end(*parts.front(example)), model(example))
    assert set(end.state_dict()) == {"head.weight", "head.bias"}
    assert {"scale", "body.weight", "body.bias"} == set(parts.frozen)


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
        (Residual, "first,second", "nothing would be frozen"),
    ],
)
def test_a_wrong_choice_is_explained(model, chosen, message):
    network = build(model) if isinstance(model, str) else model()
    example = IMAGES.example() if isinstance(model, str) else torch.randn(2, 4)
    with pytest.raises(ValueError, match=message):
        cut(network, trained_modules(network, chosen), example)


@pytest.mark.parametrize(
    ("model", "chosen", "message"),
    [
        (Late, "head", "no frozen weights come before the trained ones"),
        (Counted, "head", "body crosses the cut with something else than one row"),
        (OtherInTraining, "head", "does different things in training and evaluation"),
        (Unfollowed, "body", "the code of Unfollowed cannot be followed"),
    ],
)
def test_what_cannot_be_cut_stays_whole_with_its_frozen_weights_hidden(model, chosen, message):
    network, example = model().eval(), torch.randn(2, 4)
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    expected = network(example)
    parts = cut(network, [chosen], example)
    assert message in parts.why_whole and parts.front is None and not parts.arrays
    own = {name for name in before if name.startswith(f"{chosen}.")}
    assert set(parts.frozen) == set(before) - own
    end = copy.deepcopy(parts.end_of(network))
    assert set(end.state_dict()) == own
    assert {n for n, p in end.named_parameters() if p.requires_grad} == own
    assert torch.equal(end(example), expected)
    end.load_state_dict({name: tensor + 1 for name, tensor in end.state_dict().items()})
    assert not torch.equal(end(example), expected)


def test_frozen_weights_behind_trained_ones_are_hidden():
    model, example = build("lenet5", batch_norm=True), IMAGES.example()
    parts = cut(model, ["conv2", "fc3"], example)
    end = copy.deepcopy(parts.end_of(model))
    assert [array.shape for array in parts.arrays] == [(6, 14, 14)]
    assert {name.partition(".")[0] for name in end.state_dict()} == {"conv2", "fc3"}
    assert set(parts.frozen) == set(model.state_dict()) - set(end.state_dict())
    end.train()
    statistics = end.norm2.running_mean.clone()
    found = end(*parts.front(example))
    found.sum().backward()
    assert torch.equal(end.norm2.running_mean, statistics) and not end.norm2.training
    assert end.fc1.weight.grad is None and end.conv2.weight.grad is not None
    with torch.no_grad():
        torch.testing.assert_close(end.eval()(*parts.front(example)), model(example))
    with pytest.raises(RuntimeError, match="Missing key.*fc3.bias"):
        end.load_state_dict({n: t for n, t in end.state_dict().items() if n != "fc3.bias"})
    assert hidden_names(nn.Sequential(end)) == {f"0.{n}" for n in hidden_names(end)}
    wrapped = nn.Sequential(end)
    wrapped.load_state_dict(wrapped.state_dict())
    graph = ChannelGraph.trace(end, (torch.zeros(2, 6, 14, 14),))
    known = graph.without(hidden_names(end))
    assert not known.groups and known.frozen["norm2"] == "its weights are frozen"


def test_alignment_moves_no_channel_of_frozen_weights():
    model, example = build("vgg16", pretrained=False), IMAGES.example()
    end = cut(model, ["features.0", "features.24", "classifier"], example).end_of(model)
    graph = ChannelGraph.trace(end, (example,)).without(hidden_names(end))
    assert [group.name for group in graph.groups] == ["classifier.0"]
    with torch.no_grad():
        before = end(example)
        order = {group.name: torch.arange(group.size).flip(0) for group in graph.groups}
        end.load_state_dict(graph.permute(end.state_dict(), order))
        torch.testing.assert_close(end(example), before)
