"""The end of each round: evaluate on the unseen domain, save everything, print one line."""

from __future__ import annotations

import logging
import math
import time
from typing import Any

from flwr.app import ArrayRecord
from torch import nn

from hfedatm.base.batches import Batches
from hfedatm.base.building import frozen_part, pick_device, target_domain
from hfedatm.base.errors import UserError
from hfedatm.base.evaluation import evaluate
from hfedatm.base.metric_sums import values
from hfedatm.base.records import record_to_state
from hfedatm.base.results import RunFolder
from hfedatm.base.round_record import Unseen, optional_fields
from hfedatm.base.schedule import evaluates
from hfedatm.base.seeding import seed_torch
from hfedatm.base.text import printable
from hfedatm_core.data import DomainData
from server_app import diagnostics
from server_app.narration import outcome, round_line, unknown_numbers
from server_app.scores import summarise
from server_app.strategy import HFedATMStrategy
from server_app.tracking import open_trackers

log = logging.getLogger("hfedatm")


class AfterRound:
    """Flower calls this after every round with the current model."""

    def __init__(
        self, folder: RunFolder, strategy: HFedATMStrategy, model: nn.Module, data: DomainData
    ) -> None:
        settings = folder.settings
        self._folder, self._strategy, self._model = folder, strategy, model
        self._spec, self._target = data.spec, target_domain(settings, data)
        self._device = pick_device(settings)
        self._part = frozen_part(settings, data.spec)
        self._frozen = self._part.state if self._part else {}
        self._unseen = Batches(data.domains[self._target], data.spec, 256, self._device)
        self._trackers = open_trackers(settings, folder.path, strategy.done)
        self._started = time.perf_counter()
        self._looked_for = False  # whether the numbers in show-metrics were there
        self._first = True  # the first round of this process; a resumed run may have failed before

    def __call__(self, number: int, arrays: ArrayRecord) -> None:
        """Finish a round; Flower also calls this before round 1, when there is nothing to save."""
        if number == 0:
            return
        settings, record = self._folder.settings, self._strategy.record
        # The source is not measured if every client is too small to keep validation examples.
        due = evaluates(settings, record.round) or not settings.validation_fraction
        unseen = self._evaluate(arrays, record.round) if due else None
        now = time.perf_counter()
        record = record.but(unseen=unseen, seconds=now - self._started)
        self._started = now
        remembered = self._strategy.memory.remember(record.round)
        whole = {**self._frozen, **record_to_state(arrays)}
        self._folder.save_round(record, whole, remembered)
        self._trackers.log(record)
        log.info(round_line(record, settings))
        if unseen and record.clients.answered and not self._looked_for:
            self._looked_for = True
            for line in unknown_numbers(record, settings):
                log.warning("  %s", line)
        for what, some in (("left out", record.failures), ("cut back", record.cuts)):
            for one in some:
                log.warning("  %s: %s: %s", what, printable(one.node), printable(one.reason))
        first, self._first = self._first, False
        if first and not record.stations.answered and all(r.kept for r in self._folder.rounds()):
            self.finish()  # the reason will not go away in later rounds

    def finish(self) -> dict[str, Any]:
        """Write and print the outcome; a run in which no round changed the model has failed."""
        rounds = self._folder.rounds()
        summary = summarise(rounds)
        if self._part:
            summary["frozen"] = self._part.savings(self._device)
        self._folder.finish(summary)
        self._trackers.finish(summary)
        log.info(outcome(summary, rounds, self._folder.path))
        if self._part:
            log.info(
                "Frozen: %.1f kB of a model not sent, %.2f ms of an example not computed again",
                summary["frozen"]["bytes_per_model"] / 1e3,
                summary["frozen"]["seconds_per_example"] * 1e3,
            )
        if rounds and all(record.kept for record in rounds):
            why = f"no round changed the model; round 1: {rounds[0].kept}"
            for first in rounds[0].failures[:1]:
                why += f"; first failure: {first.node}: {first.reason}"
            raise UserError(why)
        return summary

    def _evaluate(self, arrays: ArrayRecord, number: int) -> Unseen:
        self._model.load_state_dict(record_to_state(arrays))
        seed_torch(self._folder.settings.seed, self._device)
        metrics, task = self._strategy.metrics, self._strategy.method.task
        result = evaluate(self._model.to(self._device), self._unseen, metrics, task)
        if shown := self._strategy.round_diagnostics:
            kept = dict(shown.arrays)
            if task.has_classes:
                kept |= diagnostics.mistakes(self._model, self._unseen, self._spec)
            diagnostics.save(self._folder.path, number, kept)
        return Unseen(
            domain=self._target,
            accuracy=result.correct / result.examples,
            # JSON has no NaN, which is the loss of a model that has diverged
            loss=result.loss if math.isfinite(result.loss) else None,
            **optional_fields(values(metrics, result.sums) if metrics else None, task.measure),
        )
