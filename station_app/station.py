"""A station's job: content from the server in, content for the server out.

``run_station`` needs only a Grid that shows exactly this station's clients, so it is the same in a
simulation, in one process and on a station's own machine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid

from hfedatm.base.building import build_method, build_rule
from hfedatm.base.memory import NodeMemory
from hfedatm.base.privacy_settings import is_private
from hfedatm.base.records import (
    Task,
    failures_to_record,
    find_record,
    grams_to_record,
    record_to_layers,
    record_to_state,
    state_to_record,
)
from hfedatm.base.wire import Expected
from station_app.secure import gather_securely
from station_app.strategy import StationStrategy


def run_station(grid: Grid, content: RecordDict) -> RecordDict:
    """Do what the server's task asks for, with this station's clients."""
    task = Task.from_record(content["task"])
    started = time.perf_counter()
    reply = _JOBS[task.kind](grid, content, task)
    reply["metrics"]["seconds"] = time.perf_counter() - started
    return reply


def _train(grid: Grid, content: RecordDict, task: Task) -> RecordDict:
    shared = find_record(content, "shared", ArrayRecord)
    if build_method(task.settings).sharing == "station":
        shared = _share_in_station(grid, content, task)
    layers = record_to_layers(content["layers"])
    strategy = StationStrategy(task, layers, shared, build_rule(task.settings))
    arrays = content["model"]
    memory = NodeMemory(task.run, f"station-{task.station}-rule")
    strategy.station_rule.begin(
        task,
        record_to_state(arrays),
        record_to_state(find_record(content, "rule", ArrayRecord) or ArrayRecord()),
        memory.load(before=(task.round, 0)),
    )
    standing = NodeMemory(task.run, f"station-{task.station}-standing")
    earlier = standing.load(before=(task.round, 0))
    strategy.standing = {name: float(value) for name, value in earlier.items()}
    for station_round in range(1, task.settings.station_rounds + 1):
        messages = strategy.configure_train(station_round, arrays, ConfigRecord(), grid)
        replies = _ask(grid, messages, strategy.expected_update(station_round))
        arrays, metrics = strategy.aggregate_train(station_round, replies)
    if layers and task.settings.gram_model == "station":
        messages = strategy.configure_measure(arrays, grid)
        replies = _ask(grid, messages, strategy.expected_grams())
        strategy.aggregate_measure(replies)
    metrics.update(
        {
            "num-examples": strategy.num_examples,
            "num-clients": strategy.num_clients,
            "bytes-up": strategy.bytes_up,
            "gram-bytes-up": strategy.gram_bytes_up,
            "gram-seconds": strategy.gram_seconds,
            **strategy.station_rule.metrics(),
        }
    )
    if is_private(task.settings):
        metrics["epsilon"] = strategy.epsilon
    if kept := strategy.station_rule.remember():
        memory.save((task.round, 0), kept)
    if strategy.standing:
        values = {name: torch.tensor(value) for name, value in strategy.standing.items()}
        standing.save((task.round, 0), values)
    reply = RecordDict(
        {
            "model": arrays,
            "metrics": metrics,
            "failures": failures_to_record(strategy.failures),
            "cuts": failures_to_record(strategy.cuts),
        }
    )
    if layers:
        reply["grams"] = grams_to_record(strategy.grams, task.settings.gram_dtype)
    return reply


def _ask(grid: Grid, messages: list[Message], expected: Expected) -> Iterable[Message]:
    """Return the clients' replies: each, or with secure aggregation their mean alone."""
    if expected.secure:
        return gather_securely(grid, messages, expected)
    return grid.send_and_receive(messages, timeout=expected.settings.client_timeout)


def _prepare(grid: Grid, content: RecordDict, task: Task) -> RecordDict:
    strategy = StationStrategy(task)
    messages = strategy.configure_prepare(content["model"], grid)
    template = record_to_state(content["shared"])
    replies = _ask(grid, messages, strategy.expected_shared(template))
    mean = strategy.aggregate_prepare(replies, template)
    return RecordDict(
        {
            "shared": state_to_record(mean),
            "metrics": MetricRecord(
                {"num-examples": strategy.num_examples, "bytes-up": strategy.bytes_up}
            ),
            "failures": failures_to_record(strategy.failures),
        }
    )


def _share_in_station(grid: Grid, content: RecordDict, task: Task) -> ArrayRecord:
    """Average what the method shares over this station alone, and keep it for the next round."""
    memory = NodeMemory(task.run, f"station-{task.station}")
    mean = record_to_state(_prepare(grid, content, task)["shared"])
    blended = build_method(task.settings).blend(memory.load(before=(task.round, 0)), mean)
    memory.save((task.round, 0), blended)
    return state_to_record(blended)


def _evaluate(grid: Grid, content: RecordDict, task: Task) -> RecordDict:
    strategy = StationStrategy(task)
    arrays = content["model"]
    messages = strategy.configure_evaluate(task.round, arrays, ConfigRecord(), grid)
    replies = grid.send_and_receive(messages, timeout=task.settings.client_timeout)
    metrics = strategy.aggregate_evaluate(task.round, replies)
    return RecordDict({"metrics": metrics, "failures": failures_to_record(strategy.failures)})


_JOBS: dict[str, Callable[[Grid, RecordDict, Task], RecordDict]] = {
    "prepare": _prepare,
    "train": _train,
    "evaluate": _evaluate,
}
