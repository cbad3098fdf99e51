"""The record of a round: the content of a line of ``rounds.jsonl``.

A results folder may come from elsewhere, and nodes reported much of its content. A line is read
whole or refused with one message; its text is printable, its numbers have a plausible size. Fields
that a later version added to a line are kept.
"""

from __future__ import annotations

import json
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from hfedatm.base.text import printable

MOST_TEXT = 1000
"""Most characters that are shown of a text in a line, such as a reason or a name."""
# Unions, so that an integer stays an integer when it is written again.
Number = Annotated[int | float, Field(ge=-1e30, le=1e30)]
Count = Annotated[int | float, Field(ge=0, le=1e18)]
Whole = Annotated[int, Field(ge=0, le=2**53)]
Share = Annotated[int | float, Field(ge=0, le=1 + 1e-6)]  # rounding may lift a mean of ones above 1


ACCURACY = "accuracy"
"""What the field ``accuracy`` of a score holds, unless its ``measure`` says otherwise."""


class BadLine(ValueError):
    """A line does not describe a round; the message says why."""


class _Part(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow", frozen=True)


class Failure(_Part):
    """A node that was left out of a round or whose update was cut back, and why."""

    node: str
    reason: str


class BytesUp(_Part):
    """Bytes sent up by each tier."""

    clients: Count
    stations: Count


class StationCounts(_Part):
    """Numbers of stations in a round."""

    asked: Whole
    answered: Whole


class ClientCounts(_Part):
    """Numbers of clients in a round's last station round."""

    answered: Whole


class StationRecord(_Part):
    """The report of one station; numbers of rules and methods are extra fields."""

    __pydantic_extra__: dict[str, Number]
    name: str
    loss: Number = 0.0
    num_examples: Count = Field(alias="num-examples")
    num_clients: Count = Field(alias="num-clients")
    bytes_below: Count = Field(0, alias="bytes-up")
    """Bytes that the clients sent to the station."""
    gram_bytes_below: Count = Field(0, alias="gram-bytes-up")
    gram_seconds: Count = Field(0.0, alias="gram-seconds")
    epsilon: Count = 0.0
    seconds: Count = 0.0
    bytes_up: Count = 0
    """Bytes that the station sent to the server."""


class DomainScore(_Part):
    """Accuracy on the validation examples of one domain."""

    accuracy: Share
    examples: Count = 0


class StationScore(_Part):
    """Accuracy on the validation examples of one station's clients, and their domains."""

    accuracy: Share
    domains: dict[str, Count] = {}


class Source(_Part):
    """Scores of the model on the validation examples of all clients."""

    accuracy: Share
    loss: Number | None = None
    score: Share = 0.0
    """The score that chooses the best model; runs of older versions have none."""
    domains: dict[str, DomainScore] = {}
    stations: dict[str, StationScore] = {}
    metrics: dict[str, Number] = {}
    """By the names in the setting ``metrics``."""
    measure: str = ACCURACY
    """The learning task's name of the mean score that every ``accuracy`` holds."""

    @property
    def rank(self) -> tuple[float, float]:
        """The order of rounds: by the score, then by the accuracy."""
        score = self.score if "score" in self.model_fields_set else self.accuracy
        return float(score), float(self.accuracy)


class Unseen(_Part):
    """Scores of the model on the unseen domain."""

    domain: str
    accuracy: Share
    loss: Number | None = None
    metrics: dict[str, Number] = {}
    """By the names in the setting ``metrics``."""
    measure: str = ACCURACY


class Privacy(_Part):
    """The most privacy that any client has spent, and the budget."""

    epsilon: Count
    budget: Count | None
    delta: Count


class GroupMerge(_Part):
    """How one channel group of a station was aligned."""

    moved: Whole
    cost: int | float
    identity_cost: int | float


class LayerMerge(_Part):
    """How one layer was merged, and the reason."""

    how: str
    reason: str = ""


class LayerMergeQuality(_Part):
    """How well a layer of stations that did not share a start was merged; see `LayerQuality`."""

    correlation_before: Number | None = None
    correlation_after: Number | None = None
    variance_before: Number = 1.0
    variance_after: Number = 1.0


class Merge(_Part):
    """The report of a merge, per station and channel group, and per layer."""

    reference: str
    stations: dict[str, dict[str, GroupMerge]]
    layers: dict[str, LayerMerge]
    unaligned: dict[str, str] = {}
    quality: dict[str, LayerMergeQuality] = {}
    lone_norms: dict[str, str] = {}


class Refined(_Part):
    """How far the layers of the merged model were fitted to their inputs."""

    stations: Whole = 0
    examples: Count = 0
    exchanges: Whole = 0
    asked: Whole = 0
    """Exchanges that were to be done."""
    reason: str = ""
    """Why there were not all of them."""


class SecondLook(_Part):
    """BatchNorm statistics of the merged model, measured at the clients; or why there are none."""

    stations: Whole = 0
    examples: Count = 0
    passes: Whole = 0
    reason: str = ""
    """Why there was none, or why its last pass did not count."""


class RoundRecord(_Part):
    """Everything that is kept of a finished round besides its model.

    A field that is None did not happen in the round and is not in its line: a round without
    evaluation has no ``source``, and a round that kept the model has no ``merge``.
    """

    round: Annotated[int, Field(ge=1, le=2**31)]
    failures: list[Failure]
    cuts: list[Failure] = []
    bytes_up: BytesUp
    stations: StationCounts
    clients: ClientCounts
    per_station: list[StationRecord]
    tiers: list[StationCounts] | None = None
    """Stations of every level, outermost first, in a tree with more than one level of them."""
    train_seconds: Count | None = None
    merge_seconds: Number | None = None
    loss: Number | None = None
    metrics: dict[str, Number] | None = None
    """Means of the numbers that methods and training functions report besides the loss."""
    privacy: Privacy | None = None
    kept: str | None = None
    """Why the model was not replaced."""
    merge: Merge | None = None
    moved: Whole | None = None
    refined: Refined | None = None
    second_look: SecondLook | None = None
    source: Source | None = None
    taken_back: str | None = None
    """Why the round was undone."""
    unseen: Unseen | None = None
    seconds: Count = 0.0

    @property
    def source_accuracy(self) -> float | None:
        """The accuracy on source validation, if the round was evaluated."""
        return self.source.accuracy if self.source else None

    @property
    def unseen_accuracy(self) -> float | None:
        """The accuracy on the unseen domain, if the round was evaluated."""
        return self.unseen.accuracy if self.unseen else None

    @property
    def measure(self) -> str:
        """The name of the mean score: accuracy, or that of another learning task."""
        return next((s.measure for s in (self.unseen, self.source) if s), ACCURACY)

    @property
    def numbers(self) -> dict[str, float]:
        """Plugged-in numbers: own numbers of training, and metrics of source and unseen domain."""
        found = dict(self.metrics or {})
        for where, scores in (("source", self.source), ("unseen", self.unseen)):
            metrics = scores.metrics if scores else {}
            found |= {f"{where} {name}": value for name, value in metrics.items()}
        return found

    def but(self, **changes: Any) -> RoundRecord:
        """Return this record with some fields changed."""
        return self.model_copy(update=changes)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data under the keys of a line."""
        found = self.model_dump(by_alias=True, exclude_unset=True)
        return {key: value for key, value in found.items() if value is not None}

    def to_line(self) -> str:
        """Return the line, without its newline."""
        return json.dumps(self.to_dict())

    @classmethod
    def from_line(cls, text: str) -> RoundRecord:
        """Read a line; raises `BadLine` for anything else."""
        try:
            value = _printable(json.loads(text))
            record = cls.model_validate(value)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            raise BadLine(printable(f"{where}: {first['msg']}")) from None
        except Exception as error:  # a line may hold anything
            raise BadLine(f"each line must be JSON ({printable(error)})") from None
        for key in cls.model_fields:
            if value.get(key, 0) is None:
                raise BadLine(f"{key} is null; leave unknown fields out")
        return record


def optional_fields(metrics: dict[str, float] | None, measure: str) -> dict[str, Any]:
    """Return the fields that a line has only if a run measures more than accuracy, or another."""
    found: dict[str, Any] = {} if metrics is None else {"metrics": metrics}
    return found if measure == ACCURACY else {**found, "measure": measure}


def _printable(value: Any) -> Any:
    if isinstance(value, dict):
        return {printable(key): _printable(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_printable(part) for part in value]
    return printable(value, MOST_TEXT) if isinstance(value, str) else value
