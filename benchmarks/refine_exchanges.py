r"""Refine a merge with one, several or all layers per exchange, and by Grams alone.

    python benchmarks/refine_exchanges.py --data-dir ~/data

Three networks are trained on disjoint parts of MNIST and merged, as in `merge_quality.py`, with
seed 30, which is in no other table. Printed is the accuracy in percent on the test images.

RegMean++ measures Grams at the merged model, too, but takes what a network's own layer would make
of the merged model's inputs for its output.

Nguyen et al., "RegMean++: Enhancing Effectiveness and Generalization of Regression Mean for Model
Merging", arXiv:2508.03121.
"""

from __future__ import annotations

import argparse
import copy
import tempfile
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from measure import set_threads
from merge_networks import accuracy, load_task, trained
from merge_quality import GRAM_IMAGES
from torch import Tensor, nn

from hfedatm_core import (
    Answers,
    ChannelGraph,
    Update,
    collect_answers,
    collect_grams,
    fit_layers,
    merge_apart,
)
from hfedatm_core.apart.folding import fold
from hfedatm_core.apart.layer_pairs import LayerPairs
from hfedatm_core.grams.grouped import read_gram
from hfedatm_core.grams.layer_moments import layer_matrix

State = dict[str, Tensor]
Changed = Callable[[Answers, State, State], Answers]


def unchanged(answers: Answers, own: State, merged: State) -> Answers:
    """Return the answers as the owner gave them."""
    return answers


def rounded(answers: Answers, own: State, merged: State) -> Answers:
    """Return the answers with Grams of 16 bits, as they travel by default."""
    grams = {n: read_gram(g.to_arrays("float16")) for n, g in answers.grams.items()}
    return Answers(grams, answers.residuals, answers.moments)


def by_grams(answers: Answers, own: State, merged: State) -> Answers:
    """Return what RegMean++ uses: the owner's weights on the inputs of the merged network."""
    residuals, moments = {}, {}
    for layer, gram in answers.grams.items():
        theirs, ours = (layer_matrix(s, layer).double().contiguous() for s in (own, merged))
        residuals[layer] = torch.zeros_like(theirs)
        gram.add_product(residuals[layer], theirs - ours)
        outputs = torch.zeros_like(theirs)
        gram.add_product(outputs, theirs)
        error = (residuals[layer] * (theirs - ours)).sum(1)
        moments[layer] = torch.stack([outputs[:, -1], (outputs * theirs).sum(1), error])
    return Answers(answers.grams, residuals, moments)


def measured(models: Sequence[nn.Module], task: object, data: list[list]) -> dict[str, float]:
    """Return the accuracy of every row."""
    graph = ChannelGraph.trace(models[0], data[0][0][0][:2])
    updates = [
        Update(model.state_dict(), collect_grams(model, batches, full=True), name=f"network-{n}")
        for n, (model, batches) in enumerate(zip(models, data, strict=True))
    ]
    merged = merge_apart(updates, graph)
    whole, owns = copy.deepcopy(models[0]), []
    for update in updates:
        own = copy.deepcopy(models[0]).eval()
        own.load_state_dict(graph.permute(update.state, merged.permutations[update.name]))
        owns.append(own)
    with LayerPairs(whole, whole, graph, None) as pairs:
        order = pairs.order(data[0][0][0])

    def refined(each: int, change: Changed = unchanged) -> float:
        state = merged.state
        for start in range(0, len(order), each):
            whole.load_state_dict(state)
            folded = fold(state, graph)
            answers = []
            for own, batches in zip(owns, data, strict=True):
                found = collect_answers(whole, own, graph, batches, order[start : start + each])
                answers.append(change(found, fold(own.state_dict(), graph), folded))
            state = fit_layers(state, graph, answers)
        return of(state)

    def of(state: State) -> float:
        whole.load_state_dict(state)
        return accuracy(task, whole.eval())  # type: ignore[arg-type]

    return {
        "merged": of(merged.state),
        "an exchange per layer": refined(1),
        "the same, Grams of 16 bits": refined(1, rounded),
        "two layers per exchange": refined(2),
        "three layers per exchange": refined(3),
        f"all {len(order)} layers in one exchange": refined(len(order)),
        "RegMean++, an exchange per layer": refined(1, by_grams),
        "RegMean++, one exchange": refined(len(order), by_grams),
    }


def main() -> None:
    """Print a table per architecture."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--data-dir", type=Path, default=Path())
    names = ["lenet5", "mobilenet", "resnet18-bn"]
    parser.add_argument("--architectures", nargs="+", default=names)
    parser.add_argument("--seed", type=int, default=30)
    default = Path(tempfile.gettempdir()) / "hfedatm-merge-quality"
    parser.add_argument("--cache", type=Path, default=default, help="folder of trained networks")
    chosen = parser.parse_args()
    set_threads(1)
    warnings.simplefilter("ignore")
    task = load_task("digits-data", 3, chosen.data_dir)
    data = [[(x, None) for x in images[:GRAM_IMAGES].split(100)] for images, _ in task.parts]
    for name in chosen.architectures:
        models = trained(name, task, chosen.seed, chosen.cache)
        print(f"| {name}, seed {chosen.seed} | % |\n|---|---:|", flush=True)
        alone = sum(accuracy(task, model) for model in models) / len(models)
        print(f"| the networks by themselves (mean) | {alone:.1f} |")
        for row, value in measured(models, task, data).items():
            print(f"| {row} | {value:.1f} |", flush=True)


if __name__ == "__main__":
    main()
