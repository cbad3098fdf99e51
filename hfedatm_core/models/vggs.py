"""VGG networks (Simonyan and Zisserman, 2015) from torchvision, of any width and depth."""

from collections.abc import Sequence
from pathlib import Path

from torch import nn
from torchvision.models.vgg import VGG, make_layers

from hfedatm_core.data.base import DataSpec
from hfedatm_core.models.base import require_kind, scaled
from hfedatm_core.models.weights import load_file

_STAGES = (64, 128, 256, 512, 512)


def build_vgg(
    name: str,
    layers: Sequence[int],
    source: str,
    spec: DataSpec,
    batch_norm: bool,
    pretrained: Path | str | None,
    small_input: bool,
    dropout: float,
    width: float,
) -> nn.Module:
    """Build a VGG with so many convolutions in each of its five stages."""
    require_kind(spec, "image", name)
    channels, *size = spec.input_shape
    if min(size) < 32:
        raise ValueError(f"{name} needs images of at least 32x32 pixels, not {size[0]}x{size[1]}")
    if pretrained and (small_input or channels != 3 or width != 1):
        raise ValueError(
            f"{name}: pretrained weights are for RGB images and the ordinary classifier, width 1; "
            f"not for small_input={small_input} with {channels} channels and width {width:g}"
        )
    plan: list[str | int] = []
    for filters, count in zip(_STAGES, layers, strict=True):
        plan += [*[scaled(filters, width)] * count, "M"]
    model: nn.Module = VGG(make_layers(plan, batch_norm), spec.num_classes, dropout=dropout)
    last, hidden = scaled(512, width), scaled(4096, width)
    classifier = model.get_submodule("classifier")
    if small_input:
        model.avgpool = nn.AdaptiveAvgPool2d(1)
    if small_input or width != 1:
        inputs = last if small_input else last * 49
        classifier.register_module("0", nn.Linear(inputs, hidden))
    if width != 1:
        classifier.register_module("3", nn.Linear(hidden, hidden))
        classifier.register_module("6", nn.Linear(hidden, spec.num_classes))
    if channels != 3:
        first = nn.Conv2d(channels, scaled(64, width), 3, padding=1)
        model.get_submodule("features").register_module("0", first)
    if pretrained:
        load_file(model, pretrained, source)
    return model
