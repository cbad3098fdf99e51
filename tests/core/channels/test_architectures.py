"""Networks of torchvision, timm and Hugging Face keep their function in both modes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))
pytest.importorskip("timm")

import architectures  # noqa: E402

# Attention, or channels that two structures share.
LESS = {"timm fastvit_t8"}
QUICK = ("mobilenet_v3_small", "shufflenet_v2_x1_0", "transformers Bert", "transformers ViT")


def check(name: str) -> None:
    [(make, inputs)] = [(m, i) for n, m, i in architectures.networks() if n == name]
    torch.manual_seed(0)
    row = architectures.examine(name, make(), inputs)
    assert row.groups > 0
    assert row.evaluation < 1e-10
    assert row.training < 1e-10
    if row.aligned is not None and name not in LESS:
        assert row.aligned >= 0.9


@pytest.mark.parametrize("name", QUICK)
def test_a_network_is_aligned_and_keeps_its_function(name: str) -> None:
    check(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n, _, _ in architectures.networks() if n not in QUICK])
def test_every_network_is_aligned_and_keeps_its_function(name: str) -> None:
    check(name)
