"""Small networks that together use every rule of the channel tracer."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.models import VGG, resnet18
from torchvision.models.vgg import cfgs, make_layers


class LeNet5(nn.Module):
    def __init__(self, batch_norm: bool = False, classes: int = 10) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 6, 5, padding=2)
        self.bn1 = nn.BatchNorm2d(6) if batch_norm else nn.Identity()
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.bn2 = nn.BatchNorm2d(16) if batch_norm else nn.Identity()
        self.fc1 = nn.Linear(16 * 2 * 2, 20)
        self.fc2 = nn.Linear(20, 12)
        self.fc3 = nn.Linear(12, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(torch.relu(self.bn1(self.conv1(x))), 2)
        x = F.avg_pool2d(self.bn2(self.conv2(x)).relu(), 2)
        x = x.view(x.size(0), -1)
        return self.fc3(F.relu(self.fc2(F.dropout(F.relu(self.fc1(x)), training=self.training))))


class KernelNet(nn.Module):
    """Convolutions of any kernel size; all other shapes stay the same."""

    def __init__(self, kernel: int = 3) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, kernel, padding=kernel // 2)
        self.conv2 = nn.Conv2d(8, 8, kernel, padding=kernel // 2)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.conv2(F.relu(self.conv1(x))))
        return self.head(x.mean((2, 3)))


class ResidualCNN(nn.Module):
    """A user's own residual network: additions in all spellings, scaling, a 1x1 shortcut."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(6)
        self.inner = nn.Conv2d(6, 5, 3, padding=1)
        self.outer = nn.Conv2d(5, 6, 3, padding=1)
        self.direct = nn.Conv2d(6, 6, 3, padding=1)
        self.down = nn.Conv2d(6, 8, 3, stride=2, padding=1)
        self.shortcut = nn.Conv2d(6, 8, 1, stride=2)
        self.slope = nn.PReLU(8)
        self.fc = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.stem(x)))
        x = torch.add(x, self.outer(self.inner(x).sigmoid()) * 0.5)
        x += self.direct(x)
        x = self.slope(self.down(x) + self.shortcut(x))
        return self.fc(torch.flatten(F.adaptive_avg_pool2d(x, 1), 1))


class ConcatNet(nn.Module):
    """Like DenseNet: every layer reads all earlier ones, and the input itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(7)
        self.second = nn.Conv2d(7, 5, 3, padding=1)
        self.third = nn.Conv2d(12, 6, 1)
        self.fc = nn.Linear(18 * 16, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([x, self.first(x)], 1)
        x = torch.cat((F.relu(self.norm(x)), self.second(x)), dim=1)
        x = torch.cat([x, self.third(x)], 1)
        return self.fc(F.adaptive_avg_pool2d(x, 4).flatten(1))


class SeparableNet(nn.Module):
    """Depthwise convolutions, one with a multiplier, and a squeeze-and-excitation gate."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3, padding=1)
        self.depth = nn.Conv2d(6, 6, 3, padding=1, groups=6)
        self.point = nn.Conv2d(6, 8, 1)
        self.wide = nn.Conv2d(8, 16, 3, padding=1, groups=8)
        self.norm = nn.BatchNorm2d(16)
        self.squeeze = nn.Conv2d(16, 4, 1)
        self.excite = nn.Conv2d(4, 6, 1)
        self.last = nn.Conv2d(16, 6, 1)
        self.fc = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.hardswish(self.point(F.relu6(self.depth(F.relu(self.stem(x))))))
        x = self.norm(self.wide(x))
        gate = torch.sigmoid(self.excite(F.silu(self.squeeze(x.mean([2, 3], keepdim=True)))))
        return self.fc((self.last(x) * gate).amax((2, 3)))


class TinyTransformer(nn.Module):
    """Attention written out; only the hidden units of its MLP are free."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, width)
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 12)
        self.down = nn.Linear(12, width)
        self.head = nn.Linear(width, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        scores = self.query(x) @ self.key(x).transpose(-2, -1)
        x = x + scores.softmax(-1) @ self.value(x)
        x = x + self.down(F.gelu(self.up(self.norm(x))))
        return self.head(x.mean(1))


class ConvTransformer(nn.Module):
    """Convolutional patches into ``nn.MultiheadAttention``, a block of torch's own."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 8, 4, stride=4)
        self.place = nn.Parameter(torch.zeros(1, 16, 8))
        self.attend = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2) + self.place
        x = x + self.attend(x, x, x, need_weights=False)[0]
        return self.head(x.mean(1))


class ChannelsLast(nn.Module):
    """Channels change their axis; Linear layers act where convolutions did."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3, padding=1)
        self.pad = nn.ZeroPad2d(1)
        self.mix = nn.Linear(6, 7)
        self.back = nn.Conv2d(7, 5, 3)
        self.up = nn.Upsample(scale_factor=2)
        self.fc = nn.Linear(5 * 4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.mix(torch.tanh(self.conv(x)).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        x = self.up(self.back(self.pad(x)))
        x = F.adaptive_max_pool2d(x, (2, 2)).reshape(x.shape[0], -1, 2)
        return self.fc(x.flatten(1))


def small_vgg(batch_norm: bool) -> nn.Module:
    """torchvision's VGG-11 with its own 8 convolutions and a classifier that fits a test."""
    net = VGG(make_layers(cfgs["A"], batch_norm=batch_norm), init_weights=False)
    net.avgpool = nn.AdaptiveAvgPool2d(2)
    net.classifier = nn.Sequential(
        *(nn.Linear(512 * 4, 32), nn.ReLU(True), nn.Dropout()),
        *(nn.Linear(32, 24), nn.ReLU(True), nn.Dropout(), nn.Linear(24, 7)),
    )
    return net


def image(batch: int = 2, side: int = 12, channels: int = 3) -> Tensor:
    return torch.randn(batch, channels, side, side, dtype=torch.float64)


SMALL: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "lenet5": (LeNet5, lambda: image(side=16)),
    "lenet5-bn": (lambda: LeNet5(batch_norm=True), lambda: image(side=16)),
    "kernel": (KernelNet, image),
    "residual": (ResidualCNN, image),
    "concat": (ConcatNet, image),
    "separable": (SeparableNet, image),
    "channels-last": (ChannelsLast, image),
    "transformer": (TinyTransformer, lambda: torch.randint(0, 16, (2, 5))),
    "conv-transformer": (ConvTransformer, lambda: image(side=16)),
}
LARGE: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "vgg11": (lambda: small_vgg(False), lambda: image(1, 64)),
    "vgg11-bn": (lambda: small_vgg(True), lambda: image(1, 64)),
    "resnet18": (lambda: resnet18(num_classes=7), lambda: image(1, 32)),
}


def build(name: str, seed: int = 0) -> tuple[nn.Module, Tensor]:
    """Return a network in float64 and evaluation mode with random values, and an input for it."""
    make, example = {**SMALL, **LARGE}[name]
    torch.manual_seed(seed)
    model = make().double().eval()
    randomise(model)
    return model, example()


def randomise(model: nn.Module) -> None:
    """Draw all values, so that no bias is zero and no BatchNorm the identity."""
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.is_floating_point():
                fan_in = tensor[0].numel() if tensor.dim() > 1 else 4
                tensor.normal_(0, fan_in**-0.5)
        for name, buffer in model.named_buffers():
            if name.endswith("running_var"):
                buffer.uniform_(0.5, 2)
            elif name.endswith("num_batches_tracked"):
                buffer.fill_(17)


def output(model: nn.Module, state: dict[str, Tensor], x: Tensor) -> Tensor:
    """Return the model's output with the given weights."""
    with torch.no_grad():
        return torch.func.functional_call(model, state, (x,), tie_weights=False)
