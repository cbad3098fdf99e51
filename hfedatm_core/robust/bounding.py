"""Cut every update back to multiples of the usual sizes of the updates of the same step.

With the received model ``r`` and updates ``x_k`` that claim ``n_k`` examples, the usual claim and
the usual move of tensor ``t`` are medians over the updates,

    n = med_k n_k,        d_t = med_k ‖x_kt − r_t‖ .

A claim counts up to ``b n``. A tensor may move up to ``c d_t``, and less if the update claims more
examples than usual, because ``n_k`` times the move is what pulls the mean:

    n_k ← min(n_k, b n),        c_k = c min(1, √(n / n_k)),
    x_kt ← r_t + min(1, c_k d_t / ‖x_kt − r_t‖) (x_kt − r_t) .

A Gram is multiplied by ``min(1, c s / s_k)``. Its size ``s_k`` is its trace, or its Frobenius norm
if that is larger (it never is for a mean of ``x xᵀ``). Values within the bounds stay bit-identical.

A single update cannot be an outlier and passes. With two updates there is no majority: the smaller
claim and the smaller Gram are taken as usual, which only shifts weight between the two, and the
norm of the received tensor is the third value in the median move of a tensor, with ``c_k = c``.
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
"""The numbers in an update that serve as weights of a mean."""


@dataclass(frozen=True)
class Bounds:
    """The bounds of an update as multiples of the usual values; 0 is no bound.

    Parameters
    ----------
    factor
        ``c``, the bound of a tensor's move and of a Gram.
    claims
        ``b``, the bound of a claimed number.
    agreement
        Multiple of the usual agreement that an update must reach, see
        `hfedatm_core.robust.agreement`.
    """

    factor: float = 2.0
    claims: float = 3.0
    agreement: float = 0.1


@dataclass(frozen=True)
class Sizes:
    """The measured sizes of an update: its counts, its tensors' moves and its Grams' sizes."""

    counts: Mapping[str, float]
    moves: Mapping[str, float]
    grams: Mapping[str, float]


@dataclass(frozen=True)
class Cut:
    """One line for people about the parts of an update that were cut back."""

    name: str
    what: str
    factor: float
    """The factor of the part that was cut back most; 0 if the update was excluded."""


# --- measuring updates


def measure(update: Update, start: State) -> Sizes:
    """Return the sizes of one update that started from ``start``."""
    counts = {name: float(update.metrics[name]) for name in COUNTS if name in update.metrics}
    counts |= {"num-examples": update.num_examples, "num-clients": update.num_clients}
    grams: dict[str, float] = {}
    for layers, gram in distinct(update.grams).items():
        grams |= dict.fromkeys(layers, gram_size(gram))
    moves = {
        name: distance(value, start[name])
        for name, value in update.state.items()
        if name not in update.absent
    }
    return Sizes(counts, moves, grams)


def gram_size(gram: Gram) -> float:
    """Return the trace of a Gram, or the norm of its entries if that is larger."""
    trace = float(gram.diagonal().double().abs().sum())
    if isinstance(gram, FactorGram):
        return max(trace, norm_of(gram.factor) ** 2)
    if isinstance(gram, PackedGram):
        # The triangle holds each off-diagonal entry once: the full matrix's norm is up to √2 times
        # as large.
        return max(trace, norm_of(gram.triangle))
    return trace


# --- usual sizes


def usual(sizes: Sequence[Sizes], start: State) -> Sizes | None:
    """Return the usual sizes; None if there are fewer than two updates to compare."""
    if len(sizes) < 2:
        return None
    middle = min if len(sizes) == 2 else statistics.median
    moves = {}
    for name, found in _columns(one.moves for one in sizes).items():
        if len(found) == 2:
            # The norm of a tensor of zeros says nothing about usual moves.
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


# --- cutting updates back

BEYOND = 3.0
"""An update most of whose parts exceed this multiple of their bounds is excluded, not cut back."""


@dataclass(frozen=True)
class Factors:
    """The factors that cut back the parts of one update; an unnamed part stays as it is."""

    counts: Mapping[str, float]
    moves: Mapping[str, float]
    grams: Mapping[str, float]

    @property
    def least(self) -> float:
        """The smallest of all factors, 1 if there are none."""
        return min([1.0, *self.counts.values(), *self.moves.values(), *self.grams.values()])


NOTHING = Factors({}, {}, {})


def factors(own: Sizes, common: Sizes | None, bounds: Bounds, many: bool = True) -> Factors:
    """Return the factors of an update with these sizes; ``many`` means more than two updates."""
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
    """Return ``most × usual / own`` for every size above ``most × usual``."""
    if not most:
        return {}
    limits = {name: most * common[name] for name in own}
    # Values that exceed the bound by a rounding error only must stay bit-identical.
    return {n: limits[n] / size for n, size in own.items() if size > limits[n] * (1 + 1e-9)}


def beyond(own: Sizes, given: Factors) -> float:
    """Return the multiple of their bounds that more than half of the tensors, or Grams, reach.

    The sender of an update far beyond its bounds did not train and measure as the others did:
    cutting the update back would only correct its length.
    """
    found = [
        statistics.median_low([1 / max(part.get(name, 1.0), 1e-300) for name in sizes])
        for sizes, part in ((own.moves, given.moves), (own.grams, given.grams))
        if sizes
    ]
    return max([1.0, *found])


def cut(update: Update, given: Factors, start: State) -> Update:
    """Return the update cut back by these factors; a part without a factor is the same object."""
    state = dict(update.state)
    for name, factor in given.moves.items():
        state[name] = scale_back(state[name], start[name], factor)
    for name in state:
        if name.endswith("running_var"):  # BatchNorm takes its root, NaN if negative
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
    """Return a count times a factor, rounded down, but not one less by a rounding error."""
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
    """Return a description of the parts that were cut back, or None."""
    if given.least == 1.0:
        return None
    parts = [f"{key} {_times(factor)}" for key, factor in given.counts.items()]
    for what, cut_ones in (("moved", given.moves), ("Gram of", given.grams)):
        if cut_ones:
            worst = min(cut_ones, key=lambda key: cut_ones[key])
            more = f" and {len(cut_ones) - 1} more" if len(cut_ones) > 1 else ""
            parts.append(f"{what} {worst} {_times(cut_ones[worst])}{more}")
    # A factor of exactly 0 marks an excluded update, and this one is only cut back.
    return Cut(name, ", ".join(parts), max(given.least, 1e-300))


def _times(factor: float) -> str:
    return f"{1 / factor:.3g} x its bound" if factor else "which most updates leave in place"
