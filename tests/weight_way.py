"""Follow one weight through a run in one process: list the files that pass it on, in order."""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from flwr.app import Message, RecordDict
from torch import nn

from hfedatm_core import Merged, Update

ROOT = Path(__file__).parents[1]
PACKAGES = ("hfedatm_core", "hfedatm", "client_app", "station_app", "server_app")
FOLDERS = tuple(f"{ROOT / package}/" for package in PACKAGES)


class WeightWay:
    """Within ``with``: note every file of ours that makes a new object with the weight in it.

    Such an object is a network, a state, a record, a message, an update or a list of them. The
    first function that returns it or passes it to another function counts as its maker; later
    functions that only pass it on do not count. A function that changes the weight of a network
    counts, too.
    """

    def __init__(self, weight: str) -> None:
        self.weight = weight
        self.files: dict[str, str] = {}
        """Files in the order in which the weight reaches them, each with its first function."""
        self._known: dict[int, Any] = {}  # kept alive, so that no id is reused
        self._versions: dict[int, int] = {}

    def __enter__(self) -> WeightWay:
        threading.setprofile(self._notice)
        sys.setprofile(self._notice)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]

    def _notice(self, frame: FrameType, event: str, value: Any) -> None:
        if event not in ("call", "return") or not _ours(frame):
            return
        at_hand = list(frame.f_locals.values())
        own = getattr(frame.f_locals.get("self"), "__dict__", {}).values()
        changed = [one for one in (*at_hand, *own) if self._is_changed(one)]
        made = [one for one in (at_hand if event == "call" else [value]) if self._is_new(one)]
        # A function's argument was made by its caller.
        who = frame if event == "return" else _caller(frame)
        if (made or changed) and who is not None and _ours(who):
            name = str(Path(_file(who)).relative_to(ROOT))
            self.files.setdefault(name, who.f_code.co_qualname)

    def _is_new(self, value: Any) -> bool:
        if id(value) in self._known or not self._holds(value):
            return False
        self._known[id(value)] = value
        return True

    def _is_changed(self, value: Any) -> bool:
        """Tell whether the weight of a network has changed since it was last seen."""
        if not isinstance(value, nn.Module) or not self._holds(value):
            return False
        version = dict(value.named_parameters())[self.weight]._version
        before = self._versions.setdefault(id(value), version)
        self._versions[id(value)] = version
        return version > before

    def _holds(self, value: Any) -> bool:
        if isinstance(value, nn.Module):
            return any(name == self.weight for name, _ in value.named_parameters())
        if isinstance(value, Update | Merged):
            return self.weight in value.state
        if isinstance(value, Message):
            return value.has_content() and self._holds(value.content)
        if isinstance(value, RecordDict):
            return any(self._holds(record) for record in value.array_records.values())
        if isinstance(value, list):
            return any(isinstance(one, Message | Update) and self._holds(one) for one in value)
        return isinstance(value, Mapping) and self.weight in value


def _ours(frame: FrameType) -> bool:
    return _file(frame).startswith(FOLDERS)


def _caller(frame: FrameType) -> FrameType | None:
    """Return the caller of a function, even if torch decorated the function."""
    above = frame.f_back
    while above is not None and Path(torch.__file__).parent in Path(_file(above)).parents:
        above = above.f_back
    return above


def _file(frame: FrameType) -> str:
    return frame.f_code.co_filename
