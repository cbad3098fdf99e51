"""Progress of a round, for `hfedatm watch` and on the terminal of `hfedatm run`."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from threading import Lock

from flwr.app import Message
from flwr.serverapp import Grid

from hfedatm.base.presence import PROGRESS
from hfedatm.base.privacy_settings import clients_asked
from hfedatm.base.settings import Settings
from hfedatm.base.streaming import StreamingGrid
from hfedatm.base.tiers import children, local_rounds
from hfedatm.runtime.stations import LocalStationsGrid
from hfedatm_files import write_text

EVERY = 0.5
"""Seconds between two writes; most replies arrive faster."""


class Progress:
    """Count the replies of a round, and write the counts into the run's folder.

    Stations in other processes report nothing before they are done: then only stations are counted.
    """

    def __init__(self, folder: Path, settings: Settings) -> None:
        self._file, self._settings = folder / PROGRESS, settings
        self._lock = Lock()
        self._written = 0.0
        self._round = self._stations = self._clients = 0
        self._of_clients = 0
        self._shown = sys.stdout.isatty()

    def follow(self, stations: Grid) -> None:
        """Follow a Grid of stations, and their clients' Grids if those are in this process."""
        s = self._settings
        if isinstance(stations, LocalStationsGrid):
            self._of_clients = s.stations * local_rounds(s) * clients_asked(s)
            self._follow_clients(stations)
        if isinstance(stations, StreamingGrid):
            stations.on_sent, stations.on_reply = self._asked, self._station_replied

    def _follow_clients(self, stations: LocalStationsGrid) -> None:
        for grid in stations.grids.values():
            if isinstance(grid, LocalStationsGrid):
                self._follow_clients(grid)
            elif isinstance(grid, StreamingGrid):
                grid.on_reply = self._client_replied

    def end(self) -> None:
        """Take the line off the terminal, for whatever is printed next; nothing more is shown."""
        with self._lock:
            if self._shown:
                print("\r\x1b[K", end="", flush=True)
            self._shown = False  # stations are threads, and may still be at work

    def _asked(self, messages: Sequence[Message]) -> None:
        if messages and _trains(messages[0]):
            with self._lock:
                self._round = int(messages[0].content["task"]["round"])  # type: ignore[arg-type]
                self._stations = self._clients = 0
                self._note(at_once=True)

    def _client_replied(self, message: Message) -> None:
        if _trains(message):
            with self._lock:
                self._clients += 1
                self._note()

    def _station_replied(self, message: Message) -> None:
        if _trains(message):
            with self._lock:
                self._stations += 1
                self._note()
                if self._shown and self._stations >= children(self._settings, 0):
                    print("\r\x1b[K", end="", flush=True)  # the round's line is printed next

    def _note(self, at_once: bool = False) -> None:
        now = time.monotonic()
        if not at_once and now - self._written < EVERY:
            return
        self._written = now
        said = {
            "round": self._round,
            "stations": [self._stations, children(self._settings, 0)],
            "clients": [self._clients, self._of_clients],
        }
        write_text(self._file, json.dumps(said) + "\n")
        if self._shown:
            text = f"{self._stations} of {children(self._settings, 0)} stations are done"
            if self._of_clients:
                text += f", {self._clients} of {self._of_clients} client trainings"
            print(f"\r\x1b[Kround {self._round:>3}: {text}", end="", flush=True)


def _trains(message: Message) -> bool:
    return bool(message.content["task"]["kind"] == "train")
