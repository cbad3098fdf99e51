"""A federation small enough to run in a second, and ways to inspect it or to spoil its replies."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from flwr.app import Context, Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity
from safetensors.torch import load_file
from torch import Tensor, nn

import hfedatm.runtime.local as local
from client_app.app import app as client_app
from hfedatm.base.records import Task, state_to_record
from hfedatm.base.resolving import resolve
from hfedatm.base.results import RunFolder, read_rounds
from hfedatm.base.round_record import RoundRecord
from hfedatm.base.settings import Settings
from hfedatm_core.data import DataSpec, Domain, DomainData

# Flower's runtimes give a process an identity before it may make a message.
TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1

SPEC = DataSpec("image", 3, (1, 8, 8))

SMALL: dict[str, Any] = {
    "dataset": "helpers:tiny_data",
    "model": "helpers:tiny_net",
    "target-domain": "c",
    "stations": 2,
    "clients-per-station": 2,
    "rounds": 2,
    "station-rounds": 2,
    "local-epochs": 1,
    "batch-size": 32,
    "device": "cpu",
    "gram-dtype": "float32",  # tests compare exactly, so nothing is rounded to 16 bits
}


UNEVEN = {"dataset": "helpers:uneven_data", "gram_min_rows": 1}


def tiny_data(data_dir: str | None = None, examples: int = 200) -> DomainData:
    """Three domains of three classes: a bright square whose place is the class, plus noise."""
    domains = {}
    for number, name in enumerate("abc"):
        generator = torch.Generator().manual_seed(number)
        targets = torch.arange(examples) % SPEC.num_classes
        inputs = 0.5 * torch.randn((examples, *SPEC.input_shape), generator=generator)
        for index, target in enumerate(targets.tolist()):
            inputs[index, 0, 2 * target : 2 * target + 3, number : number + 4] += 1.0
        domains[name] = Domain(name, inputs, targets)
    return DomainData(SPEC, domains)


def uneven_data(data_dir: str | None = None) -> DomainData:
    """The same, but the domains have different numbers of examples, and so have clients."""
    sizes = {"a": 150, "b": 20, "c": 40}
    whole = tiny_data().domains
    parts = {n: Domain(n, whole[n].inputs[:k], whole[n].targets[:k]) for n, k in sizes.items()}
    return DomainData(SPEC, parts)


def tiny_net(spec: DataSpec, width: int = 16) -> nn.Module:
    """One convolution, two Linear layers."""
    return nn.Sequential(
        nn.Conv2d(spec.input_shape[0], 4, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(36, width),
        nn.ReLU(),
        nn.Linear(width, spec.num_classes),
    )


def small_settings(**given: Any) -> Settings:
    """Settings of the small federation; keys may be written with underscores."""
    return resolve(SMALL | {key.replace("_", "-"): value for key, value in given.items()})


def run_small(folder: Path, name: str = "run", **given: Any) -> Path:
    """Run the small federation in this process and return its results folder."""
    values = SMALL | {key.replace("_", "-"): value for key, value in given.items()}
    local.run_locally(values | {"output": str(folder), "run-name": name})
    return folder / name


def last_model(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "last.safetensors")


def assert_resumes(folder: Path, monkeypatch: Any, **given: Any) -> Path:
    """Assert that a run of three rounds, stopped after the second, ends as if it had not been.

    Return the folder of the run that was not stopped.
    """
    whole = run_small(folder, "whole", **given, rounds=3)
    save = RunFolder.save_round

    def save_and_stop(self: RunFolder, record: RoundRecord, *rest: Any) -> None:
        save(self, record, *rest)
        if record.round == 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "save_round", save_and_stop)
        try:
            run_small(folder, "stopped", **given, rounds=3)
        except KeyboardInterrupt:
            pass
        else:
            raise AssertionError("the run was not stopped")
    local.run_locally({"resume": str(folder / "stopped")})
    assert_same_model(whole, folder / "stopped")
    return whole


def assert_same_model(one: Path, other: Path) -> None:
    """Assert that the last models of two runs are equal to the last bit."""
    left, right = last_model(one), last_model(other)
    assert left.keys() == right.keys()
    different = [name for name in left if not torch.equal(left[name], right[name])]
    assert not different, f"these tensors differ: {different}"


def a_record(**parts: Any) -> RoundRecord:
    """Return the record of an otherwise empty round with the given ``parts``."""
    nothing = {
        "round": 1,
        "failures": [],
        "bytes_up": {"clients": 0, "stations": 0},
        "stations": {"asked": 1, "answered": 0},
        "clients": {"answered": 0},
        "per_station": [],
    }
    return RoundRecord.model_validate(nothing | parts)


def lines_of(folder: Path) -> list[dict[str, Any]]:
    """Return the finished rounds as plain data, with the keys of ``rounds.jsonl``."""
    return [record.to_dict() for record in read_rounds(folder)]


def failures_of(folder: Path) -> list[dict[str, str]]:
    return [failure for line in lines_of(folder) for failure in line["failures"]]


def tiny_batches(count: int = 2, size: int = 8, seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        (
            torch.randn((size, *SPEC.input_shape), generator=generator),
            torch.randint(SPEC.num_classes, (size,), generator=generator),
        )
        for _ in range(count)
    ]


def ask_client(
    settings: Settings,
    client: int,
    model: dict[str, Tensor] | None,
    message_type: str = "train",
    shared: dict[str, Tensor] | None = None,
    changes: dict[str, Tensor] | None = None,
    records: dict[str, Any] | None = None,
    **task: Any,
) -> RecordDict:
    """Send one message to the ClientApp and return the content of its reply."""
    kind = message_type.removeprefix("train.")
    fields = {"round": 1, "station_round": 1, "client": client} | task
    content = RecordDict(
        {
            **({"model": state_to_record(model)} if model is not None else {}),
            **({"changes": state_to_record(changes)} if changes is not None else {}),
            "task": Task(kind, settings, **fields).to_record(),  # type: ignore[arg-type]
        }
    )
    if shared:
        content["shared"] = state_to_record(shared)
    content.update(records or {})
    context = Context(run_id=0, node_id=1, node_config={}, state=RecordDict(), run_config={})
    return client_app(Message(content, 1, message_type), context).content


Spoil = Callable[[Message, Message], Message]


class Saboteur:
    """A ClientApp whose chosen clients answer with ``spoil(message, honest reply)``."""

    def __init__(self, spoil: Spoil, clients: set[int], message_type: str = "train") -> None:
        self.spoil, self.clients, self.message_type = spoil, clients, message_type
        self.calls: list[tuple[str, int]] = []

    def __call__(self, message: Message, context: Context) -> Message:
        client = message.metadata.dst_node_id
        self.calls.append((message.metadata.message_type, client))
        reply = client_app(message, context)
        if client in self.clients and message.metadata.message_type == self.message_type:
            return self.spoil(message, reply)
        return reply


@contextmanager
def log_lines() -> Iterator[list[str]]:
    """Collect the lines that a run prints."""
    lines: list[str] = []

    def listen(record: logging.LogRecord) -> bool:
        lines.append(record.getMessage())
        return True

    log = logging.getLogger("hfedatm")
    log.addFilter(listen)  # not a handler: a run sets its own
    try:
        yield lines
    finally:
        log.removeFilter(listen)
