"""VGG-11 (Simonyan and Zisserman, 2015) from torchvision, with or without BatchNorm."""

from pathlib import Path

from torch import nn

from hfedatm_core.data.base import DataSpec
from hfedatm_core.models.base import require_kind
from hfedatm_core.models.weights import load_file


def build(
    spec: DataSpec,
    *,
    batch_norm: bool = False,
    pretrained: Path | str | None = None,
    small_input: bool = False,
    dropout: float = 0.5,
) -> nn.Module:
    """Build VGG-11.

    Parameters
    ----------
    spec
        The data; images of at least 32x32 pixels.
    batch_norm
        Build the variant with a BatchNorm behind each convolution.
    pretrained
        A local .pth or .safetensors file with torchvision's weights; a classifier for another
        number of classes is replaced.
    small_input
        Pool the last maps to 1x1 instead of 7x7, as is usual for 32x32 images: the first fully
        connected layer then has 512 inputs instead of 25,088.
    dropout
        Dropout rate between the fully connected layers.
    """
    from torchvision.models import VGG11_BN_Weights, VGG11_Weights, vgg11, vgg11_bn

    require_kind(spec, "image", "vgg11")
    channels, height, width = spec.input_shape
    if min(height, width) < 32:
        raise ValueError(f"vgg11 needs images of at least 32x32 pixels, not {height}x{width}")
    if pretrained and (small_input or channels != 3):
        raise ValueError(
            "vgg11: pretrained weights are for RGB images and the ordinary classifier; "
            f"not for small_input={small_input} with {channels} channels"
        )
    builder = vgg11_bn if batch_norm else vgg11
    model: nn.Module = builder(num_classes=spec.num_classes, dropout=dropout)
    if small_input:
        model.avgpool = nn.AdaptiveAvgPool2d(1)
        model.get_submodule("classifier").register_module("0", nn.Linear(512, 4096))
    if channels != 3:
        first = nn.Conv2d(channels, 64, 3, padding=1)
        model.get_submodule("features").register_module("0", first)
    if pretrained:
        weights = VGG11_BN_Weights if batch_norm else VGG11_Weights
        load_file(model, pretrained, weights.IMAGENET1K_V1.url)
    return model
