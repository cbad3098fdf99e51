"""Small networks that were trained apart, for the merges that `merge_quality.py` compares.

Every network of a set starts from weights of its own and trains on data of its own: a part of one
data set, or one domain of several. A folder keeps the trained weights: a set is trained once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from hfedatm_core.data import DataSpec, DomainData, digits4, pacs
from hfedatm_core.models import lenet5

_BATCH = 32
_IMAGES = 1500  # at most so many images are a network's own
_TEST_SHARE = 5  # one image in five of PACS is kept for the test


def _mlp(spec: DataSpec) -> nn.Module:
    inputs = torch.Size(spec.input_shape).numel()
    return nn.Sequential(
        nn.Flatten(),
        *(nn.Linear(inputs, 128), nn.ReLU()),
        *(nn.Linear(128, 64), nn.ReLU()),
        nn.Linear(64, spec.num_classes),
    )


def _vgg(spec: DataSpec) -> nn.Module:
    layers: list[nn.Module] = []
    inputs, size = spec.input_shape[0], spec.input_shape[1]
    for width in (16, 32, 64, 64):
        layers += [nn.Conv2d(inputs, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()]
        inputs = width
        if size > 3:
            layers.append(nn.MaxPool2d(2))
            size //= 2
    layers += [nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(64 * 4, 64), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(64, spec.num_classes))


class _Block(nn.Module):
    """The basic block of ResNet-18."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, width, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.down: nn.Module = nn.Identity()
        if stride > 1 or inputs != width:
            self.down = nn.Sequential(
                nn.Conv2d(inputs, width, 1, stride, bias=False), nn.BatchNorm2d(width)
            )

    def forward(self, x: Tensor) -> Tensor:
        inner = functional.relu(self.bn1(self.conv1(x)))
        return functional.relu(self.bn2(self.conv2(inner)) + self.down(x))


def _resnet(spec: DataSpec, width: int = 16) -> nn.Module:
    blocks: list[nn.Module] = []
    inputs = width
    for stage in range(4):
        for number in range(2):
            stride = 2 if stage and not number else 1
            blocks.append(_Block(inputs, width * 2**stage, stride))
            inputs = width * 2**stage
    return nn.Sequential(
        nn.Conv2d(spec.input_shape[0], width, 3, 2, 1, bias=False),
        *(nn.BatchNorm2d(width), nn.ReLU(), *blocks),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, spec.num_classes)),
    )


def _mobilenet(spec: DataSpec) -> nn.Module:
    def step(inputs: int, outputs: int, stride: int) -> list[nn.Module]:
        return [
            nn.Conv2d(inputs, inputs, 3, stride, 1, groups=inputs, bias=False),
            *(nn.BatchNorm2d(inputs), nn.ReLU()),
            nn.Conv2d(inputs, outputs, 1, bias=False),
            *(nn.BatchNorm2d(outputs), nn.ReLU()),
        ]

    return nn.Sequential(
        nn.Conv2d(spec.input_shape[0], 16, 3, 2, 1, bias=False),
        *(nn.BatchNorm2d(16), nn.ReLU()),
        *(*step(16, 32, 1), *step(32, 64, 2), *step(64, 64, 1), *step(64, 128, 2)),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, spec.num_classes)),
    )


class _Layer(nn.Module):
    """A layer of a vision transformer: attention and two Linear layers, each behind a norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        seen = self.before(x)
        parts = (
            part(seen).unflatten(2, (self.heads, -1)).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        x = x + self.out(functional.scaled_dot_product_attention(*parts).transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.between(x))))


class Transformer(nn.Module):
    """A vision transformer: patches as tokens, the mean of the tokens for the classes."""

    def __init__(self, spec: DataSpec, width: int = 48, heads: int = 4, layers: int = 3) -> None:
        super().__init__()
        side = spec.input_shape[1] // 4
        self.patches = nn.Conv2d(spec.input_shape[0], width, side, side)
        places = (spec.input_shape[1] // side) ** 2
        self.places = nn.Parameter(0.02 * torch.randn(1, places, width))
        self.layers = nn.Sequential(*(_Layer(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, spec.num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits."""
        tokens = self.patches(x).flatten(2).transpose(1, 2) + self.places
        return self.head(self.norm(self.layers(tokens)).mean(1))


@dataclass(frozen=True)
class Architecture:
    """How to build a network, and how long to train it."""

    build: Callable[[DataSpec], nn.Module]
    epochs: int
    lr: float


ARCHITECTURES = {
    "mlp": Architecture(_mlp, 8, 0.02),
    "lenet5": Architecture(lenet5.build, 8, 0.02),
    "vgg-bn": Architecture(_vgg, 6, 0.05),
    "resnet18-bn": Architecture(_resnet, 6, 0.05),
    "mobilenet": Architecture(_mobilenet, 10, 0.05),
    "vit": Architecture(Transformer, 20, 0.05),
}
Part = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Task:
    """What every network of a set was trained on, and what the merged one is tested on."""

    name: str
    spec: DataSpec
    parts: tuple[Part, ...]
    tests: tuple[Part, ...]


def load_task(name: str, networks: int, data_dir: Path) -> Task:
    """Return one of the tasks ``digits-data``, ``digits-domains``, ``pacs-data``, ``pacs-domains``.

    ``-data``: every network has a part of the same images; ``-domains``: a domain of its own.
    """
    source, _, kind = name.partition("-")
    if source == "digits":
        domains = list(digits4.DOMAINS)[: networks if kind == "domains" else 1]
        data = digits4.load(data_dir, size=28, domains=domains)
        sizes = {"mnist": 1000, "mnistm": 1000, "usps": 2007, "optdigits": 397}
        split = [_last(data, d, min(sizes[d], len(data.domains[d]) // 4)) for d in domains]
    else:
        domains = list(pacs.DOMAINS)[: networks if kind == "domains" else None]
        data = pacs.load(data_dir, size=32, domains=domains)
        split = [_some(data, domain) for domain in domains]
    if kind == "domains":
        if len(split) < networks:
            raise ValueError(f"{name}: there are {len(split)} domains, not {networks}")
        parts = [train for train, _ in split]
    else:
        images = torch.cat([train[0] for train, _ in split])
        labels = torch.cat([train[1] for train, _ in split])
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
        parts = [(images[some], labels[some]) for some in order.chunk(networks)]
    parts = [(images[:_IMAGES], labels[:_IMAGES]) for images, labels in parts]
    return Task(name, data.spec, tuple(parts), tuple(test for _, test in split))


def _scaled(images: Tensor, spec: DataSpec) -> Tensor:
    mean, std = torch.tensor(spec.mean), torch.tensor(spec.std)
    return (images.float() / 255 - mean.view(-1, 1, 1)) / std.view(-1, 1, 1)


def _last(data: DomainData, domain: str, count: int) -> tuple[Part, Part]:
    found = data.domains[domain]
    x, y = _scaled(found.inputs, data.spec), found.targets
    return (x[:-count], y[:-count]), (x[-count:], y[-count:])


def _some(data: DomainData, domain: str) -> tuple[Part, Part]:
    found = data.domains[domain]
    x, y = _scaled(found.inputs, data.spec), found.targets
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(1))
    test = order[: len(x) // _TEST_SHARE]
    train = order[len(x) // _TEST_SHARE :]
    return (x[train], y[train]), (x[test], y[test])


def trained(
    architecture: str, task: Task, seed: int, cache: Path, epochs: int | None = None
) -> list[nn.Module]:
    """Return the networks of one set in evaluation mode, trained now or before."""
    cache.mkdir(parents=True, exist_ok=True)
    kind = ARCHITECTURES[architecture]
    networks = []
    for number, (images, labels) in enumerate(task.parts):
        rounds = kind.epochs if epochs is None else epochs
        file = cache / f"{architecture}_{task.name}_{len(task.parts)}_{seed}_{number}_{rounds}.pt"
        torch.manual_seed(1000 * seed + number)
        model = kind.build(task.spec)
        if file.is_file():
            model.load_state_dict(torch.load(file, weights_only=True))
        else:
            _train(model, images, labels, rounds, kind.lr)
            torch.save(model.state_dict(), file)
        networks.append(model.eval())
    return networks


def _train(model: nn.Module, images: Tensor, labels: Tensor, epochs: int, lr: float) -> None:
    steps = epochs * -(-len(images) // _BATCH)
    optimizer = torch.optim.SGD(model.parameters(), lr, momentum=0.9, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(1, steps))
    model.train()
    for _ in range(epochs):
        for some in torch.randperm(len(images)).split(_BATCH):
            if len(some) < 2:  # BatchNorm needs more than one image
                continue
            loss = functional.cross_entropy(model(images[some]), labels[some])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()


@torch.no_grad()
def accuracy(task: Task, predict: Callable[[Tensor], Tensor]) -> float:
    """Return the accuracy in percent, the mean over the test sets."""
    shares = []
    for images, labels in task.tests:
        hits = sum(
            int((predict(x).argmax(1) == y).sum())
            for x, y in zip(images.split(256), labels.split(256), strict=True)
        )
        shares.append(100.0 * hits / len(images))
    return sum(shares) / len(shares)
