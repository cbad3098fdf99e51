"""ResNets of basic blocks (He et al., 2016) from torchvision, of any width and depth."""

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor, nn
from torchvision.models import ResNet
from torchvision.models.resnet import BasicBlock

from hfedatm_core.data.base import DataSpec
from hfedatm_core.models.base import require_kind, scaled
from hfedatm_core.models.weights import load_file


class Block(BasicBlock):  # type: ignore[misc]
    """Torchvision's block without its in-place addition, which DP-SGD does not support."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output."""
        identity = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)) + identity)
        return out  # type: ignore[no-any-return]


def build_resnet(
    name: str,
    blocks: Sequence[int],
    source: str,
    spec: DataSpec,
    pretrained: Path | str | None,
    small_input: bool,
    width: float,
) -> nn.Module:
    """Build a ResNet with so many blocks in each of its four stages."""
    require_kind(spec, "image", name)
    if pretrained and (small_input or spec.input_shape[0] != 3 or width != 1):
        raise ValueError(
            f"{name}: pretrained weights are for RGB images and the ordinary first layer, width 1; "
            f"not for small_input={small_input} with {spec.input_shape[0]} channels and width "
            f"{width:g}"
        )
    model: nn.Module = ResNet(Block, list(blocks), num_classes=spec.num_classes)
    first = 64
    if width != 1:
        first = _change_width(model, blocks, width, spec.num_classes)
    if small_input:
        model.conv1 = nn.Conv2d(spec.input_shape[0], first, 3, padding=1, bias=False)
        model.maxpool = nn.Identity()
    elif spec.input_shape[0] != 3 or width != 1:
        model.conv1 = nn.Conv2d(spec.input_shape[0], first, 7, stride=2, padding=3, bias=False)
    if pretrained:
        load_file(model, pretrained, source)
    return model


def _change_width(model: nn.Module, blocks: Sequence[int], width: float, classes: int) -> int:
    """Replace all layers behind the first convolution; return the number of its filters."""
    planes = [scaled(64 * 2**stage, width) for stage in range(4)]
    model.inplanes = planes[0]  # type: ignore[assignment]  # torchvision's counter
    model.bn1 = nn.BatchNorm2d(planes[0])
    for stage, (size, count) in enumerate(zip(planes, blocks, strict=True)):
        layer = model._make_layer(Block, size, count, stride=2 if stage else 1)  # type: ignore[operator]
        model.register_module(f"layer{stage + 1}", layer)
    for module in model.modules():  # as torchvision does
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    model.fc = nn.Linear(planes[-1], classes)
    return planes[0]
