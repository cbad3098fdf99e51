r"""Filter-wise optimal transport: bring a station's channels into the reference's order.

For every channel group the filters of the reference and of the station are flattened and
normalised; the squared distances of all tensors that write the group are summed to a cost matrix D;
a permutation p is chosen that lowers :math:`\sum_i D_{i,p(i)}`; and every axis that lives in the
group is permuted by it, so that the station's network computes the same function as before.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from hfedatm_core.channels.graph import ChannelGraph
from hfedatm_core.fot.matching import Matcher
from hfedatm_core.fot.options import DEFAULT, AlignmentOptions
from hfedatm_core.fot.shapes import match_shapes, require_finite
from hfedatm_core.grams.gram import Gram
from hfedatm_core.grams.grouped import GroupedGram
from hfedatm_core.tensors import State


@dataclass(frozen=True)
class GroupReport:
    """The alignment of one channel group of one station."""

    moved: int
    cost: float
    identity_cost: float


@dataclass(frozen=True)
class Alignment:
    """A station in the reference's channel order.

    Attributes
    ----------
    state
        The permuted ``state_dict``; tensors that do not move are the station's own, not copies.
    grams
        The permuted Grams.
    permutations
        Group name -> ``p``: channel ``i`` of the aligned model is channel ``p[i]`` of the station.
        This and the next attributes hold the groups in scope only.
    moved
        Group name -> number of channels with ``p[i] != i``.
    cost, identity_cost
        Group name -> ⟨Π, D⟩ and ⟨I, D⟩, with the cost D at the time of the group's match.
    """

    state: dict[str, Tensor]
    grams: dict[str, Gram]
    permutations: dict[str, Tensor]
    moved: dict[str, int]
    cost: dict[str, float]
    identity_cost: dict[str, float]


def align(
    state: State,
    reference: State,
    graph: ChannelGraph,
    grams: Mapping[str, Gram] | None = None,
    options: AlignmentOptions = DEFAULT,
) -> Alignment:
    r"""Permute the channels of ``state`` to match ``reference`` without changing its function.

    Per channel group, with :math:`\hat w` the flattened and normalised filters of all tensors t
    that write the group,

    .. math:: D_{ij} = \sum_t \|\hat w^{ref}_{t,i} - \hat w_{t,j}\|^2, \qquad
        \min_p \sum_i D_{i,p(i)}.

    Parameters
    ----------
    state, reference
        Two ``state_dict`` of one architecture; convolutions may differ in kernel size, the
        station's are then resized to the reference's.
    graph
        The channel groups of the architecture.
    grams
        Layer name -> Gram of the layer's input, which is permuted in the same way.
    options
        The scope of the alignment, and the solver.

    Raises
    ------
    ValueError
        A tensor is missing, unknown, not finite or of another shape.

    See Also
    --------
    Aligner : the same for several stations and one reference.
    """
    return Aligner(reference, graph, options)(state, grams)


class Aligner:
    """Align any number of stations to one reference; see :func:`align` for the parameters.

    Values that depend only on the reference are computed once. A station that stayed close to the
    reference then takes hardly any time, because the identity is provably its best match.
    """

    def __init__(
        self,
        reference: State,
        graph: ChannelGraph,
        options: AlignmentOptions = DEFAULT,
    ) -> None:
        require_finite(reference, "the reference")
        self._reference, self._graph = reference, graph
        self._matcher = Matcher(reference, graph, options)

    def __call__(self, state: State, grams: Mapping[str, Gram] | None = None) -> Alignment:
        """Align one station."""
        station = match_shapes(state, self._reference, self._graph.kernels)
        matches, reordered = self._matcher.match(station)
        moving = {name: match.permutation for name, match in matches.items() if match.moved}
        return Alignment(
            state=reordered,
            grams=permute_grams(grams or {}, state, self._graph, moving),
            permutations={name: match.permutation for name, match in matches.items()},
            moved={name: match.moved for name, match in matches.items()},
            cost={name: match.cost for name, match in matches.items()},
            identity_cost={name: match.identity_cost for name, match in matches.items()},
        )


def permute_grams(
    grams: Mapping[str, Gram],
    state: State,
    graph: ChannelGraph,
    moving: Mapping[str, Tensor],
) -> dict[str, Gram]:
    """Return the Grams with their inputs in the channel order of the permutations.

    Raises
    ------
    ValueError
        A Gram belongs to no weight of ``state``, or is of another width.
    """
    done: dict[tuple[int, bytes], Gram] = {}  # layers with one input share one Gram
    permuted = {}
    for layer, gram in grams.items():
        weight = state.get(f"{layer}.weight")
        if weight is None or weight.dim() < 2:
            raise ValueError(f"there is a Gram of {layer}, but no weight matrix {layer}.weight")
        features = weight[0].numel()  # of a convolution: its patch, channel by channel
        if gram.dim not in (features, features + 1):  # one more: the constant of the bias
            raise ValueError(
                f"the Gram of {layer} has {gram.dim} features, but {layer}.weight has shape "
                f"{tuple(weight.shape)}"
            )
        index = _gram_index(gram, f"{layer}.weight", weight, graph, moving)
        if index is not None:
            key = (id(gram), index.numpy().tobytes())
            if key not in done:
                done[key] = gram.permute(index)
            gram = done[key]
        permuted[layer] = gram
    return permuted


def _gram_index(
    gram: Gram, name: str, weight: Tensor, graph: ChannelGraph, moving: Mapping[str, Tensor]
) -> Tensor | None:
    """Return the permutation of a layer's inputs; in a depthwise layer that of its filters."""
    if not isinstance(gram, GroupedGram):
        return graph.index(name, 1, weight.shape[1], moving)
    index = graph.index(name, 0, weight.shape[0], moving)
    each = len(weight) // len(gram.blocks)
    return None if index is None else index[::each] // each
