"""The messages with which the server asks its stations."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from flwr.app import ArrayRecord, Message, RecordDict

from hfedatm.base.records import Task


def to_stations(
    stations: Iterable[int],
    message_type: str,
    task: Task,
    records: Mapping[str, Any],
    model_of: Callable[[int], ArrayRecord],
) -> list[Message]:
    """Return a message for every station: its task and model, and the ``records`` all get."""
    return [
        Message(
            RecordDict(
                {
                    **records,
                    "model": model_of(station),
                    "task": task.but(station=station).to_record(),
                }
            ),
            station,
            message_type,
        )
        for station in stations
    ]
