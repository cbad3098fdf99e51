r"""Fit the layers of a merged network to the inputs that they really get.

RegMean takes the inputs of each network for those of the merged network. Channels of networks that
were trained apart agree only in part, so the inputs of the merged network differ from the networks'
more and more from layer to layer. The owners of the networks can measure by how much, without
giving an example away. The owner of network :math:`e` runs the merged network and its own on its
data. With a layer's input :math:`u = [x; 1]` and output :math:`M u` in the merged network, and its
output :math:`y_e` in the owner's network, the owner returns

.. math:: G_e = E\,u u^\top, \qquad R_e = E\,(y_e - M u) u^\top, \qquad E\,y_e, \quad
    E\,y_e^2, \quad E\,(y_e - M u)^2 .

The layer :math:`M = [W\ b]` that reproduces the outputs of all networks best minimises
:math:`\sum_e E \|M u - y_e\|^2`, and is found from

.. math:: M' = M + \bar R\,(\bar G + \lambda I)^{-1},

with the means :math:`\bar G, \bar R` over the networks and a ridge :math:`\lambda` that is chosen
for every layer (:mod:`hfedatm_core.apart.fitting`). A layer that already reproduces them has
:math:`\bar R = 0` and stays. Then the spread of its outputs is restored,
as after every merge. A layer can be fitted only after the layers before it, because they change its
inputs: there is one exchange per layer.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass

from torch import Tensor, nn

from hfedatm_core.apart.fitting import correction
from hfedatm_core.apart.folding import Moments, fold, unfold
from hfedatm_core.apart.layer_pairs import LayerPairs
from hfedatm_core.apart.repairing import layer_moments, repair_layer
from hfedatm_core.channels.graph import ChannelGraph
from hfedatm_core.channels.groups import OUTPUT
from hfedatm_core.grams.gram import Gram
from hfedatm_core.grams.layer_moments import layer_matrix
from hfedatm_core.grams.sums import GramAccumulator
from hfedatm_core.inputs import Batch
from hfedatm_core.merge_report import Merged
from hfedatm_core.tensors import State, is_finite


@dataclass(frozen=True)
class Answers:
    """What the owner of one network measures, by name of the layer.

    Attributes
    ----------
    grams
        ``E u uᵀ`` of the merged network's inputs, with the constant input.
    residuals
        ``E (y - M u) uᵀ``, as large as the layer's weight and bias.
    moments
        ``E y``, ``E y²`` and ``E (y - M u)²``, three rows with an entry per output.
    """

    grams: Mapping[str, Gram]
    residuals: Mapping[str, Tensor]
    moments: Mapping[str, Tensor]


@dataclass(frozen=True)
class OwnedNetwork:
    """One of the merged networks, and the data of its owner.

    Attributes
    ----------
    state
        The network, or a function that reads it: then one network is in memory at a time.
    batches
        The owner's data, which are read once per layer.
    """

    state: State | Callable[[], State]
    batches: Iterable[Batch]

    def read(self) -> State:
        """Return the network."""
        return self.state() if callable(self.state) else self.state


def collect_answers(
    merged: nn.Module,
    own: nn.Module,
    graph: ChannelGraph,
    batches: Iterable[Batch],
    layers: Collection[str] | None = None,
    *,
    max_dim: int = 4096,
    rank: int = 256,
) -> Answers:
    """Compare the merged network with one of its parts, on the data of the part's owner.

    Parameters
    ----------
    merged, own
        The merged network and the owner's, *with its channels in the order of the merged network*
        (``graph.permute(state, merged.permutations[name])``). Both run in evaluation mode.
    graph
        The channel groups and norms of the architecture.
    batches
        Pairs ``(inputs, targets)``; targets are not used.
    layers
        The layers to measure; by default all Linear layers and convolutions.
    max_dim, rank
        As in :func:`collect_grams`.
    """
    with LayerPairs(merged, own, graph, layers, max_dim, rank) as pairs:
        for inputs, _ in batches:
            pairs.add(inputs)
        return Answers(*pairs.result())


def fit_layers(
    state: State, graph: ChannelGraph, answers: Iterable[Answers], *, ridge: float | None = None
) -> dict[str, Tensor]:
    """Return the merged network with the measured layers fitted to their inputs.

    A layer stays as it is if any owner did not measure it, or sent numbers that are not finite.

    Parameters
    ----------
    state
        The merged network, as the owners received it.
    graph
        The channel groups and norms of the architecture.
    answers
        What the owners measured; they count equally.
    ridge
        Pulls a layer to what it was, relative to the mean diagonal of its Gram. By default every
        layer gets its own, chosen by cross-validation (:mod:`hfedatm_core.apart.fitting`), and a
        layer that no ridge improves stays as it is.
    """
    grams = GramAccumulator()
    sums: dict[str, tuple[Tensor, Tensor]] = {}
    number = 0
    for answer in answers:
        found = {n: (r.double(), answer.moments[n].double()) for n, r in answer.residuals.items()}
        if number:
            both = found.keys() & sums.keys()
            found = {n: (sums[n][0] + found[n][0], sums[n][1] + found[n][1]) for n in both}
        grams.add(dict(answer.grams), 1.0)
        sums, number = found, number + 1
    if not number:
        raise ValueError("cannot fit layers: there are no answers")
    pooled, folded = grams.result(), fold(state, graph)
    moments: dict[str, Moments] = {}
    for layer in (name for name in pooled if name in sums):
        residual, averages = (total / number for total in sums[layer])
        if not (pooled[layer].is_finite() and is_finite(residual) and is_finite(averages)):
            continue
        mean, square, error = averages
        _fit(folded, layer, pooled[layer], residual, float(error.sum()), ridge)
        if graph.frozen.get(layer) != OUTPUT:
            wanted = Moments(mean, (square - mean.square()).clamp(min=0.0))
            _, moments[layer] = repair_layer(folded, layer, pooled[layer], wanted)
        else:
            moments[layer] = layer_moments(folded, layer, pooled[layer])
    fitted = unfold(folded, graph, state, moments)
    # Layers that nobody measured keep their norms, whose statistics unfolding would not know.
    for norm in graph.norms:
        if norm.layer not in moments:
            names = [n for n in state if n.rpartition(".")[0] in (norm.name, norm.layer)]
            fitted |= {name: state[name] for name in names}
    return fitted


def refine(
    merged: Merged,
    model: nn.Module,
    parts: Mapping[str, OwnedNetwork],
    *,
    ridge: float | None = None,
    on_layer: Callable[[str, int], None] = lambda name, layers: None,
) -> dict[str, Tensor]:
    """Fit all layers of a merged network, one after the other from the input on.

    This is for networks whose data are on this machine. If the data are in several places, the
    owners call :func:`collect_answers`, one layer at a time, and :func:`fit_layers` takes their
    answers.

    Parameters
    ----------
    merged
        The result of :func:`merge_apart`.
    model
        A network of the architecture; it is not modified.
    parts
        The merged networks with their owners' data, by the names they had in the merge.
    ridge
        As in :func:`fit_layers`.
    on_layer
        Called before every layer with its name and the number of layers.
    """
    missing = sorted(parts.keys() ^ merged.permutations.keys())
    if missing:
        raise ValueError(f"merged and given networks differ: {', '.join(missing)}")
    graph, state = merged.graph, merged.state
    whole, own = deepcopy(model), deepcopy(model)
    whole.load_state_dict(state)
    for inputs, _ in next(iter(parts.values())).batches:
        with LayerPairs(whole, whole, graph, None) as pairs:
            order = pairs.order(inputs)
        break
    else:
        raise ValueError("there are no data to refine on")
    for layer in order:
        on_layer(layer, len(order))
        answers = (
            _owned(whole, own, graph, part, merged.permutations[name], layer)
            for name, part in parts.items()
        )
        state = fit_layers(state, graph, answers, ridge=ridge)
        whole.load_state_dict(state)
    return dict(state)


def _owned(
    whole: nn.Module,
    own: nn.Module,
    graph: ChannelGraph,
    part: OwnedNetwork,
    orders: Mapping[str, Tensor],
    layer: str,
) -> Answers:
    """Return what the owner of one network measures; ``own`` becomes that network."""
    own.load_state_dict(graph.permute(part.read(), orders))
    answers = collect_answers(whole, own, graph, part.batches, [layer])
    if not answers.grams:
        raise ValueError("there are no data to refine on")
    return answers


def _fit(
    state: dict[str, Tensor],
    layer: str,
    gram: Gram,
    missing: Tensor,
    error: float,
    ridge: float | None,
) -> None:
    """Correct one layer of a folded network; one without a finite solution stays as it is."""
    matrix = layer_matrix(state, layer).double()
    weight, bias = state[f"{layer}.weight"], state.get(f"{layer}.bias")
    if missing.shape != matrix.shape or gram.dim != matrix.shape[1]:
        raise ValueError(f"the answers of layer '{layer}' do not fit its weight")
    if bias is None:
        gram, missing, matrix = gram.leading(gram.dim - 1), missing[:, :-1], matrix[:, :-1]
    change = correction(gram, missing, error, ridge)
    if change is None:
        return
    matrix = matrix + change
    flat = matrix if bias is None else matrix[:, :-1]
    state[f"{layer}.weight"] = flat.reshape(weight.shape).to(weight.dtype)
    if bias is not None:
        state[f"{layer}.bias"] = matrix[:, -1].to(bias.dtype)
