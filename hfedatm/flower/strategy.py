"""HFedATM as a strategy that replaces Flower's FedAvg."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Literal

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg
from torch import nn

from hfedatm.flower.carrying import Carried, take_grams
from hfedatm.flower.naming import named_as
from hfedatm_core import AlignmentOptions, ChannelGraph, Merged, MergeReport, Update, merge
from hfedatm_core.averaging import check_finite
from hfedatm_core.regmean.layers import check_grams
from hfedatm_core.tensors import State

_LOG = logging.getLogger("flwr")


class HFedATM(FedAvg):
    """Align the clients' channels by optimal transport, then merge by RegMean.

    It takes the arguments of ``FedAvg``, and the network. In a flat federation clients act as
    stations; with `hfedatm.flower.stations` there are three tiers. Layers for which every reply
    carries a Gram (``ClientApp(mods=[grams()])``) are merged by RegMean, the others averaged.

    Nguyen et al., "HFedATM: Hierarchical Federated Domain Generalization via Optimal Transport and
    Regularized Mean Aggregation", arXiv:2508.05135.

    Parameters
    ----------
    model
        The network; its weights do not matter.
    example
        The network's input: a tensor, a tuple of arguments or a mapping of keyword arguments.
    alpha
        Off-diagonal entries of Grams are multiplied by it.
    ridge
        Relative ridge of RegMean.
    alignment
        The options of the alignment.
    broadcast
        The model that clients continue from: the ``merged`` model, the ``average`` of the aligned
        models, or ``auto``: the average unless a channel had to be moved. Results and evaluation
        always use the merged model.
    fedavg
        The arguments of ``FedAvg``.
    """

    report: MergeReport | None = None
    """The report of the last round's merge, layer by layer; None if there was none."""

    not_aligned: str = ""
    """Why the last round's models were averaged as they are; empty if they were aligned. Single
    layers that stay unaligned are in ``graph.unaligned``."""

    def __init__(
        self,
        *fedavg: Any,
        model: nn.Module,
        example: Any,
        alpha: float = 0.75,
        ridge: float = 1e-6,
        alignment: AlignmentOptions | None = None,
        broadcast: Literal["auto", "merged", "average"] = "auto",
        **named: Any,
    ) -> None:
        super().__init__(*fedavg, **named)
        self.alpha, self.ridge, self.broadcast = alpha, ridge, broadcast
        self.alignment = alignment or AlignmentOptions()
        self.graph = ChannelGraph.trace(model, example)
        self._model = {name: tensor.to("meta") for name, tensor in model.state_dict().items()}
        self._published: ArrayRecord | None = None
        self._start: ArrayRecord | None = None

    def summary(self) -> None:
        """Log the summary of ``FedAvg``, and the channel groups that will be aligned."""
        super().summary()
        _LOG.info("\t└──> HFedATM: %d channel groups are aligned", len(self.graph.groups))
        for module, reason in self.graph.unaligned.items():
            _LOG.info("\t\t├── not aligned: %s: %s", module, reason)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Send out the model that ``broadcast`` chooses."""
        # Replace only the model published here: a wrapper may have added noise to it.
        if arrays is self._published and self._start is not None:
            arrays = self._start
        return super().configure_train(server_round, arrays, config, grid)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Merge the models; metrics are aggregated as by ``FedAvg``."""
        self.report, self.not_aligned = None, ""
        answers = list(replies)
        carried = {id(message): take_grams(message) for message in answers}
        arrays, metrics = super().aggregate_train(server_round, answers)
        if arrays is None:
            return arrays, metrics
        usable = [message for message in answers if not message.has_error()]
        usable.sort(key=lambda message: message.metadata.src_node_id)  # the first is the reference
        try:
            updates = [u for m in usable if (u := self._update(m, carried[id(m)])) is not None]
            merged = self._merged(updates)
        except ValueError as error:
            self.not_aligned = f"averaged by FedAvg: {error}"
            _LOG.warning("hfedatm: round %d is %s", server_round, self.not_aligned)
            return arrays, metrics
        return self._publish(merged, arrays), metrics

    def _update(self, message: Message, carried: Carried) -> Update | None:
        """Return a reply as an update; if it cannot be used, return None and log the reason."""
        who = f"node {message.metadata.src_node_id}"
        [record] = message.content.array_records.values()
        [numbers] = message.content.metric_records.values()
        state = named_as(record, self._model)
        try:
            check_finite(state, who)
        except ValueError as error:
            _LOG.warning("hfedatm: left out: %s", error)
            return None
        try:
            check_grams(carried.grams, state, who)
        except ValueError as error:
            _LOG.warning("hfedatm: its Grams are left out: %s", error)
            carried = replace(carried, grams={})
        shrunk = {id(gram): gram.shrink(self.alpha) for gram in carried.grams.values()}
        return Update(
            state,
            {name: shrunk[id(gram)] for name, gram in carried.grams.items()},
            num_examples=numbers[self.weighted_by_key],  # type: ignore[arg-type]
            num_clients=carried.clients,
            name=who,
        )

    def _merged(self, updates: list[Update]) -> Merged:
        if not updates:
            raise ValueError("no reply can be used")
        missing = self._model.keys() - updates[0].state.keys()
        if missing:
            self.not_aligned = (
                f"nothing is aligned, as replies lack {len(missing)} tensors of the model, such as "
                f"{min(missing)}"
            )
            _LOG.warning("hfedatm: %s", self.not_aligned)
        elif not self.graph.groups:
            self.not_aligned = "nothing is aligned, as the network has no channel groups"
        return merge(
            updates,
            self.graph,
            fot=not missing,
            regmean=any(update.grams for update in updates),
            ridge=self.ridge,
            alignment=self.alignment,
        )

    def _publish(self, merged: Merged, like: ArrayRecord) -> ArrayRecord:
        """Return the merged model under the app's names; keep the model clients continue from."""
        self.report = merged.report
        solved = sum(layer.how == "regmean" for layer in merged.report.layers.values())
        _LOG.info(
            "hfedatm: merged %d models, moved %d channels, %d of %d layers by RegMean",
            *(len(merged.report.stations), merged.moved, solved, len(merged.report.layers)),
        )
        average_out = self.broadcast == "average" or (self.broadcast == "auto" and not merged.moved)
        self._published = _as_record(merged.state, like)
        self._start = _as_record(merged.average, like) if average_out else self._published
        return self._published


def _as_record(state: State, like: ArrayRecord) -> ArrayRecord:
    """Return a model under the names of the app's arrays and with the types FedAvg gives them.

    FedAvg turns integer buffers into floats, and Flower's mods for clipping rely on that.
    """
    # Numbered arrays stand in the model's order.
    values = (
        state
        if any(name in state for name in like)
        else dict(zip(like, state.values(), strict=True))
    )
    return ArrayRecord(
        {
            name: Array(values[name].detach().cpu().numpy().astype(array.dtype))
            for name, array in like.items()
        }
    )
