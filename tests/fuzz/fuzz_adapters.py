"""What is fuzzed of low-rank adapters: replies whose factors are merged by their product."""

from __future__ import annotations

import torch
from fuzz_targets import ClientReplies, Net, StationReplies, Target
from helpers import small_settings
from torch import Tensor, nn

from hfedatm_core import Gram

RANK, OUT = 2, 4
FIRST = "query.lora_A.default"
LAYERS = {FIRST: 3, "head": OUT}


class Adapter(nn.Module):
    """The two factors of an adapter, under the names that ``peft`` gives them."""

    def __init__(self) -> None:
        super().__init__()
        self.lora_A = nn.ModuleDict({"default": nn.Linear(3, RANK, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(RANK, OUT, bias=False)})

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.lora_B["default"](self.lora_A["default"](x))
        return found


class Adapted(nn.Module):
    """What travels of an adapted network: an adapter and the head."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.head = Adapter(), nn.Linear(OUT, 2)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(torch.relu(self.query(x)))
        return found


def adapted() -> nn.Module:
    torch.manual_seed(0)
    return Adapted()


def adapter_grams(node: int) -> dict[str, Gram]:
    generator = torch.Generator().manual_seed(300 + node)
    found = {}
    for name, width in LAYERS.items():
        inputs = torch.randn(9, width, generator=generator)
        found[name] = Gram.from_dense(inputs.T @ inputs / 9, rows=9).shrink(small_settings().alpha)
    return found


NET = Net(adapted, LAYERS, adapter_grams)


def make_adapter_targets() -> list[Target]:
    return [
        ClientReplies("client: train, adapters", "train", net=NET),
        StationReplies("station: train, adapters", "train", net=NET),
        StationReplies(
            "station: train, adapters, bounded", "train", net=NET, bound_factor=2, claim_factor=3
        ),
    ]
