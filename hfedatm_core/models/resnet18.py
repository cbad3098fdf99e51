"""ResNet-18 (He et al., 2016) from torchvision."""

from pathlib import Path

from torch import nn
from torchvision.models import ResNet18_Weights

from hfedatm_core.data.base import DataSpec
from hfedatm_core.models.resnets import build_resnet


def build(
    spec: DataSpec,
    *,
    pretrained: Path | str | None = None,
    small_input: bool = False,
    width: float = 1.0,
) -> nn.Module:
    """Build ResNet-18.

    Parameters
    ----------
    spec
        The data.
    pretrained
        A local .pth or .safetensors file with torchvision's weights; a classifier for another
        number of classes is replaced.
    small_input
        Start with a 3x3 convolution of stride 1 and no pooling, as is usual for 32x32 images: with
        the ordinary start the last maps of such an image are only 1x1.
    width
        Multiplies the numbers of channels.
    """
    source = ResNet18_Weights.IMAGENET1K_V1.url
    blocks = [2, 2, 2, 2]
    return build_resnet("resnet18", blocks, source, spec, pretrained, small_input, width)
