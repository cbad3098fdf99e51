"""Call a rule's merge and check its result: anybody may have written the rule."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.linalg import LinAlgError  # type: ignore[attr-defined]

from hfedatm.base import tracebacks
from hfedatm.base.plugins import calling
from hfedatm.base.round_record import Merge
from hfedatm.base.text import printable
from hfedatm.contracts import Rule, Situation
from hfedatm_core import Merged, Update
from hfedatm_core.tensors import State, is_finite


class NotMerged(Exception):
    """These updates cannot be merged; the message says why. The run goes on without them."""


def checked_merge(rule: Rule, updates: Iterable[Update], situation: Situation) -> Merged:
    """Return the merged model, or raise `NotMerged`; errors in the rule's code are the user's."""
    with calling("server-rule", situation.settings.server_rule):
        try:
            merged = rule.merge(updates, situation)
            _check(merged, situation)
            return merged
        except (ValueError, ArithmeticError, LinAlgError) as error:
            tracebacks.raise_if_debugging(error)
            why = error
    raise NotMerged(printable(f"merge: {why}")) from why


def _check(merged: Any, situation: Situation) -> None:
    """Raise ``ValueError`` for a bad merged model, ``TypeError`` if there is no `Merged` at all."""
    if not isinstance(merged, Merged):
        raise TypeError(f"merge returned {type(merged).__name__}, not a Merged")
    if _shapes(merged.state) != (needed := _shapes(situation.previous)):
        wrong = sorted(set(_shapes(merged.state).items()) ^ set(needed.items()))[0][0]
        raise TypeError(f"merge returned a state that differs from the model in {wrong!r}")
    for station, orders in merged.permutations.items():
        for group in situation.graph.groups:
            order = orders.get(group.name, all_of := torch.arange(group.size))
            if not torch.equal(order.sort().values, all_of):
                raise TypeError(f"merge returned no permutation for {group.name} of {station}")
    Merge.model_validate(merged.report.to_dict())  # the round's line shows it
    for name, value in merged.state.items():
        if not is_finite(value):
            raise ValueError(f"{name} of the merged model is not finite")


def _shapes(state: State) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor."""
    return {name: tuple(value.shape) for name, value in state.items()}
