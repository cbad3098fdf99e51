"""Refining: the layers of a merged model are fitted to their inputs, in exchanges with the clients.

A merge takes the inputs of each station's network for those of the merged network. In an exchange
every client runs the merged model and its station's model on its training examples and says what
some layers of the merged model miss. Stations and server average the answers, and the server fits
these layers (`hfedatm_core.apart.refining`). Layers are fitted from the input on, because a layer's
inputs depend on all layers before it.
"""

from __future__ import annotations

from functools import partial

import torch
from flwr.app import ArrayRecord
from flwr.serverapp import Grid
from torch import nn

from hfedatm.base.exchange import MOST_GROUPED, RECORD, AskedLayers, to_answers
from hfedatm.base.kept_model import Sending
from hfedatm.base.records import record_to_state, state_to_record
from hfedatm.base.round_record import Refined
from hfedatm.base.settings import Settings
from hfedatm.base.wire import read_answers, reason_of
from hfedatm.contracts import Rule
from hfedatm_core import ChannelGraph, fit_layers
from hfedatm_core.apart.layer_pairs import LayerPairs
from hfedatm_core.data import DataSpec
from hfedatm_core.grams.layer_inputs import find_layer_inputs
from hfedatm_core.tensors import State, is_finite
from server_app.asking import Asking
from server_app.second_look import pooled


def exchanges(
    settings: Settings, rule: Rule, model: nn.Module, graph: ChannelGraph, spec: DataSpec
) -> list[AskedLayers]:
    """Return the layers of every exchange, if the rule ever refines, in the order of their use."""
    each = max((rule.refines(settings, r) for r in range(1, settings.rounds + 1)), default=0)
    if not each:
        return []
    known = find_layer_inputs(model, conv=True, bias=True, full=True)
    with LayerPairs(model, model, graph, None) as pairs:
        order = pairs.order(spec.example())
    widths = {name: known[name].module.weight[0].numel() + 1 for name in order}
    groups = {name: known[name].groups for name in order if known[name].groups > 1}
    order = [n for n in order if groups.get(n, 0) * widths[n] ** 2 <= MOST_GROUPED]
    return [
        AskedLayers(
            {name: widths[name] for name in some},
            {name: groups[name] for name in some if name in groups},
        )
        for some in (order[i : i + each] for i in range(0, len(order), each))
    ]


class Refining(Asking):
    """The exchanges after a merge."""

    def _refine(self, arrays: ArrayRecord, grid: Grid) -> None:
        """Fit the merged model's layers, exchange by exchange, as far as enough stations answer."""
        done, self._sending = Refined(asked=len(self.exchanges)), Sending(arrays)
        for number, asked in enumerate(self.exchanges, 1):
            model = record_to_state(arrays)
            template = asked.template(model)
            self._exchange = asked
            messages = self._messages("refine", "train.refine", arrays, grid, number)
            replies = grid.send_and_receive(messages, timeout=self.settings.station_timeout)
            expected = self._expected(
                arrays=template, record=RECORD, layers=asked.plain, shrunk=False
            )
            updates = self._updates(replies, expected, partial(read_answers, asked=asked))
            found = pooled(updates, self.settings, template, self._notes)
            self._sending.kept_by = set(found.nodes)
            if why := self._too_few(found.stations):
                done = done.model_copy(update={"reason": why})
                break
            try:
                answers = to_answers(asked, found.moments, found.grams)
                changes = _changes(model, fit_layers(model, self.graph, [answers]))
            except (ValueError, RuntimeError) as error:  # the layers before it are fitted
                done = done.model_copy(update={"reason": reason_of(error)})
                break
            self._sending.changes = state_to_record(changes)
            arrays.update(self._sending.changes)  # in place: Flower continues from this record
            done = done.model_copy(
                update={
                    "stations": found.stations,
                    "examples": found.examples,
                    "exchanges": number,
                }
            )
        self.record = self._notes.on(self.record).but(refined=done)


def _changes(before: State, after: State) -> State:
    """Return the tensors that have changed; none if any of them is not finite."""
    found = {name: value for name, value in after.items() if not torch.equal(value, before[name])}
    return found if all(is_finite(value) for value in found.values()) else {}
