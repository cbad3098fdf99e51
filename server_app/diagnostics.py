"""Arrays that the report shows of a round; the server saves them for the first and last round.

``diagnostics/round-<n>.npz`` in the run's folder holds plain arrays (no pickles):

``stations``                     names, in the order of their arrival
``assignment/<station>/<group>`` ``p``: channel ``i`` of the merged model was the station's ``p[i]``
``filters/<station>/<group>``    the station's filters of a convolution, as it sent them
``merged/<group>``               the same filters of the merged model
``spectrum/<station>/<layer>``   eigenvalues of the Gram, largest first
``distance/before``, ``after``   relative distance between every two stations' weights
``covered``                      number of weights in the distances, and of all weights
``confusion``, ``classes``       true class x predicted class on the unseen domain; their names
``wrong/images``, ``wrong/targets``, ``wrong/predicted``   some misclassified examples
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.linalg import LinAlgError  # type: ignore[attr-defined]

from hfedatm.base.batches import Batches
from hfedatm_core import ChannelGraph, FactorGram, Gram, Merged, Update, forward
from hfedatm_core.data import DataSpec
from hfedatm_core.merging import split_products
from hfedatm_core.tensors import State
from hfedatm_files import replacing

Arrays = dict[str, np.ndarray]

KEPT_WEIGHTS = 4_000_000  # for all stations together: 16 MB, however large the model
SPECTRUM_LAYERS, SPECTRUM_DIM, SPECTRUM_LENGTH = 4, 1024, 256
WRONG_EXAMPLES = 24


class RoundDiagnostics:
    """Collects the diagnostics of one round while its updates stream by.

    Parameters
    ----------
    graph
        The channel groups of the network.
    stations
        Number of stations that were asked; it decides how much of each update is kept.
    """

    def __init__(self, graph: ChannelGraph, stations: int) -> None:
        self._graph = graph
        self._budget = KEPT_WEIGHTS // max(1, stations)
        self._kept: dict[str, State] = {}
        self._weights = 0
        self.arrays: Arrays = {}

    def watch(self, updates: Iterable[Update]) -> Iterator[Update]:
        """Pass the updates on, and keep a bounded part of each."""
        for update in updates:
            weights = {
                k: v
                for k, v in split_products(update.state)[0].items()
                if v.is_floating_point() and v.ndim > 1
            }
            self._weights = sum(v.numel() for v in weights.values())
            self._kept[update.name] = _within(weights, self._budget)
            for layer, gram in _spread(update.grams).items():
                self.arrays[f"spectrum/{update.name}/{layer}"] = spectrum(gram)
            yield update

    def finish(self, merged: Merged) -> None:
        """Add the arrays that need the merged model, and release the kept weights."""
        names = list(self._kept)
        aligned = {
            name: self._graph.permute(state, merged.permutations.get(name, {}))
            for name, state in self._kept.items()
        }
        arrays = self.arrays
        arrays["stations"] = np.array(names)
        arrays["distance/before"] = distances([self._kept[name] for name in names])
        arrays["distance/after"] = distances([aligned[name] for name in names])
        covered = sum(v.numel() for v in next(iter(self._kept.values()), {}).values())
        arrays["covered"] = np.array([covered, self._weights])
        for name, groups in merged.permutations.items():
            for group, permutation in groups.items():
                arrays[f"assignment/{name}/{group}"] = permutation.numpy().astype(np.int32)
        for group, tensor in self._pictures().items():
            arrays[f"merged/{group}"] = _picture(merged.state[tensor])
            for name, state in self._kept.items():
                arrays[f"filters/{name}/{group}"] = _picture(state[tensor])
        self._kept.clear()

    def _pictures(self) -> dict[str, str]:
        """Return the groups whose filters can be drawn: kept, whole, larger than one pixel."""
        kept = next(iter(self._kept.values()), {})
        pictures = {}
        for group in self._graph.groups:
            tensor = group.producers[0].tensor if group.producers else ""
            if tensor in kept and kept[tensor].ndim == 4 and min(kept[tensor].shape[2:]) > 1:
                pictures[group.name] = tensor
        return dict(list(pictures.items())[:2])  # deeper filters show little to the eye


def spectrum(gram: Gram) -> np.ndarray:
    """Return the largest eigenvalues of a Gram, or none if they cannot be computed.

    Those of a factored Gram come from its factor; the matrix is not formed.
    """
    try:
        if isinstance(gram, FactorGram):
            values = torch.linalg.svdvals(gram.factor).square()
        else:
            values = torch.linalg.eigvalsh(gram.dense().double()).flip(0).clamp(min=0)
    except LinAlgError:  # a missing picture must not end a run
        return np.empty(0, np.float32)
    largest: np.ndarray = values[:SPECTRUM_LENGTH].float().numpy()
    return largest


def distances(states: list[State]) -> np.ndarray:
    """Return ``‖a - b‖ / sqrt(‖a‖ ‖b‖)`` over all tensors, for every two states."""
    flat = [torch.cat([v.flatten().double() for v in state.values()]) for state in states if state]
    matrix = np.zeros((len(flat), len(flat)))
    for i, a in enumerate(flat):
        for j, b in enumerate(flat[:i]):
            scale = float((a.norm() * b.norm()).sqrt())
            matrix[i, j] = matrix[j, i] = float((a - b).norm()) / scale if scale else 0.0
    return matrix


@torch.no_grad()
def mistakes(model: nn.Module, unseen: Batches, spec: DataSpec) -> Arrays:
    """Return the confusion matrix on the unseen domain, and some misclassified examples."""
    model.eval()
    classes = spec.num_classes
    predicted = torch.cat([forward(model, inputs).argmax(1).cpu() for inputs, _ in unseen])
    targets = unseen.domain.targets
    counts = torch.bincount(targets * classes + predicted, minlength=classes**2)
    arrays = {
        "confusion": counts.view(classes, classes).numpy(),
        "classes": np.array(spec.class_names or [str(number) for number in range(classes)]),
    }
    images = unseen.domain.inputs
    if isinstance(images, Tensor) and images.ndim == 4:
        wrong = (predicted != targets).nonzero().flatten()
        # Chosen evenly over the domain, because examples of a class may lie side by side.
        step = max(1, -(-len(wrong) // WRONG_EXAMPLES))
        some = wrong[::step]
        arrays |= {
            "wrong/images": _bytes(images[some]),
            "wrong/targets": targets[some].numpy(),
            "wrong/predicted": predicted[some].numpy(),
        }
    return arrays


def save(folder: Path, number: int, arrays: Mapping[str, np.ndarray]) -> None:
    """Write the arrays of a round; the file appears whole or not at all."""
    path = folder / "diagnostics" / f"round-{number:05d}.npz"
    path.parent.mkdir(exist_ok=True)
    with replacing(path) as part, part.open("wb") as file:
        np.savez_compressed(file, **dict[str, Any](arrays))


def _within(weights: State, budget: int) -> State:
    """Return the first tensors that fit the budget: the same ones for every station."""
    kept: State = {}
    for name, tensor in weights.items():
        if tensor.numel() <= budget:
            kept[name] = tensor.clone()
            budget -= tensor.numel()
    return kept


def _spread(grams: Mapping[str, Gram]) -> dict[str, Gram]:
    """Return a few layers, spread evenly over the depth, whose spectrum is cheap."""
    names = [n for n, g in grams.items() if isinstance(g, FactorGram) or g.dim <= SPECTRUM_DIM]
    places = np.linspace(0, len(names) - 1, min(SPECTRUM_LAYERS, len(names))).round().astype(int)
    return {names[place]: grams[names[place]] for place in places}


def _picture(weight: Tensor) -> np.ndarray:
    """Return filters as pictures: the mean over input channels, unless these are colours."""
    weight = weight.detach().float().cpu()
    picture = weight if weight.shape[1] == 3 else weight.mean(1, keepdim=True)
    return picture.numpy()


def _bytes(images: Tensor) -> np.ndarray:
    if images.dtype == torch.uint8:
        return images.numpy()
    low, high = images.amin((1, 2, 3), keepdim=True), images.amax((1, 2, 3), keepdim=True)
    return ((images - low) / (high - low).clamp(min=1e-12) * 255).round().byte().numpy()
