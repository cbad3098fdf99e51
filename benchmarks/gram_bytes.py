"""The bytes that Grams add to a client's uplink in a global round of N = 5 station rounds.

A client sends its weights five times and its Grams once. The ablation runs the embedded digits with
Grams sent as float32 and as float16 from the same seeds, and compares the accuracy on the unseen
domain.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from measure import Figure, options, publish
from torch import nn
from workloads import DIGITS

from hfedatm.base.records import grams_to_record, state_to_record
from hfedatm.base.results import read_rounds
from hfedatm.runtime.local import run_locally
from hfedatm_core import Gram, PackedGram, collect_grams
from hfedatm_core.models import lenet5

STATION_ROUNDS = 5
TYPES = ("float32", "float16")
COMPARED = "the weights alone, sent in each of 5 station rounds"


def roberta(hidden: int, blocks: int) -> tuple[int, dict[str, Gram]]:
    """Return the bytes of RoBERTa-base's weights, and its Grams (of zeros: only sizes matter)."""
    from transformers import RobertaConfig, RobertaForSequenceClassification

    config = RobertaConfig(
        vocab_size=50265,
        max_position_embeddings=514,
        type_vocab_size=1,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=blocks,
    )
    with torch.device("meta"):
        model = RobertaForSequenceClassification(config)
    grams: dict[str, Gram] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            width = module.in_features
            shared = grams.get(name.replace(".key", ".query").replace(".value", ".query"))
            grams[name] = shared or PackedGram(torch.zeros(width * (width + 1) // 2))
    return sum(value.nbytes for value in model.state_dict().values()), grams


def lenet() -> tuple[int, dict[str, Gram]]:
    model = lenet5.build(DIGITS)
    grams = collect_grams(model, [(torch.rand(64, *DIGITS.input_shape), None)])
    return state_to_record(model.state_dict()).count_bytes(), grams


def share(name: str, weights: int, grams: dict[str, Gram], limit: float) -> list[Figure]:
    """Return the added share of bytes for each type on the wire."""
    figures = []
    for dtype in TYPES:
        added = grams_to_record(grams, dtype).count_bytes()
        figures.append(
            Figure(
                f"bytes of Grams, {name}, {dtype}",
                100 * added / (STATION_ROUNDS * weights),
                limit,
                COMPARED,
                unit="%",
                details={"grams": added, "weights of one station round": weights},
            )
        )
    return figures


def accuracy(dtype: str, seed: int, given: dict[str, Any]) -> float:
    with tempfile.TemporaryDirectory() as folder:
        run_locally(
            given | {"gram-dtype": dtype, "seed": seed, "output": folder, "run-name": "run"}
        )
        found = read_rounds(Path(folder) / "run")[-1].unseen_accuracy
        assert found is not None, "the last round is always evaluated"
        return found


def ablation(smoke: bool) -> list[Figure]:
    given: dict[str, Any] = {"device": "cpu", "rounds": 2, "local-epochs": 3, "diagnostics": False}
    seeds = 4
    if smoke:
        given |= {"rounds": 1, "local-epochs": 1, "station-rounds": 1, "stations": 2}
        seeds = 1
    runs = {dtype: [accuracy(dtype, seed, given) for seed in range(seeds)] for dtype in TYPES}
    figures = []
    for dtype in TYPES[1:]:
        pairs = zip(runs[dtype], runs["float32"], strict=True)
        differences = [100 * (half - full) for half, full in pairs]
        figures.append(
            Figure(
                f"accuracy on the unseen domain, Grams as {dtype}",
                statistics.mean(differences),
                -0.5,
                "the same seeds with float32",
                unit="points",
                at_least=True,
                details={"seeds": seeds, "differences": differences, "float32": runs["float32"]},
            )
        )
    return figures


def main(given: Sequence[str] | None = None) -> None:
    chosen = options(__doc__, given)
    text = roberta(48, 1) if chosen.smoke else roberta(768, 12)
    figures = [
        *share("LeNet-5", *lenet(), 15.0),
        *share("RoBERTa-base", *text, 10.0),
        *ablation(chosen.smoke),
    ]
    publish(__file__, figures, chosen)


if __name__ == "__main__":
    main()
