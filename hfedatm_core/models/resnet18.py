"""ResNet-18 (He et al., 2016) from torchvision."""

from pathlib import Path

from torch import Tensor, nn
from torchvision.models import ResNet, ResNet18_Weights
from torchvision.models.resnet import BasicBlock

from hfedatm_core.data.base import DataSpec
from hfedatm_core.models.base import require_kind
from hfedatm_core.models.weights import load_file


class Block(BasicBlock):  # type: ignore[misc]
    """Torchvision's block without its in-place addition, which DP-SGD does not support."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output."""
        identity = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)) + identity)
        return out  # type: ignore[no-any-return]


def build(
    spec: DataSpec, *, pretrained: Path | str | None = None, small_input: bool = False
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
    """
    require_kind(spec, "image", "resnet18")
    if pretrained and (small_input or spec.input_shape[0] != 3):
        raise ValueError(
            "resnet18: pretrained weights are for RGB images and the ordinary first layer; "
            f"not for small_input={small_input} with {spec.input_shape[0]} channels"
        )
    model: nn.Module = ResNet(Block, [2, 2, 2, 2], num_classes=spec.num_classes)
    if small_input:
        model.conv1 = nn.Conv2d(spec.input_shape[0], 64, 3, padding=1, bias=False)
        model.maxpool = nn.Identity()
    elif spec.input_shape[0] != 3:
        model.conv1 = nn.Conv2d(spec.input_shape[0], 64, 7, stride=2, padding=3, bias=False)
    if pretrained:
        load_file(model, pretrained, ResNet18_Weights.IMAGENET1K_V1.url)
    return model
