"""Channel groups: what is found, what is frozen, and that a permutation never changes a network."""

from __future__ import annotations

import copy
import logging
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from nets import LARGE, SMALL, ConcatNet, LeNet5, TinyTransformer, build, image, output, randomise
from torch import Tensor, fx, nn
from torch.nn import functional as F
from torchvision import models

from hfedatm_core.channels.graph import ChannelGraph
from hfedatm_core.channels.groups import Member

# Groups found: convolutional and linear ones.
EXPECTED = {
    "lenet5": (2, 2),
    "lenet5-bn": (2, 2),
    "kernel": (2, 0),
    "residual": (3, 0),
    "concat": (3, 0),
    "separable": (5, 0),
    "channels-last": (2, 1),
    "transformer": (0, 2),
    "conv-transformer": (1, 3),
    "vgg11": (8, 2),
    "vgg11-bn": (8, 2),
    "resnet18": (12, 0),
}


def shuffled(graph: ChannelGraph, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {g.name: torch.randperm(g.size, generator=generator) for g in graph.groups}


def assert_function_kept(model: nn.Module, x: Tensor, graph: ChannelGraph, seed: int = 0) -> None:
    state = model.state_dict()
    permuted = graph.permute(state, shuffled(graph, seed))
    before, after = output(model, state, x), output(model, permuted, x)
    torch.testing.assert_close(after, before, rtol=1e-10, atol=1e-10)


def members_of(graph: ChannelGraph, name: str) -> set[tuple[str, int, int, int]]:
    [group] = [group for group in graph.groups if group.name == name]
    return {(m.tensor, m.axis, m.offset, m.block) for m in group.members}


@pytest.mark.parametrize("name", [*SMALL, *LARGE])
def test_number_of_groups(name: str) -> None:
    model, x = build(name)
    kinds = [group.kind for group in ChannelGraph.trace(model, (x,)).groups]
    assert (kinds.count("conv"), kinds.count("linear")) == EXPECTED[name]


@pytest.mark.parametrize("make", [models.vgg11, models.vgg11_bn])
def test_vgg11_as_torchvision_builds_it(make) -> None:  # 133 M parameters: shapes only
    with torch.device("meta"):
        model, x = make(init_weights=False), torch.zeros(1, 3, 224, 224)
    graph = ChannelGraph.trace(model, (x,))
    assert len(graph.groups) == 10
    last_conv = [group for group in graph.groups if group.kind == "conv"][-1]
    assert ("classifier.0.weight", 1, 0, 49) in members_of(graph, last_conv.name)
    assert graph.frozen == {"classifier.6": "its channels are the network's output"}


@pytest.mark.parametrize("name", SMALL)
@given(seed=st.integers(0, 2**16))
@settings(max_examples=5)
def test_any_permutation_keeps_the_function(name: str, seed: int) -> None:
    model, x = build(name, seed)
    assert_function_kept(model, x, ChannelGraph.trace(model, (x,)), seed)


@pytest.mark.parametrize("name", LARGE)
def test_any_permutation_keeps_the_function_of_large_networks(name: str) -> None:
    model, x = build(name)
    assert_function_kept(model, x, ChannelGraph.trace(model, (x,)))


@pytest.mark.parametrize(
    ("make", "groups"),
    [
        (lambda: models.densenet._densenet(4, (2, 2), 8, None, False, num_classes=5), 10),
        # At a quarter of the width the stem's block is residual, too: one group fewer.
        (lambda: models.mobilenet_v2(width_mult=0.25, num_classes=5), 24),
        (lambda: models.mobilenet_v3_small(width_mult=0.25, num_classes=5), 26),
        (lambda: models.squeezenet1_1(num_classes=5), 25),
        (lambda: models.shufflenet_v2_x0_5(num_classes=5), 80),
    ],
    ids=["densenet", "mobilenet_v2", "mobilenet_v3", "squeezenet", "shufflenet"],
)
def test_other_architectures_keep_their_function(make, groups: int) -> None:
    torch.manual_seed(0)
    model, x = make().double().eval(), image(1, 64)
    randomise(model)
    graph = ChannelGraph.trace(model, (x,))
    assert len(graph.groups) == groups
    assert_function_kept(model, x, graph)


def test_members_of_lenet5() -> None:
    model, x = build("lenet5-bn")
    graph = ChannelGraph.trace(model, (x,))
    norm = {(f"bn2.{v}", 0, 0, 1) for v in ("weight", "bias", "running_mean", "running_var")}
    filters = {("conv2.weight", 0, 0, 1), ("conv2.bias", 0, 0, 1)}
    assert members_of(graph, "conv2") == norm | filters | {("fc1.weight", 1, 0, 4)}
    assert members_of(graph, "fc2") == {
        *(("fc2.weight", 0, 0, 1), ("fc2.bias", 0, 0, 1), ("fc3.weight", 1, 0, 1)),
    }
    assert graph.frozen == {"fc3": "its channels are the network's output"}


def test_residual_additions_make_one_group() -> None:
    model, x = build("residual")
    [stem, *_] = ChannelGraph.trace(model, (x,)).groups
    written = {member.tensor for member in stem.producers}
    assert written == {"stem.weight", "outer.weight", "direct.weight"}
    assert Member("direct.weight", 1, 0, 1, "input") in stem.members


def test_a_concatenation_is_lined_up_and_the_input_stays() -> None:
    model, x = build("concat")
    graph = ChannelGraph.trace(model, (x,))
    assert ("norm.running_mean", 0, 3, 1) in members_of(graph, "first")
    assert ("fc.weight", 1, 7 * 16, 16) in members_of(graph, "second")
    assert ("fc.weight", 1, 12 * 16, 16) in members_of(graph, "third")


def test_index_of_a_flattened_block() -> None:
    model, x = build("lenet5")
    graph = ChannelGraph.trace(model, (x,))
    p = torch.arange(16).flip(0)
    index = graph.index("fc1.weight", 1, 64, {"conv2": p})
    assert index is not None
    assert torch.equal(index, (p[:, None] * 4 + torch.arange(4)).flatten())
    assert graph.index("fc1.weight", 1, 64, {}) is None


def test_the_model_is_not_touched() -> None:
    model = LeNet5(batch_norm=True).train()
    before = copy.deepcopy(model.state_dict())
    ChannelGraph.trace(model, (torch.randn(2, 3, 16, 16),))
    assert all(module.training for module in model.modules())
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert all(p.grad is None and type(p) is nn.Parameter for p in model.parameters())


def test_a_graph_is_plain_data() -> None:
    graph = ChannelGraph.trace(LeNet5(), (torch.zeros(1, 3, 16, 16),))
    graph.groups_at("conv1.weight", 0)
    assert pickle.loads(pickle.dumps(graph)) == graph


class Around(nn.Module):
    """conv -> something -> conv -> head: what becomes of the first convolution's channels?"""

    def __init__(self, middle: nn.Module, width: int = 6) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 6, 3, padding=1)
        self.middle = middle
        self.second = nn.Conv2d(width, 5, 3, padding=1)
        self.head = nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.second(self.middle(self.first(x))).mean((2, 3)))


class Do(nn.Module):
    def __init__(self, function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def impostor(x: Tensor) -> Tensor:
    return x.cumsum(1)


impostor.__name__ = "relu"
fx.wrap("impostor")


class Scale(nn.Module):
    """A parameter per channel that is used without a module of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1, 6, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


class Weight(nn.Module):
    """A convolution whose weight is also read directly."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(6, 6, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x) + self.conv.weight[0, 0].sum()


FREEZING = {
    "LocalResponseNorm": nn.LocalResponseNorm(2),
    "transposed convolution": nn.ConvTranspose2d(6, 6, 3, padding=1),
    "cumulative sum": Do(lambda x: x.cumsum(1)),
    "slicing": Do(lambda x: x[:, [5, 4, 3, 2, 1, 0]]),
    "largest channel": Do(lambda x: x + x.argmax(1, keepdim=True)),
    "pooling over channels": Do(lambda x: F.avg_pool2d(x.transpose(1, 3), (1, 1)).transpose(1, 3)),
    "a function called relu": Do(lambda x: impostor(x)),
}


@pytest.mark.parametrize("what", FREEZING)
def test_what_is_not_understood_freezes_what_it_touches(
    what: str, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    model, x = Around(FREEZING[what]).double().eval(), image()
    randomise(model)
    with caplog.at_level(logging.WARNING):
        graph = ChannelGraph.trace(model, (x,))
    assert "middle" in graph.frozen["first"]
    assert "middle" in caplog.text
    assert "first" not in {group.name for group in graph.groups}
    assert "second" in {group.name for group in graph.groups}
    assert_function_kept(model, x, graph)


# The groups of the first convolution's channels, and others before the last one's.
PASSING: dict[str, tuple[nn.Module, dict[str, int]]] = {
    "scalar factor": (Do(lambda x: 1 - 2 * x / 3), {"first": 6}),
    "spatial mask": (Do(lambda x: x * x.mean(1, keepdim=True).detach()), {"first": 6}),
    "sum over channels": (Do(lambda x: x + x.mean((1, 3))[:, None, :, None]), {"first": 6}),
    "padding": (nn.ReflectionPad2d(1), {"first": 6}),
    "slope": (nn.PReLU(), {"first": 6}),
    "parameter per channel": (Scale(), {"first": 6}),
    "interpolation": (Do(lambda x: F.interpolate(x, scale_factor=2)), {"first": 6}),
    "reshape and back": (
        Do(lambda x: x.flatten(2).unsqueeze(-1).squeeze(-1).unsqueeze(2)),
        {"first": 6},
    ),
    "size arithmetic": (
        Do(lambda x: x.reshape(x.shape[0], x.size(1), x.shape[2] * x.shape[3], 1)),
        {"first": 6},
    ),
    "mode": (Do(lambda x: F.dropout(x.contiguous().clamp(min=0), 0.5, False)), {"first": 6}),
    "instance norm": (
        nn.InstanceNorm2d(6, affine=True, track_running_stats=True),
        {"first": 6},
    ),
    "norm of all channels": (nn.GroupNorm(1, 6), {"first": 6}),
    "norm of each channel": (nn.GroupNorm(6, 6), {"first": 6}),
    "norm of groups of channels": (nn.GroupNorm(2, 6), {"first": 2, "first#2": 3}),
    "LayerNorm of everything": (nn.LayerNorm([6, 12, 12]), {"first": 6}),
    "LayerNorm of the channels": (
        nn.Sequential(Do(lambda x: x.permute(0, 2, 3, 1)), nn.LayerNorm(6)).append(
            Do(lambda x: x.permute(0, 3, 1, 2))
        ),
        {"first": 6},
    ),
    "BatchNorm by its function": (
        Do(lambda x: F.batch_norm(x, torch.zeros(6).to(x), torch.ones(6).to(x))),
        {"first": 6},
    ),
    "grouped convolution": (
        nn.Conv2d(6, 6, 3, padding=1, groups=2),
        {"first": 2, "first#2": 3, "middle": 3},
    ),
    "flip": (Do(lambda x: x.flip(1)), {"first": 6}),
    "shift": (Do(lambda x: x.roll(1, 1)), {"first": 6}),
    "channel shuffle": (nn.ChannelShuffle(2), {"first": 6}),
    "channel shuffle by hand": (
        Do(lambda x: x.view(2, 2, 3, 12, 12).transpose(1, 2).reshape(2, 6, 12, 12)),
        {"first": 6},
    ),
    "two halves": (
        Do(lambda x: torch.cat(x.chunk(2, 1)[::-1], 1)),
        {"first": 3, "first#2": 3},
    ),
    "a gate": (
        Do(lambda x: (x[:, :3] * x[:, 3:].sigmoid()).repeat(1, 2, 1, 1)),
        {"first": 3},
    ),
    "weight_norm": (
        nn.utils.parametrizations.weight_norm(nn.Conv2d(6, 6, 1)),
        {"first": 6, "middle.parametrizations.weight": 6},
    ),
    "spectral_norm": (
        nn.utils.spectral_norm(nn.Conv2d(6, 6, 1)),
        {"first": 6, "middle": 6},
    ),
}


@pytest.mark.parametrize("what", PASSING)
def test_what_passes_channels_on(what: str) -> None:
    torch.manual_seed(0)
    middle, expected = PASSING[what]
    model, x = Around(middle).double().eval(), image()
    randomise(model)
    graph = ChannelGraph.trace(model, (x,))
    assert {group.name: group.size for group in graph.groups} == {**expected, "second": 5}
    assert_function_kept(model, x, graph)


def test_channels_that_are_joined_with_each_other_stay() -> None:
    torch.manual_seed(0)
    model, x = Around(Do(lambda x: x + x.roll(1, 1))).double().eval(), image()
    graph = ChannelGraph.trace(model, (x,))
    assert [group.name for group in graph.groups] == ["second"]
    assert "two places" in graph.frozen["first"]
    assert_function_kept(model, x, graph)


def test_a_channel_whose_weight_is_read_directly_stays() -> None:
    torch.manual_seed(0)
    model, x = Around(Weight()).double().eval(), image()
    randomise(model)
    graph = ChannelGraph.trace(model, (x,))
    sizes = {group.name: group.size for group in graph.groups}
    assert sizes == {"first": 5, "middle.conv": 5, "second": 5}  # all but the first channel
    assert_function_kept(model, x, graph)


class Shared(nn.Module):
    """One convolution called twice in a row, reachable under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 6, 3, padding=1)
        self.twice = nn.Conv2d(6, 6, 3, padding=1)
        self.alias = self.twice
        self.head = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.alias(F.relu(self.twice(F.relu(self.first(x)))))
        return self.head(x.mean((2, 3)))


def test_a_module_called_twice_ties_its_ends() -> None:
    torch.manual_seed(0)
    model, x = Shared().double().eval(), image()
    graph = ChannelGraph.trace(model, (x,))
    [group] = graph.groups
    assert {("twice.weight", 0), ("twice.weight", 1), ("alias.weight", 0), ("alias.weight", 1)} < {
        (m.tensor, m.axis) for m in group.members
    }
    permuted = graph.permute(model.state_dict(), shuffled(graph, 3))
    before = model(x)
    model.load_state_dict(permuted)
    torch.testing.assert_close(model(x), before, rtol=1e-10, atol=1e-10)


class Tied(nn.Module):
    """Two layers with one weight; the second one also reads the network's input."""

    def __init__(self, frozen: bool) -> None:
        super().__init__()
        self.a = nn.Linear(6, 6)
        self.b = nn.Linear(6, 6)
        self.b.weight = self.a.weight
        self.start = nn.Identity() if frozen else nn.Linear(6, 6)
        self.head = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.b(F.relu(self.a(self.start(x))))))


@pytest.mark.parametrize("frozen", [True, False])
def test_tied_weights_are_permuted_together_or_not_at_all(frozen: bool) -> None:
    torch.manual_seed(0)
    model, x = Tied(frozen).double().eval(), torch.randn(3, 6, dtype=torch.float64)
    graph = ChannelGraph.trace(model, (x,))
    assert len(graph.groups) == (0 if frozen else 1)
    before = model(x)
    model.load_state_dict(graph.permute(model.state_dict(), shuffled(graph, 1)))
    torch.testing.assert_close(model(x), before, rtol=1e-10, atol=1e-10)


def test_a_tied_embedding_stays() -> None:
    model = TinyTransformer()
    model.head = nn.Linear(8, 16)
    model.head.weight = model.embed.weight
    graph = ChannelGraph.trace(model, (torch.zeros(1, 4, dtype=torch.long),))
    assert [group.name for group in graph.groups] == ["query", "up"]
    assert_function_kept(model.double(), torch.randint(0, 16, (2, 4)), graph)


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x) if x.sum() > 0 else x


def test_a_model_that_cannot_be_recorded_has_no_groups(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        graph = ChannelGraph.trace(Branching(), (torch.ones(1, 3, 4, 4),))
    assert graph.groups == ()
    assert "control flow" in graph.frozen["Branching"]
    assert "Branching" in caplog.text


def test_a_language_model_has_no_conv_group() -> None:
    from transformers import RobertaConfig, RobertaForSequenceClassification

    config = RobertaConfig(
        vocab_size=32, hidden_size=8, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=16, max_position_embeddings=16,
    )  # fmt: skip
    tokens = {"input_ids": torch.ones(1, 6, dtype=torch.long)}
    graph = ChannelGraph.trace(RobertaForSequenceClassification(config), tokens)
    assert not [group for group in graph.groups if group.kind == "conv"]
    assert graph.frozen


def test_keyword_inputs() -> None:
    x = torch.zeros(1, 3, 12, 12)
    model = ConcatNet()
    assert ChannelGraph.trace(model, {"x": x}) == ChannelGraph.trace(model, (x,))
