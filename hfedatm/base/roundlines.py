"""The lines of ``rounds.jsonl``: what whoever reads them may rely on.

A results folder may come from elsewhere, and much in it was said by nodes. A line is read whole or
refused with one message; its text is printable, its numbers are numbers of a plausible size.
"""

from __future__ import annotations

import json
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from hfedatm.base.text import printable

MOST_TEXT = 1000
"""Characters of any text of a line, such as a reason or a name, that are shown."""
Number = Annotated[float, Field(ge=-1e30, le=1e30)]
Count = Annotated[float, Field(ge=0, le=1e18)]
Whole = Annotated[int, Field(ge=0, le=2**53)]
Share = Annotated[float, Field(ge=0, le=1 + 1e-6)]  # a mean of ones may round up
_OPEN = ConfigDict(strict=True, extra="allow")
_ABSENT: Any = None


class _Failure(BaseModel):
    model_config = _OPEN
    node: str
    reason: str


class _Up(BaseModel):
    model_config = _OPEN
    clients: Count
    stations: Count


class _Stations(BaseModel):
    model_config = _OPEN
    asked: Whole
    answered: Whole


class _Clients(BaseModel):
    model_config = _OPEN
    answered: Whole


class _Station(BaseModel):
    model_config = _OPEN
    __pydantic_extra__: dict[str, Number]
    name: str
    num_examples: Count = Field(alias="num-examples")
    num_clients: Count = Field(alias="num-clients")


class _Domain(BaseModel):
    model_config = _OPEN
    accuracy: Share
    examples: Count = 0


class _StationScore(BaseModel):
    model_config = _OPEN
    accuracy: Share
    domains: dict[str, Count] = {}


class _Source(BaseModel):
    model_config = _OPEN
    accuracy: Share
    score: Share = 0.0
    loss: Number | None = None
    domains: dict[str, _Domain] = {}
    stations: dict[str, _StationScore] = {}


class _Unseen(BaseModel):
    model_config = _OPEN
    domain: str
    accuracy: Share
    loss: Number | None = None


class _Privacy(BaseModel):
    model_config = _OPEN
    epsilon: Count
    budget: Count | None
    delta: Count


class _Group(BaseModel):
    model_config = _OPEN
    moved: Whole
    cost: float
    identity_cost: float


class _Layer(BaseModel):
    model_config = _OPEN
    how: str
    reason: str = ""


class _Merge(BaseModel):
    model_config = _OPEN
    reference: str
    stations: dict[str, dict[str, _Group]]
    layers: dict[str, _Layer]


class _Line(BaseModel):
    model_config = _OPEN
    round: Annotated[int, Field(ge=1, le=2**31)]
    seconds: Count
    failures: list[_Failure]
    bytes_up: _Up
    stations: _Stations
    clients: _Clients
    per_station: list[_Station]
    train_seconds: Count = 0
    merge_seconds: Number = 0
    moved: Whole = 0
    cuts: list[_Failure] = []
    # These are there or not, and never null.
    loss: Number = 0.0
    source: _Source = _ABSENT
    unseen: _Unseen = _ABSENT
    privacy: _Privacy = _ABSENT
    merge: _Merge = _ABSENT
    kept: str = ""
    taken_back: str = ""


class BadLine(ValueError):
    """A line is not that of a round; the message says why."""


def read_line(text: str) -> dict[str, Any]:
    """Return the record of a round; raises `BadLine` for anything else."""
    try:
        value = json.loads(text)
        _Line.model_validate(value)
        cleaned: dict[str, Any] = _clean(value)
        return cleaned
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise BadLine(printable(f"{where}: {first['msg']}")) from None
    except Exception as error:  # whatever whoever wrote it put there
        raise BadLine(f"each line must be JSON ({printable(error)})") from None


def _clean(value: Any) -> Any:
    if isinstance(value, dict):
        return {printable(key): _clean(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_clean(part) for part in value]
    return printable(value, MOST_TEXT) if isinstance(value, str) else value
