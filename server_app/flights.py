"""Stations at work while the server goes on: since when, from which model, until when."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from flwr.app import ArrayRecord

from hfedatm.base.records import record_to_state, state_to_record
from hfedatm_core.tensors import State


@dataclass(frozen=True)
class Flight:
    """A station's work: the round that it was asked in, and when it ends by the virtual clock."""

    round: int
    due: float = 0.0


@dataclass
class Flights:
    """The stations at work, and all that asks them again after a restart of the server.

    Attributes
    ----------
    now
        The round that is being merged.
    clock
        Virtual seconds since the start of the run.
    at_work, landed
        Stations whose work goes on, and those that answered in this round.
    starts
        Round -> the records that its stations were sent: ``model``, ``shared``, ``rule``. At most
        ``most_late + 1`` rounds, because a later update is dropped.
    too_late
        Stations whose update was dropped in this round, with the number of rounds it was late.
    waiting
        Whether the next messages of the server ask for training.
    """

    most_late: int = 0
    now: int = 0
    clock: float = 0.0
    at_work: dict[int, Flight] = field(default_factory=dict)
    landed: dict[int, Flight] = field(default_factory=dict)
    starts: dict[int, Mapping[str, ArrayRecord]] = field(default_factory=dict)
    too_late: dict[int, int] = field(default_factory=dict)
    waiting: bool = False

    def begin_round(self, number: int) -> None:
        """Forget who landed in the last round, and models that no update can count from."""
        self.now, self.landed, self.too_late = number, {}, {}
        used = {flight.round for flight in self.at_work.values()}
        self.starts = {r: s for r, s in self.starts.items() if r in used and not self.is_old(r)}

    def is_old(self, number: int) -> bool:
        """Tell whether an update that started in this round is too late."""
        return self.now - number > self.most_late

    def depart(self, station: int, seconds: float = 0.0) -> None:
        """Note that a station begins to work; a station that works already goes on."""
        self.at_work.setdefault(station, Flight(self.now, self.clock + seconds))

    def land(self, station: int) -> bool:
        """Note that a station has finished; return whether its update still counts."""
        flight = self.landed[station] = self.at_work.pop(station)
        self.clock = max(self.clock, flight.due)
        if self.is_old(flight.round):
            self.too_late[station] = self.now - flight.round
            return False
        return True

    def late(self, station: int) -> int:
        """Return how many rounds late the update of a landed station is."""
        return self.now - self.landed[station].round if station in self.landed else 0

    def start_of(self, station: int) -> State:
        """Return the model that a landed station started from."""
        return record_to_state(self.starts[self.landed[station].round]["model"])

    # --- memory that survives a restart of the server

    def remember(self) -> State:
        """Return everything as tensors; empty if the server waits for all stations."""
        if not self.at_work and not self.clock:
            return {}
        found = {"clock": torch.tensor(self.clock, dtype=torch.float64)}
        for station, flight in self.at_work.items():
            found[f"round/{station}"] = torch.tensor(flight.round)
            found[f"due/{station}"] = torch.tensor(flight.due, dtype=torch.float64)
        used = {flight.round for flight in self.at_work.values()}
        for number in used & self.starts.keys():
            for record, arrays in self.starts[number].items():
                for name, tensor in record_to_state(arrays).items():
                    found[f"start/{number}/{record}/{name}"] = tensor
        return found

    def restore(self, memory: State) -> None:
        """Restore what `remember` returned."""
        self.clock = float(memory.get("clock", 0.0))
        self.at_work, starts = {}, dict[int, dict[str, State]]()
        for key, tensor in memory.items():
            kind, _, rest = key.partition("/")
            if kind == "round":
                due = float(memory[f"due/{rest}"])
                self.at_work[int(rest)] = Flight(int(tensor), due)
            elif kind == "start":
                number, record, name = rest.split("/", 2)
                starts.setdefault(int(number), {}).setdefault(record, {})[name] = tensor
        self.starts = {
            number: {record: state_to_record(state) for record, state in records.items()}
            for number, records in starts.items()
        }
