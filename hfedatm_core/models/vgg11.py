"""VGG-11 (Simonyan and Zisserman, 2015) from torchvision, with or without BatchNorm."""

from pathlib import Path

from torch import nn
from torchvision.models import VGG11_BN_Weights, VGG11_Weights

from hfedatm_core.data.base import DataSpec
from hfedatm_core.models.vggs import build_vgg


def build(
    spec: DataSpec,
    *,
    batch_norm: bool = False,
    pretrained: Path | str | None = None,
    small_input: bool = False,
    dropout: float = 0.5,
    width: float = 1.0,
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
    width
        Multiplies the numbers of filters and hidden units.
    """
    weights = VGG11_BN_Weights if batch_norm else VGG11_Weights
    source, layers = weights.IMAGENET1K_V1.url, [1, 1, 2, 2, 2]
    return build_vgg(
        "vgg11", layers, source, spec, batch_norm, pretrained, small_input, dropout, width
    )
