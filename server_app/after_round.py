"""What happens after each round: evaluate on the unseen domain, keep everything, say one line."""

from __future__ import annotations

import logging
import math
import time
from typing import Any

from flwr.app import ArrayRecord
from torch import nn

from hfedatm.base.batches import Batches
from hfedatm.base.building import pick_device, target_domain
from hfedatm.base.errors import UserError
from hfedatm.base.evaluation import evaluate
from hfedatm.base.records import record_to_state
from hfedatm.base.results import RunFolder
from hfedatm.base.seeding import seed_torch
from hfedatm.base.text import printable
from hfedatm_core.data import DomainData
from server_app import diagnostics
from server_app.narration import outcome, round_line
from server_app.scores import summarise
from server_app.strategy import HFedATMStrategy
from server_app.tracking import open_trackers

log = logging.getLogger("hfedatm")


class AfterRound:
    """Called by Flower after every round with the model as it then is."""

    def __init__(
        self, folder: RunFolder, strategy: HFedATMStrategy, model: nn.Module, data: DomainData
    ) -> None:
        settings = folder.settings
        self._folder, self._strategy, self._model = folder, strategy, model
        self._spec, self._target = data.spec, target_domain(settings, data)
        self._device = pick_device(settings)
        self._unseen = Batches(data.domains[self._target], data.spec, 256, self._device)
        self._trackers = open_trackers(settings, folder.path, strategy.done)
        self._started = time.perf_counter()

    def __call__(self, number: int, arrays: ArrayRecord) -> None:
        """Finish a round; Flower also calls before the first one, when there is nothing to keep."""
        if number == 0:
            return
        settings, record = self._folder.settings, self._strategy.record
        if "source" in record or not settings.validation_fraction:
            record["unseen"] = self._evaluate(arrays)
        now = time.perf_counter()
        record["seconds"], self._started = now - self._started, now
        self._folder.save_round(record, record_to_state(arrays), self._strategy.remember())
        self._trackers.log(record)
        log.info(round_line(record, settings))
        for failure in record["failures"]:
            log.warning(
                "  left out: %s: %s", printable(failure["node"]), printable(failure["reason"])
            )
        for cut in record["cuts"]:
            log.warning("  cut back: %s: %s", printable(cut["node"]), printable(cut["reason"]))

    def finish(self) -> dict[str, Any]:
        """Write and say the outcome; a run in which no round changed the model has failed."""
        rounds = self._folder.rounds()
        summary = summarise(rounds)
        self._folder.finish(summary)
        self._trackers.finish(summary)
        log.info(outcome(summary, rounds, self._folder.path))
        if rounds and all("kept" in record for record in rounds):
            first = rounds[0]["failures"][0]
            raise UserError(
                f"no round changed the model; round 1: {rounds[0]['kept']}; first failure: "
                f"{first['node']}: {first['reason']}"
            )
        return summary

    def _evaluate(self, arrays: ArrayRecord) -> dict[str, Any]:
        self._model.load_state_dict(record_to_state(arrays))
        seed_torch(self._folder.settings.seed, self._device)
        result = evaluate(self._model.to(self._device), self._unseen)
        if shown := self._strategy.round_diagnostics:
            mistakes = diagnostics.mistakes(self._model, self._unseen, self._spec)
            number = self._strategy.record["round"]
            diagnostics.save(self._folder.path, number, shown.arrays | mistakes)
        return {
            "domain": self._target,
            "accuracy": result["correct"] / result["num-examples"],
            # JSON has no NaN, which is the loss of a model that has diverged
            "loss": result["loss"] if math.isfinite(result["loss"]) else None,
        }
