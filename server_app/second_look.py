"""The second look: BatchNorm statistics of a merged model, measured at the clients.

A merge only estimates the statistics of the merged model. In a second look every client measures
them on its training examples, stations and server average them, and the mean replaces the merged
model's running means and variances before the model is evaluated, saved and sent out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from torch import nn

from hfedatm.base.admission import Admission
from hfedatm.base.settings import Settings
from hfedatm.base.wire import NodeUpdate
from hfedatm.contracts import Rule
from hfedatm_core import Gram, GramAccumulator, MeanAccumulator
from hfedatm_core.data import DataSpec
from hfedatm_core.norm_statistics import norm_moments, unchanged_moments
from hfedatm_core.tensors import State
from server_app.round_notes import RoundNotes


@dataclass(frozen=True)
class Looked:
    """The mean of what stations measured, and how many examples of which stations."""

    moments: State = field(default_factory=dict)
    stations: int = 0
    examples: int = 0
    grams: Mapping[str, Gram] = field(default_factory=dict)
    """The mean of the Grams that came with the moments."""
    nodes: frozenset[int] = frozenset()
    """Stations that answered and so keep the model, even if their moments were left out."""


def norms_to_measure(settings: Settings, rule: Rule, model: nn.Module, spec: DataSpec) -> State:
    """Return moments of the shape that clients send, if the rule ever asks for them."""
    if not any(rule.looks_again(settings, r) for r in range(1, settings.rounds + 1)):
        return {}
    found, _ = norm_moments(model, [(spec.example(), None)])
    return unchanged_moments(found)


def pooled(
    updates: Iterable[NodeUpdate], settings: Settings, start: State, notes: RoundNotes
) -> Looked:
    """Return the means of the stations' numbers by examples, each cut back to the usual bounds."""
    mean, grams, examples, nodes = MeanAccumulator(), GramAccumulator(), 0, set()
    measured = False
    admission = Admission(settings, "stations", start, compare=False)
    for update in updates:
        admission.add(update.as_update())
        nodes.add(update.node)
        del update
    for admitted in admission:
        mean.add(admitted.state, admitted.num_examples, admitted.name, checked=True)
        if admitted.grams:
            grams.add(admitted.grams, admitted.num_examples)
            measured = True
        examples += admitted.num_examples
        del admitted
    for failure in admission.left_out():
        notes.fail(failure)
    notes.cuts += admission.cut_back()
    admission.close()
    count = mean.count
    moments = mean.result() if count else {}
    means = grams.result() if measured else {}
    return Looked(moments, count, examples, means, frozenset(nodes))
