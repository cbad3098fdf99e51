"""What is fuzzed of a message downwards: the index maps by which a node reorders its memory."""

from __future__ import annotations

from random import Random
from typing import Any

import torch
from flwr.app import ConfigRecord, Error, RecordDict
from fuzz_mutations import spoil

from hfedatm.base.index_maps import RECORD, StationMaps, read_maps
from hfedatm.base.records import BadTask
from hfedatm_core.channels.index_maps import IndexMap

MODEL = {"conv.weight": torch.zeros(4, 3), "conv.bias": torch.zeros(4), "fc.weight": torch.ones(2)}
ROUND = 9


class Maps:
    """Index maps: a permutation of every axis that is named, or a refusal in one line."""

    name = "index maps"

    def __init__(self) -> None:
        order = torch.tensor([2, 0, 1, 3])
        found = IndexMap({("conv.weight", 0): order, ("conv.bias", 0): order})
        maps = StationMaps({3: found, 8: found}, forgotten=1)
        self._honest = RecordDict({RECORD: maps.to_record(), "task": ConfigRecord({"round": 9})})
        assert self.check(self._honest) == "accepted"

    def make(self, rng: Random) -> Any:
        return spoil(self._honest, rng)

    def check(self, given: Any) -> str:
        if isinstance(given, Error):
            return "dropped"
        try:
            maps = read_maps(given, MODEL, ROUND)
        except BadTask as error:
            assert str(error).isprintable() and len(str(error)) < 400, error
            return "dropped"
        kept = {f"z.{name}": torch.rand(value.shape) for name, value in MODEL.items()}
        for saved in range(ROUND):
            moved = maps.moved(saved, kept, MODEL, {})
            for name, value in moved.items():
                assert value.shape == kept[name].shape
                assert torch.equal(
                    value.flatten().sort().values, kept[name].flatten().sort().values
                )
        return "accepted"
