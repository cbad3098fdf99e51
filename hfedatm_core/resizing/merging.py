"""Merge networks of different width and depth into one of a chosen architecture."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from hfedatm_core.merge_report import Merged
from hfedatm_core.resizing.architecture import Architecture
from hfedatm_core.resizing.fitting import Fit
from hfedatm_core.resizing.lowering import lowered
from hfedatm_core.resizing.matching import empty_from, match_plans
from hfedatm_core.resizing.proving import prove
from hfedatm_core.update import Update


@dataclass(frozen=True)
class Resized:
    """A merge of unlike networks: the merged network, and the way back to every other shape."""

    merged: Merged
    fits: Mapping[str, Fit]

    def back(self, name: str) -> dict[str, Tensor]:
        """Return the merged network in the shape of one of the networks it was merged from.

        With the Grams of the merge (``merge_apart(..., keep_grams=True)``) the layers of a network
        of the same depth are fitted to channels that are joined. A network that lacks blocks has
        other inputs than these Grams say, and goes down as it is.
        """
        fit = way_back(self.fits[name], self.merged, name)
        joins = any(ours > theirs for ours, theirs in fit.sizes.values())
        if joins and fit.is_exact and not fit.absent and self.merged.grams:
            return lowered(fit, self.merged.state, self.merged.grams)
        return fit.down(self.merged.state)


def way_back(fit: Fit, merged: Merged, name: str) -> Fit:
    """Return the way of a network to the merged one, which may have moved its channels again."""
    orders = merged.permutations.get(name, {})
    plans = {g: plan.after(orders[g]) if g in orders else plan for g, plan in fit.plans.items()}
    return fit.with_plans(plans)


def fits_of(target: Architecture, architectures: Mapping[str, Architecture]) -> dict[str, Fit]:
    """Return the way of every network to the target, each proved.

    Raises
    ------
    NoFit
        A network cannot be matched; the message names it and the layer.
    """
    proved: dict[int, Fit] = {}
    for architecture in architectures.values():
        if id(architecture) not in proved:
            fit = proved[id(architecture)] = Fit(target, architecture)
            if not fit.is_same:
                prove(fit)
    return {name: proved[id(architecture)] for name, architecture in architectures.items()}


def reading_order(fits: Mapping[str, Fit]) -> list[str]:
    """Return the names, the one that lacks least of the target first: it is the reference."""

    def lost(name: str) -> tuple[int, int, int]:
        fit = fits[name]
        split = sum(max(0, ours - theirs) for ours, theirs in fit.sizes.values())
        joined = sum(max(0, theirs - ours) for ours, theirs in fit.sizes.values())
        return len(fit.absent), split, joined

    first = min(fits, key=lost)
    return [first, *(name for name in fits if name != first)]


def merge_resized(
    read: Callable[[str], Update],
    fits: Mapping[str, Fit],
    merge: Callable[[Iterator[Update]], Merged],
    *,
    leave: float = float("inf"),
) -> Resized:
    """Bring networks of unlike shapes to the target's, and merge them there.

    The first network in `reading_order` is the reference. Every other network is matched to it
    by unbalanced transport, and its weights and Grams are transported. It has no vote on blocks
    that it lacks.

    Parameters
    ----------
    read
        Returns the update of a name; called once for each.
    fits
        The way of every network to the target.
    merge
        Merges updates of the target's shape, such as :func:`merge_apart`.
    leave
        See :func:`match_plans`.
    """
    found: dict[str, Fit] = {}

    def updates() -> Iterator[Update]:
        reference: Update | None = None
        for name in reading_order(fits):
            update, fit = read(name), fits[name]
            if reference is None:
                reference = lifted = lift_update(update, fit)
            else:
                lifted, fit = transported(update, fit, reference, leave=leave)
            found[name] = fit
            yield lifted
            del update, lifted

    merged = merge(updates())
    return Resized(merged, found)


def transported(
    update: Update, fit: Fit, reference: Update, *, leave: float = float("inf")
) -> tuple[Update, Fit]:
    """Return an update in the target's shape, matched to the reference, and its way there."""
    if not fit.is_same_shape:
        plans = match_plans(
            fit, reference.state, update.state, reference.grams, update.grams, leave=leave
        )
        fit = fit.with_plans(plans)
    lifted = lift_update(update, fit)
    return replace(lifted, state=empty_from(fit, lifted.state, reference.state)), fit


def lift_update(update: Update, fit: Fit) -> Update:
    """Return an update in the target's shape, without a vote on what the station lacks."""
    if fit.is_same:
        return update
    return replace(
        update,
        state=fit.up(update.state),
        grams=fit.up_grams(update.grams),
        absent=frozenset(fit.absent),
        profiles=None,
    )
