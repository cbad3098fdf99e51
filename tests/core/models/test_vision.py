import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from hfedatm_core import models
from hfedatm_core.data.base import DataSpec
from hfedatm_core.models.base import count_parameters, head_name

GRAY = DataSpec("image", 10, (1, 32, 32))
RGB = DataSpec("image", 7, (3, 32, 32))
TEXT = DataSpec("text", 2, (8,), vocab_size=20)


def test_lenet5_is_the_classic_one():
    model = models.build("lenet5", GRAY)
    shapes = [tuple(p.shape) for n, p in model.named_parameters() if n.endswith("weight")]
    assert shapes == [(6, 1, 5, 5), (16, 6, 5, 5), (120, 400), (84, 120), (10, 84)]
    assert count_parameters(model) == 61_706
    # At the classic size pooling to 5x5 changes nothing.
    maps = torch.randn(2, 16, 5, 5)
    assert torch.equal(model.resize(maps), maps)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("size", [16, 28, 32, 64])
def test_lenet5_takes_any_image_with_the_same_parameters(channels, size):
    spec = DataSpec("image", 10, (channels, size, size))
    model = models.build("lenet5", spec)
    assert count_parameters(model) == 61_706 + (channels - 1) * 6 * 25
    assert model(spec.example(3)).shape == (3, 10)


def test_lenet5_with_batch_norm():
    model = models.build("lenet5", RGB, batch_norm=True)
    norms = [m.num_features for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
    assert norms == [6, 16]
    assert model(RGB.example()).shape == (2, 7)


def test_too_small_images_are_refused():
    with pytest.raises(ValueError, match="lenet5 needs images of at least 16x16 pixels, not 8x8"):
        models.build("lenet5", DataSpec("image", 2, (1, 8, 8)))
    with pytest.raises(ValueError, match="vgg11 needs images of at least 32x32"):
        models.build("vgg11", DataSpec("image", 2, (3, 16, 16)))


@pytest.mark.parametrize(
    ("name", "options", "count"),
    [
        # torchvision's published counts, with a classifier for 7 instead of 1,000 classes.
        ("resnet18", {}, 11_689_512 - 993 * 513),
        ("vgg11", {}, 132_863_336 - 993 * 4097),
        ("vgg11", {"batch_norm": True}, 132_868_840 - 993 * 4097),
        ("vgg11", {"small_input": True}, 132_863_336 - 993 * 4097 - (25_088 - 512) * 4096),
    ],
)
def test_parameter_counts(name, options, count):
    with torch.device("meta"):
        model = models.build(name, RGB, **options)
        assert count_parameters(model) == count


@pytest.mark.parametrize("options", [{}, {"small_input": True}])
@pytest.mark.parametrize("spec", [GRAY, RGB])
def test_resnet18_forward(options, spec):
    model = models.build("resnet18", spec, **options).eval()
    assert model(spec.example()).shape == (2, spec.num_classes)


def test_a_small_input_start_keeps_the_resolution():
    model = models.build("resnet18", GRAY, small_input=True).eval()
    seen = []
    model.layer4.register_forward_hook(lambda module, inputs, output: seen.append(output.shape))
    model(GRAY.example(1))
    assert seen == [(1, 512, 4, 4)]


@pytest.mark.parametrize("spec", [GRAY, RGB])
def test_vgg11_forward(spec):
    with torch.device("meta"):
        model = models.build("vgg11", spec, batch_norm=True).eval()
        assert model(torch.empty(2, *spec.input_shape)).shape == (2, spec.num_classes)
        wide = dict(model.named_modules())["classifier.0"]
        assert wide.in_features == 25_088


@pytest.mark.parametrize("name", ["lenet5", "resnet18"])
def test_the_seed_decides_the_weights(name):
    def weights(seed):
        torch.manual_seed(seed)
        return models.build(name, GRAY).state_dict()

    first, same, other = weights(0), weights(0), weights(1)
    assert first.keys() == same.keys()
    assert all(torch.equal(first[key], same[key]) for key in first)
    assert any(not torch.equal(first[key], other[key]) for key in first)


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_pretrained_weights_of_another_number_of_classes(tmp_path, suffix):
    torch.manual_seed(0)
    donor = models.build("resnet18", DataSpec("image", 12, (3, 32, 32)))
    path = tmp_path / f"weights{suffix}"
    if suffix == ".pth":
        torch.save(donor.state_dict(), path)
    else:
        save_file(donor.state_dict(), path)
    model = models.build("resnet18", RGB, pretrained=str(path))
    loaded, given = model.state_dict(), donor.state_dict()
    assert all(torch.equal(loaded[k], given[k]) for k in given if not k.startswith("fc."))
    assert loaded["fc.weight"].shape == (7, 512)
    same = models.build("resnet18", DataSpec("image", 12, (3, 32, 32)), pretrained=path)
    assert torch.equal(same.fc.weight, donor.fc.weight)


def test_weights_that_do_not_fit_are_refused_with_names_and_shapes(tmp_path):
    with pytest.raises(FileNotFoundError, match="download https://.*resnet18.*pth and set pretr"):
        models.build("resnet18", RGB, pretrained=tmp_path / "none.pth")
    state = models.build("resnet18", RGB).state_dict()
    state["conv1.weight"] = torch.zeros(64, 1, 7, 7)
    del state["bn1.bias"]
    torch.save(state, tmp_path / "wrong.pth")
    with pytest.raises(ValueError) as caught:
        models.build("resnet18", RGB, pretrained=tmp_path / "wrong.pth")
    message = str(caught.value)
    assert "(2 differences)" in message and "bn1.bias is missing" in message
    assert "conv1.weight has shape (64, 1, 7, 7), the model needs (64, 3, 7, 7)" in message
    (tmp_path / "broken.pth").write_bytes(b"nonsense")
    with pytest.raises(ValueError, match="cannot read the weights in .*broken.pth"):
        models.build("resnet18", RGB, pretrained=tmp_path / "broken.pth")
    torch.save([1, 2], tmp_path / "list.pth")
    with pytest.raises(ValueError, match="must hold a state dict"):
        models.build("resnet18", RGB, pretrained=tmp_path / "list.pth")
    with pytest.raises(ValueError, match="pretrained weights are for RGB"):
        models.build("resnet18", GRAY, pretrained=tmp_path / "wrong.pth")


def test_the_head_is_the_last_linear_layer():
    assert head_name(models.build("lenet5", GRAY)) == "fc3"
    assert head_name(models.build("resnet18", GRAY)) == "fc"
    assert head_name(nn.Linear(2, 2)) == ""
    with torch.device("meta"):
        assert head_name(models.build("vgg11", RGB)) == "classifier.6"
    with pytest.raises(ValueError, match="Conv2d has no nn.Linear"):
        head_name(nn.Conv2d(1, 1, 1))


@pytest.mark.parametrize("name", ["resnet18", "vgg11"])
def test_pretrained_true_says_what_it_wants(name):
    spec = DataSpec("image", 7, (3, 64, 64))
    with pytest.raises(
        ValueError, match=r"must be the path of a file, not True: download https://"
    ):
        models.build(name, spec, pretrained=True)


def test_unknown_models_options_and_kinds_are_explained():
    with pytest.raises(ValueError) as caught:
        models.build("resnet81", GRAY)
    names = (
        "deberta-base, efficientnet-lite0, lenet5, minilm, mlp, mpnet-base, resnet18, "
        "resnet34, roberta-base, vgg11, vgg13, vgg16"
    )
    assert names in str(caught.value) and "Did you mean 'resnet18'?" in str(caught.value)
    with pytest.raises(ValueError, match="unknown model 'weights'"):
        models.build("weights", GRAY)
    with pytest.raises(ValueError, match="'lenet5' has no option 'batchnorm'.*'batch_norm'"):
        models.build("lenet5", GRAY, batchnorm=True)
    for name in ("lenet5", "resnet18", "vgg11"):
        with pytest.raises(ValueError, match="takes image data, but the data set holds texts"):
            models.build(name, TEXT)
