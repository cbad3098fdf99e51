"""Cut every update back to what is usual among the updates of the same step.

With the received model ``r`` and updates ``x_k`` that claim ``n_k`` examples, the usual claim and
the usual move of tensor ``t`` are medians over the updates,

    n = med_k n_k,        d_t = med_k ‖x_kt − r_t‖ .

A claim counts up to ``b n``. A tensor moves up to ``c d_t``, and less for whoever claims more than
is usual, because ``n_k`` times the move is what pulls the mean:

    n_k ← min(n_k, b n),        c_k = c min(1, √(n / n_k)),
    x_kt ← r_t + min(1, c_k d_t / ‖x_kt − r_t‖) (x_kt − r_t) .

A Gram is multiplied by ``min(1, c s / s_k)``. Its size ``s_k`` is its trace, or its Frobenius norm
where that is larger, as it is in no mean of ``x xᵀ``. What lies within the bounds passes as it is,
to the last bit.

One update is nobody's outlier and passes. Of two neither is usual: the smaller claim and the
smaller Gram are taken for it, which only shifts weight between the two, and the norm of the
received tensor has the third vote on how far a tensor may move, ``c_k = c``.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from hfedatm_core.grams.by_layer import distinct
from hfedatm_core.grams.gram import FactorGram, Gram, PackedGram
from hfedatm_core.tensors import State, distance, norm_of
from hfedatm_core.update import Update

COUNTS = ("num-examples", "num-clients", "steps", "path")
"""Numbers of an update that weigh in a mean."""


@dataclass(frozen=True)
class Bounds:
    """How many times what is usual an update may have; 0 is no bound.

    Parameters
    ----------
    factor
        ``c``, of a tensor's move and of a Gram.
    claims
        ``b``, of a claimed number.
    agreement
        Of the usual agreement that an update must reach, see `hfedatm_core.robust.agreement`.
    """

    factor: float = 2.0
    claims: float = 3.0
    agreement: float = 0.1


@dataclass(frozen=True)
class Sizes:
    """What an update is judged by: its numbers, how far it moves, how large its Grams are."""

    counts: Mapping[str, float]
    moves: Mapping[str, float]
    grams: Mapping[str, float]


@dataclass(frozen=True)
class Cut:
    """What was cut off one update, in a line for people."""

    name: str
    what: str
    factor: float
    """What the worst part of the update was multiplied by; 0 if the update was left out."""


# --- what is measured


def measure(update: Update, start: State) -> Sizes:
    """Return the sizes of one update that started from ``start``."""
    counts = {name: float(update.metrics[name]) for name in COUNTS if name in update.metrics}
    counts |= {"num-examples": update.num_examples, "num-clients": update.num_clients}
    grams: dict[str, float] = {}
    for layers, gram in distinct(update.grams).items():
        grams |= dict.fromkeys(layers, gram_size(gram))
    moves = {name: distance(value, start[name]) for name, value in update.state.items()}
    return Sizes(counts, moves, grams)


def gram_size(gram: Gram) -> float:
    """Return the trace of a Gram, or what its other entries amount to where that is more."""
    trace = float(gram.diagonal().double().abs().sum())
    if isinstance(gram, FactorGram):
        return max(trace, norm_of(gram.factor) ** 2)
    if isinstance(gram, PackedGram):
        # The triangle holds every pair once: the norm of the whole is up to √2 times that.
        return max(trace, norm_of(gram.triangle))
    return trace


# --- what is usual


def usual(sizes: Sequence[Sizes], start: State) -> Sizes | None:
    """Return the usual sizes; None where there is nothing to compare with."""
    if len(sizes) < 2:
        return None
    middle = min if len(sizes) == 2 else statistics.median
    moves = {}
    for name in sizes[0].moves:
        found = [one.moves[name] for one in sizes]
        if len(sizes) == 2:
            # Nothing can be told from a tensor of zeros.
            found.append(norm_of(start[name].double()) or max(found))
        moves[name] = statistics.median(found)
    return Sizes(
        {name: float(middle(v)) for name, v in _columns(one.counts for one in sizes).items()},
        moves,
        {name: float(middle(v)) for name, v in _columns(one.grams for one in sizes).items()},
    )


def _columns(rows: Iterable[Mapping[str, float]]) -> dict[str, list[float]]:
    columns: dict[str, list[float]] = {}
    for row in rows:
        for name, value in row.items():
            columns.setdefault(name, []).append(value)
    return columns


# --- what is cut

BEYOND = 3.0
"""Times its bounds that most of an update may be before it is left out instead of cut back."""


@dataclass(frozen=True)
class Factors:
    """What the parts of one update are multiplied by; what is not named stays as it is."""

    counts: Mapping[str, float]
    moves: Mapping[str, float]
    grams: Mapping[str, float]

    @property
    def least(self) -> float:
        """The smallest of all."""
        return min([1.0, *self.counts.values(), *self.moves.values(), *self.grams.values()])


NOTHING = Factors({}, {}, {})


def factors(own: Sizes, common: Sizes | None, bounds: Bounds, many: bool = True) -> Factors:
    """Return what an update of these sizes is multiplied by; ``many`` is more than two."""
    if common is None:
        return NOTHING
    counts = _above(own.counts, common.counts, bounds.claims)
    claim = own.counts["num-examples"] * counts.get("num-examples", 1.0)
    pull = min(1.0, common.counts["num-examples"] / claim) ** 0.5 if many else 1.0
    return Factors(
        counts,
        _above(own.moves, common.moves, bounds.factor * pull),
        _above(own.grams, common.grams, bounds.factor),
    )


def _above(own: Mapping[str, float], common: Mapping[str, float], most: float) -> dict[str, float]:
    """Return ``most × usual / own`` for everything above it."""
    if not most:
        return {}
    limits = {name: most * common[name] for name in own}
    # A rounding error is no reason to touch what should stay bit by bit.
    return {n: limits[n] / size for n, size in own.items() if size > limits[n] * (1 + 1e-9)}


def beyond(own: Sizes, given: Factors) -> float:
    """Return how many times its bound more than half of an update's tensors, or Grams, are.

    Whoever is that far out did not train and measure as the others did: what is left of it
    after the cut has no more worth than its length.
    """
    found = [
        statistics.median_low([1 / max(part.get(name, 1.0), 1e-300) for name in sizes])
        for sizes, part in ((own.moves, given.moves), (own.grams, given.grams))
        if sizes
    ]
    return max([1.0, *found])


def cut(update: Update, given: Factors, start: State) -> Update:
    """Return the update with its parts multiplied; what needs no cut is the same object."""
    state = dict(update.state)
    for name, factor in given.moves.items():
        state[name] = scale_back(state[name], start[name], factor)
    for name in state:
        if name.endswith("running_var"):  # its root is taken: a negative one is no number
            state[name] = _not_negative(state[name])
    grams = dict(update.grams)
    for layers, gram in distinct(update.grams).items():
        if layers[0] in given.grams:
            grams |= dict.fromkeys(layers, gram * given.grams[layers[0]])
    numbers = dict(update.metrics)
    numbers |= {n: numbers[n] * f for n, f in given.counts.items() if n in numbers}
    examples = _whole(update.num_examples, given.counts.get("num-examples", 1.0))
    clients = _whole(update.num_clients, given.counts.get("num-clients", 1.0))
    for name, count in (("num-examples", examples), ("num-clients", clients)):
        if name in numbers and name in given.counts:
            numbers[name] = count
    return replace(
        update,
        state=state,
        grams=grams,
        metrics=numbers,
        num_examples=examples,
        num_clients=clients,
    )


def _whole(count: int, factor: float) -> int:
    """Return a count times a factor; a rounding error does not make it one less."""
    return max(1, int(count * factor * (1 + 1e-12)))


def scale_back(value: Tensor, start: Tensor, factor: float) -> Tensor:
    """Return ``start + factor (value − start)``, in the type of ``value``."""
    if factor == 0.0:
        return start.clone()
    moved = start.double() + factor * (value.detach().double() - start.double())
    if not value.is_floating_point():
        moved = moved.round()
    return moved.to(value.dtype)


def _not_negative(value: Tensor) -> Tensor:
    return value.clamp(min=0) if bool((value < 0).any()) else value


def explain(name: str, given: Factors) -> Cut | None:
    """Return what was cut, or None."""
    if given.least == 1.0:
        return None
    parts = [f"{key} {_times(factor)}" for key, factor in given.counts.items()]
    for what, cut_ones in (("moved", given.moves), ("Gram of", given.grams)):
        if cut_ones:
            worst = min(cut_ones, key=lambda key: cut_ones[key])
            more = f" and {len(cut_ones) - 1} more" if len(cut_ones) > 1 else ""
            parts.append(f"{what} {worst} {_times(cut_ones[worst])}{more}")
    # Nothing of what stays in is multiplied by 0 as a whole, which is the mark of who is left out.
    return Cut(name, ", ".join(parts), max(given.least, 1e-300))


def _times(factor: float) -> str:
    return f"{1 / factor:.3g} x its bound" if factor else "where hardly anybody does"
