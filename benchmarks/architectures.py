"""Which networks can be aligned: classifiers of torchvision, timm and Hugging Face.

Each is traced, its free channels are put into a random order, and its outputs in evaluation and in
training mode are compared with those before, in float64. What is drawn at random is switched off.
Writes the rows of docs/architectures.md.
"""

from __future__ import annotations

import argparse
import copy
import inspect
import logging
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hfedatm_core import ChannelGraph

PAGE = Path(__file__).parents[1] / "docs" / "architectures.md"
TORCHVISION = """alexnet convnext_tiny densenet121 efficientnet_b0 efficientnet_v2_s googlenet
inception_v3 maxvit_t mnasnet0_5 mobilenet_v2 mobilenet_v3_small regnet_y_400mf regnet_x_400mf
resnet18 resnext50_32x4d wide_resnet50_2 shufflenet_v2_x1_0 squeezenet1_0 swin_t swin_v2_t vgg11_bn
vit_b_16""".split()
TIMM = """repvgg_a0 mobileone_s0 mobilenetv4_conv_small ese_vovnet19b_dw cspresnet50 dpn68
tf_efficientnet_lite0 resnetv2_50 res2net50_26w_4s resnest14d skresnet18 convnext_atto nf_resnet50
ghostnet_100 hrnet_w18_small dla34 xception41 vit_tiny_patch16_224 seresnet50 gernet_s rexnet_100
edgenext_xx_small fastvit_t8""".split()
SIDES = {"inception_v3": 299, "maxvit_t": 224, "vit_b_16": 224, "vit_tiny_patch16_224": 224}
TEXT = {
    **{"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"intermediate_size": 24, "max_position_embeddings": 32},
}
TEXT_MODELS = "Bert Roberta Deberta DebertaV2 DistilBert MPNet Albert Electra".split()
HEAD = """# Which networks align

`python benchmarks/architectures.py` traces each network with random weights and puts all free
channels into a random order. It compares the outputs before and after, in float64, in evaluation
and in training mode (without dropout and stochastic depth). If a reordering is exact, the outputs
change by rounding only.

- *Aligned* is the share of the convolutions' parameters whose filters are in a channel group. A
  convolution that writes the network's output is not counted, because the order of its channels
  is the order of the classes. A dash means that the network has no convolution.
- *Groups* counts the channel groups, which can be reordered. Attention heads, units within heads
  and units of the MLP are groups of `ot-scope=all` only.
- *Change* is the largest difference of an output, relative to the largest output.
- *Frozen* names the first layer whose channels keep their order, and says why.

The networks of Hugging Face are small here. The script knows further networks, which have not been
measured for this page.

| network | aligned | groups | change, evaluation | change, training | frozen |
|---|---:|---:|---:|---:|---|
"""


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    name: str
    aligned: float | None
    groups: int
    evaluation: float
    training: float
    frozen: str

    def __str__(self) -> str:
        share = "–" if self.aligned is None else f"{100 * self.aligned:.1f} %"
        changes = f"{self.evaluation:.0e} | {self.training:.0e}"
        return f"| {self.name} | {share} | {self.groups} | {changes} | {self.frozen} |"


def networks() -> Iterator[tuple[str, Callable[[], nn.Module], Any]]:
    import timm
    import transformers
    from torchvision import models

    for name in TORCHVISION:
        fixed = {"init_weights": False} if name in ("googlenet", "inception_v3") else {}
        side = SIDES.get(name, 64)
        yield name, lambda n=name, k=fixed: models.get_model(n, num_classes=5, **k), image(side)
    for name in TIMM:
        side = SIDES.get(name, 64)
        yield f"timm {name}", lambda n=name: timm.create_model(n, num_classes=5), image(side)
    tokens = {
        "input_ids": torch.randint(3, 60, (2, 8), generator=torch.Generator().manual_seed(0)),
        "attention_mask": torch.ones(2, 8, dtype=torch.long),
    }
    for name in TEXT_MODELS:
        yield (
            f"transformers {name}",
            lambda n=name: getattr(transformers, f"{n}ForSequenceClassification")(
                getattr(transformers, f"{n}Config")(**_text_options(n))
            ),
            tokens,
        )
    options = {
        key: TEXT[key] for key in TEXT if key not in ("vocab_size", "max_position_embeddings")
    }
    yield (
        "transformers ViT",
        lambda: transformers.ViTForImageClassification(
            transformers.ViTConfig(image_size=16, patch_size=4, **options)
        ),
        {"pixel_values": image(16)},
    )


def _text_options(name: str) -> dict[str, Any]:
    if name == "DistilBert":
        return {
            **{"vocab_size": 64, "dim": 16, "n_layers": 2, "n_heads": 4, "hidden_dim": 24},
            "max_position_embeddings": 32,
        }
    return {**TEXT, "embedding_size": 8} if name in ("Albert", "Electra") else TEXT


def image(side: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(2, 3, side, side, generator=generator, dtype=torch.float64)


def examine(name: str, model: nn.Module, inputs: Any) -> Row:
    """Trace, permute and compare one network."""
    model = quiet(model.double())
    graph = ChannelGraph.trace(model, inputs)
    orders = {group.name: torch.randperm(group.size) for group in graph.groups}
    twin = copy.deepcopy(model)
    with torch.no_grad():  # not load_state_dict: MNASNet refuses a state without its version
        for tensor, permuted in zip(
            twin.state_dict().values(),
            graph.permute(model.state_dict(), orders).values(),
            strict=True,
        ):
            tensor.copy_(permuted)
    changes = [_change(model.train(mode), twin.train(mode), inputs) for mode in (False, True)]
    frozen = "; ".join(f"`{module}`: {why}" for module, why in list(graph.unaligned.items())[:1])
    more = len(graph.unaligned) - 1
    frozen += f"; {more} more" if more > 0 else ""
    return Row(name, aligned(model, graph), len(graph.groups), *changes, frozen)


def quiet(model: nn.Module) -> nn.Module:
    """Draw weights that leave nothing at its initial value; switch off what is random."""
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            spread = float(parameter.std()) if parameter.numel() > 1 else 0.0
            parameter.add_(0.1 * (spread or 0.1) * torch.randn_like(parameter))
    for module in model.modules():
        for rate in ("p", "drop_prob", "drop", "drop_rate", "attn_drop_rate", "dropout"):
            if isinstance(getattr(module, rate, None), float):
                setattr(module, rate, 0.0)
    return model


def aligned(model: nn.Module, graph: ChannelGraph) -> float | None:
    """Return the share of convolution parameters in groups, without those of the output."""
    written = {member.tensor for group in graph.groups for member in group.producers}
    ours = counted = 0
    for name, module in model.named_modules():
        output = name in graph.frozen and name not in graph.unaligned
        if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d) and not output:
            counted += module.weight.numel()
            ours += module.weight.numel() * any(t.startswith(f"{name}.") for t in written)
    return ours / counted if counted else None


def _change(model: nn.Module, twin: nn.Module, inputs: Any) -> float:
    before, after = (_logits(network, inputs) for network in (model, twin))
    return max(
        float((a - b).abs().max() / a.abs().max()) for a, b in zip(before, after, strict=True)
    )


def _logits(model: nn.Module, inputs: Any) -> list[Tensor]:
    with torch.no_grad():
        torch.manual_seed(2)
        result = model(**inputs) if isinstance(inputs, dict) else model(inputs)
    if isinstance(result, Tensor):
        return [result]
    found = result.values() if hasattr(result, "values") else result
    return [tensor for tensor in found if isinstance(tensor, Tensor)]


def main() -> None:
    parser = argparse.ArgumentParser(description=inspect.getdoc(inspect.getmodule(main)))
    parser.add_argument("names", nargs="*", help="only these; the other rows stay as they are")
    wanted = parser.parse_args().names
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    for name, make, inputs in networks():
        if not wanted or name in wanted:
            torch.manual_seed(0)
            row = str(examine(name, make(), inputs))
            print(row, flush=True)
            write(name, row)


def write(name: str, row: str) -> None:
    """Put one row into the page; the others stay, in the order of the networks."""
    text = PAGE.read_text() if PAGE.exists() else ""
    rows = {line.split(" | ")[0][2:]: line for line in text.splitlines() if line.endswith(" |")}
    rows[name] = row
    order = [known for known, _, _ in networks() if known in rows]
    PAGE.write_text(HEAD + "\n".join(rows[known] for known in order) + "\n")


if __name__ == "__main__":
    main()
