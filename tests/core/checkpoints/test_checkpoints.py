"""Checkpoints in files are aligned and merged, and what does not fit is refused by name."""

import sys
import weakref

import pytest
import torch
from nets import LeNet5, ResidualCNN
from safetensors.torch import save_file
from torch import nn

from hfedatm_core import (
    AlignmentOptions,
    ChannelGraph,
    Update,
    collect_grams,
    collect_profiles,
    merge_apart,
)
from hfedatm_core.checkpoints import (
    merge_checkpoints,
    open_network,
    read_grams,
    read_state,
    write_grams,
    write_state,
)
from hfedatm_core.merge_table import layer_rows

EXAMPLE = torch.zeros(1, 3, 16, 16)


def net(seed: int, **options) -> LeNet5:
    torch.manual_seed(seed)
    return LeNet5(**options).eval()


def shuffled(model: nn.Module, seed: int = 0) -> dict[str, torch.Tensor]:
    """Return the same function with every channel that may move at another place."""
    graph = ChannelGraph.trace(model, (EXAMPLE,))
    draw = torch.Generator().manual_seed(seed)
    orders = {group.name: torch.randperm(group.size, generator=draw) for group in graph.groups}
    return graph.permute(model.state_dict(), orders)


@pytest.fixture
def files(tmp_path):
    """Write one network three times, in three orders and three formats."""
    model = net(0)
    write_state(tmp_path / "a.safetensors", model.state_dict())
    write_state(tmp_path / "b.pt", shuffled(model, 1))
    wrapped = {f"module.{name}": value for name, value in shuffled(model, 2).items()}
    torch.save({"state_dict": wrapped, "epoch": 7}, tmp_path / "c.ckpt")
    return [tmp_path / name for name in ("a.safetensors", "b.pt", "c.ckpt")]


def test_networks_that_differ_in_order_alone_merge_to_the_first(files):
    merged = merge_checkpoints(files, net(9), EXAMPLE)
    wanted = net(0).state_dict()
    assert merged.moved > 0
    assert list(merged.state) == list(wanted)
    for name, value in wanted.items():
        torch.testing.assert_close(merged.state[name], value)


def test_the_table_says_what_happened_to_every_layer(files):
    rows = {row.layer: row for row in layer_rows(merge_checkpoints(files, net(9), EXAMPLE))}
    assert list(rows) == ["conv1", "conv2", "fc1", "fc2", "fc3"]
    assert rows["conv2"].aligned and rows["conv2"].moved > 16
    assert rows["conv2"].before > 0.5 and rows["conv2"].after == pytest.approx(0, abs=1e-5)
    assert not rows["fc3"].aligned and "output" in rows["fc3"].frozen
    assert rows["fc1"].how == "averaged" and rows["fc1"].averaged


def test_a_narrower_scope_is_seen_in_the_table(files):
    rows = layer_rows(
        merge_checkpoints(files, net(9), EXAMPLE, alignment=AlignmentOptions(scope="conv"))
    )
    assert {row.layer for row in rows if row.aligned} == {"conv1", "conv2"}
    assert "scope" in next(row.frozen for row in rows if row.layer == "fc1")


def test_a_network_that_cannot_be_traced_says_so_in_the_result(tmp_path):
    class Branching(LeNet5):
        def forward(self, x):
            return super().forward(x) if x.sum() > 0 else super().forward(-x)

    paths = [tmp_path / f"{seed}.pt" for seed in range(2)]
    for seed, path in enumerate(paths):
        write_state(path, net(seed).state_dict())
    merged = merge_checkpoints(paths, Branching(), EXAMPLE)
    assert merged.graph.frozen and not merged.graph.groups
    assert all("cannot record" in row.frozen for row in layer_rows(merged))


def test_layers_with_grams_are_merged_by_regmean(tmp_path):
    models, paths, grams = [net(0), net(1)], [], []
    torch.manual_seed(3)
    for number, model in enumerate(models):
        paths.append(tmp_path / f"{number}.safetensors")
        grams.append(tmp_path / f"{number}.grams")
        write_state(paths[-1], model.state_dict())
        batch = torch.randn(64, 3, 16, 16)
        write_grams(grams[-1], collect_grams(model, [(batch, None)]), paths[-1])
    merged = merge_checkpoints(paths, net(9), EXAMPLE, grams=grams[::-1])  # in any order
    by_name = merge_checkpoints(paths, net(9), EXAMPLE, grams=grams)
    assert {name: r.how for name, r in merged.report.layers.items()} == {
        **dict.fromkeys(("conv1", "conv2"), "averaged"),
        **dict.fromkeys(("fc1", "fc2", "fc3"), "regmean"),
    }
    assert all(torch.equal(merged.state[n], value) for n, value in by_name.state.items())


def test_networks_with_batch_norm_are_merged_with_statistics_that_fit(tmp_path):
    """Of one network in two orders the merge is that network."""
    model = net(0, batch_norm=True)
    torch.manual_seed(1)
    images = torch.randn(256, 3, 16, 16)
    model.train()(images)
    model.eval()
    for name, state in (("a", model.state_dict()), ("b", shuffled(model))):
        write_state(tmp_path / f"{name}.pt", state)
        own = net(0, batch_norm=True)
        own.load_state_dict(state)
        grams = collect_grams(own, [(images, None)], full=True)
        write_grams(tmp_path / f"{name}.grams", grams, tmp_path / f"{name}.pt")
    paths, grams = ([tmp_path / f"{n}.{end}" for n in "ab"] for end in ("pt", "grams"))
    merged = merge_checkpoints(paths, net(9, batch_norm=True), EXAMPLE, grams=grams)
    assert merged.moved > 0
    again = net(9, batch_norm=True)
    again.load_state_dict(merged.state)
    torch.testing.assert_close(again(images), model(images), rtol=1e-2, atol=1e-2)
    rows = {row.layer: row for row in layer_rows(merged)}
    assert rows["conv2"].after == pytest.approx(0, abs=1e-3)
    assert rows["conv2"].before > 0.1


def test_profiles_belong_to_the_checkpoints_in_their_order(tmp_path):
    paths, grams, profiles = [], [], []
    graph = ChannelGraph.trace(net(0), EXAMPLE)
    for seed in (0, 1):
        torch.manual_seed(seed)
        batch, labels = torch.randn(16, 3, 16, 16), torch.arange(16) % 10
        paths.append(tmp_path / f"{seed}.pt")
        grams.append(tmp_path / f"{seed}.grams")
        write_state(paths[-1], net(seed).state_dict())
        write_grams(grams[-1], collect_grams(net(seed), [(batch, None)], full=True), paths[-1])
        profiles.append(collect_profiles(net(seed), graph, [(batch, labels)], classes=10))
    merged = merge_checkpoints(paths, net(9), EXAMPLE, grams=grams, profiles=profiles)
    expected = merge_apart(
        [
            Update(read_state(path), read_grams(file)[0], profiles=found)
            for path, file, found in zip(paths, grams, profiles, strict=True)
        ],
        graph,
    )
    for name, value in merged.state.items():
        torch.testing.assert_close(value, expected.state[name])
    with pytest.raises(ValueError, match="there are 1"):
        merge_checkpoints(paths, net(9), EXAMPLE, grams=grams, profiles=profiles[:1])
    with pytest.raises(ValueError, match="profiles need Grams"):
        merge_checkpoints(paths, net(9), EXAMPLE, profiles=profiles)


def test_grams_of_another_checkpoint_are_refused(tmp_path):
    paths = [tmp_path / f"{seed}.pt" for seed in range(3)]
    for seed, path in enumerate(paths):
        write_state(path, net(seed).state_dict())
    grams = collect_grams(net(2), [(torch.randn(8, 3, 16, 16), None)])
    write_grams(tmp_path / "2.grams", grams, paths[2])
    with pytest.raises(ValueError, match=r"2\.grams were measured for none of these"):
        merge_checkpoints(paths[:2], net(9), EXAMPLE, grams=[tmp_path / "2.grams"])


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (lambda: net(1, classes=7).state_dict(), r"other\.pt has 7 classes, the model 10"),
        (lambda: ResidualCNN().state_dict(), r"other\.pt does not fit the model: conv1\.weight is"),
        (
            lambda: {n: v for n, v in net(1).state_dict().items() if n != "fc2.bias"},
            r"fc2\.bias is missing \(1 differences, 1 of them missing tensors\)",
        ),
        (lambda: {**net(1).state_dict(), "fc9.bias": torch.zeros(1)}, "fc9.bias is not in the"),
    ],
)
def test_what_does_not_fit_is_named_before_anything_is_merged(tmp_path, other, message):
    write_state(tmp_path / "a.pt", net(0).state_dict())
    write_state(tmp_path / "other.pt", other())
    read = []
    with pytest.raises(ValueError, match=message):
        paths = [tmp_path / "a.pt", tmp_path / "other.pt"]
        merge_checkpoints(paths, net(9), EXAMPLE, on_read=read.append)
    assert not read


def test_one_checkpoint_twice_is_no_merge(files):
    with pytest.raises(ValueError, match="two different"):
        merge_checkpoints([files[0], files[0]], net(9), EXAMPLE)


class Evil:
    def __reduce__(self):
        return (sys.exit, ("unpickled",))


def test_a_pickled_object_is_refused_unread(tmp_path):
    torch.save({"weights": net(0).state_dict(), "extra": Evil()}, tmp_path / "evil.pt")
    with pytest.raises(ValueError, match=r"evil\.pt.*save nothing but model\.state_dict"):
        read_state(tmp_path / "evil.pt")


@pytest.mark.parametrize("ending", ["pt", "safetensors"])
def test_a_broken_file_is_named(tmp_path, ending):
    (tmp_path / f"half.{ending}").write_bytes(b"\x80\x02 no tensors")
    with pytest.raises(ValueError, match=f"cannot read the weights in .*half.{ending}"):
        read_state(tmp_path / f"half.{ending}")


@pytest.mark.parametrize("measured", [False, True], ids=["alone", "with Grams"])
def test_two_checkpoints_are_in_memory_whatever_their_number(tmp_path, monkeypatch, measured):
    import hfedatm_core.checkpoints.fitting as fitting

    paths = [tmp_path / f"{seed}.safetensors" for seed in range(7)]
    for seed, path in enumerate(paths):
        save_file(net(seed).state_dict(), path)
    grams = [path.with_suffix(".grams") for path in paths] if measured else []
    for seed, path in enumerate(grams):
        batch = torch.randn(64, 3, 16, 16, generator=torch.Generator().manual_seed(seed))
        write_grams(path, collect_grams(net(seed), [(batch, None)], full=True), paths[seed])
    read: list[list[weakref.ref]] = []
    alive_at_each_read = []

    def reading(path):
        state = read_state(path)
        read.append([weakref.ref(value) for value in state.values()])
        alive_at_each_read.append(sum(any(ref() is not None for ref in refs) for refs in read))
        return state

    monkeypatch.setattr(fitting, "read_state", reading)
    merge_checkpoints(paths, net(9), EXAMPLE, grams=grams)
    assert alive_at_each_read == [1, 2, 2, 2, 2, 2, 2]


def test_a_network_gets_the_classes_of_a_checkpoint():
    shapes = {"fc.weight": (7, 512), "fc.bias": (7,)}
    assert open_network("torchvision:resnet18", like=shapes).model.fc.out_features == 7
    assert open_network("torchvision:resnet18").model.fc.out_features == 1000


def test_torchvision_merges_without_a_linear_head(tmp_path):
    """SqueezeNet's classifier is a convolution; its number of classes is found all the same."""
    like = {"classifier.1.weight": (5, 512, 1, 1), "classifier.1.bias": (5,)}
    model = open_network("torchvision:squeezenet1_1", like=like).model
    assert model.classifier[1].out_channels == 5


def test_transformers_are_built_from_a_folder(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=24,
        vocab_size=50,
        num_labels=3,
    )
    for seed in range(2):
        torch.manual_seed(seed)
        made = transformers.BertForSequenceClassification(config)
        made.save_pretrained(tmp_path / str(seed))
    network = open_network(f"transformers:{tmp_path / '0'}")
    assert type(network.model).__name__ == "BertForSequenceClassification"
    merged = merge_checkpoints([tmp_path / "0", tmp_path / "1"], network.model, network.example)
    network.model.load_state_dict(merged.state)
    states = [read_state(tmp_path / str(seed)) for seed in range(2)]
    mean = (states[0]["classifier.bias"] + states[1]["classifier.bias"]) / 2
    torch.testing.assert_close(merged.state["classifier.bias"], mean)


def test_timm_models_bring_their_input_size():
    pytest.importorskip("timm")
    network = open_network("timm:resnet10t", like={"fc.weight": (4, 512), "fc.bias": (4,)})
    assert network.model.fc.out_features == 4
    assert network.example.shape == (1, 3, 176, 176)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("torchvision:resnet81", "torchvision has no model 'resnet81'. Did you mean 'resnet18'"),
        ("resnet18", "cannot build 'resnet18'; write torchvision:NAME"),
        ("transformers:nowhere", "there is no nowhere"),
        (lambda: 3, "returned int, not a torch.nn.Module"),
        (lambda: nn.Linear(2, 2), "no example input"),
    ],
)
def test_a_source_that_is_none_is_named(source, message):
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        open_network(source)
