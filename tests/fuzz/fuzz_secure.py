"""What is fuzzed in the secure sum: the replies of one client, stage by stage.

Its stages cannot be replayed, since every sum has keys of its own: real clients answer, and one
spoils what it would have said. A masked vector of wrong numbers cannot be noticed before the sum
is; then the station is lost for the round, which is all that it may be.
"""

from __future__ import annotations

import secrets
from random import Random
from typing import Any

import torch
from flwr.app import Context, Message, RecordDict
from fuzz_mutations import spoil
from fuzz_targets import HOSTILE, Target
from helpers import small_settings, tiny_data, tiny_net

from client_app.app import app as client_app
from hfedatm.base.records import Task, layers_to_record, record_to_failures, state_to_record
from hfedatm.runtime.in_process import InProcessGrid
from station_app.hearing import TooFewClients
from station_app.station import run_station

STAGES = {
    "keys": "train",
    "share": "train.share",
    "check": "train.check",
    "mask": "train.mask",
    "sign": "train.sign",
    "reveal": "train.reveal",
}


class SecureStage:
    """One stage of a secure sum over four clients, of whom three are enough."""

    def __init__(self, stage: str) -> None:
        self.name, self._stage = f"secure sum: {stage}", stage
        self._settings = small_settings(
            stations=1, clients_per_station=4, station_rounds=1, secure_aggregation=True,
            gram_min_rows=1, client_timeout=10, model_params="width=4",
        )  # fmt: skip
        torch.manual_seed(0)
        self._model = state_to_record(tiny_net(tiny_data().spec, width=4).state_dict())
        found = self._run(lambda content: content)
        assert not record_to_failures(found["failures"]), "the honest are refused"

    def make(self, rng: Random) -> Any:
        return rng.random()

    def check(self, given: float) -> str:
        rng = Random(given)
        try:
            found = self._run(lambda content: spoil(content, rng))
        except TooFewClients as error:
            assert len(str(error)) < 2000
            assert self._stage == "mask", f"a lie about {self._stage} cost the station: {error}"
            return "station lost"
        failures = record_to_failures(found["failures"])
        assert all(f.node == f"client {HOSTILE}" and f.reason.isprintable() for f in failures)
        return "dropped" if failures else "accepted"

    def _run(self, change: Any) -> RecordDict:
        def app(message: Message, context: Context) -> Message:
            reply = client_app(message, context)
            hostile = message.metadata.dst_node_id == HOSTILE
            if hostile and message.metadata.message_type == STAGES[self._stage]:
                return Message(change(reply.content), reply_to=message)
            return reply

        # A client takes part in one sum of a step, so that each try is a step of its own.
        run = f"fuzz-{secrets.token_hex(8)}"
        task = Task("train", self._settings, 1, station=0, run=run)
        content = RecordDict(
            {
                "task": task.to_record(),
                "model": self._model,
                "layers": layers_to_record({"4": 36, "6": 4}),
            }
        )
        return run_station(InProcessGrid(app, range(4)), content)  # type: ignore[arg-type]


def make_secure_targets() -> list[Target]:
    return [SecureStage(stage) for stage in STAGES]
