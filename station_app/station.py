"""A station's job: content from the level above in, content for the level above out.

``run_station`` needs only a Grid that shows exactly this station's children, so the same code runs
in a simulation, in one process and on a station's own machine. The children are clients, or in a
tree of more levels stations (`station_app.inner`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid

from hfedatm.base import index_maps
from hfedatm.base.building import build_method, build_rule
from hfedatm.base.class_profiles import ProfileShapes, profiles_to_record
from hfedatm.base.exchange import OWN, AskedLayers, to_records
from hfedatm.base.index_maps import read_maps
from hfedatm.base.kept_model import KeptModel
from hfedatm.base.memory import NodeMemory
from hfedatm.base.privacy_settings import is_private
from hfedatm.base.records import (
    Task,
    find_record,
    grams_to_record,
    need_record,
    record_to_layers,
    record_to_state,
    state_to_record,
)
from hfedatm.base.tiers import is_inner
from hfedatm.base.wire import Expected
from hfedatm_core.tensors import State
from station_app.counting import count
from station_app.inner import run_inner
from station_app.result import StationResult
from station_app.secure import gather_securely
from station_app.strategy import StationStrategy


def run_station(grid: Grid, content: RecordDict) -> RecordDict:
    """Do the task of the level above with this station's children."""
    task = Task.from_record(content["task"])
    started = time.perf_counter()
    if task.kind == "count":
        result = count(grid, content, task)
    elif is_inner(task.settings, task.level):
        result = run_inner(grid, content, task)
    else:
        result = _JOBS[task.kind](grid, content, task)
    return result.to_content(seconds=time.perf_counter() - started)


def _train(grid: Grid, content: RecordDict, task: Task) -> StationResult:
    arrays = need_record(content, "model", ArrayRecord)
    maps = read_maps(content, model := record_to_state(arrays), task.round)

    def moved(saved: int, kept: State) -> State:
        return maps.moved(saved, kept, model, {})

    shared = find_record(content, "shared", ArrayRecord)
    if build_method(task.settings).sharing == "station":
        shared = _share_in_station(grid, content, task, moved)
    layers = record_to_layers(need_record(content, "layers", ConfigRecord))
    strategy = StationStrategy(task, layers, shared, build_rule(task.settings))
    strategy.maps = find_record(content, index_maps.RECORD, ArrayRecord)
    if shapes := find_record(content, "profiles", ConfigRecord):
        strategy.profile_shapes = ProfileShapes.from_record(shapes)
    memory = NodeMemory(task.run, f"station-{task.station}-rule")
    strategy.station_rule.begin(
        task,
        model,
        record_to_state(find_record(content, "rule", ArrayRecord) or ArrayRecord()),
        memory.load(_moment(task), moved),
    )
    standing = NodeMemory(task.run, f"station-{task.station}-standing")
    earlier = standing.load(before=_moment(task))
    strategy.standing = {name: float(value) for name, value in earlier.items()}
    first = task.station_round + 1
    for station_round in range(first, first + task.settings.station_rounds):
        messages = strategy.configure_train(station_round, arrays, ConfigRecord(), grid)
        send = partial(_ask, grid, expected=strategy.expected_update(station_round))
        replies = strategy.gather(station_round, messages, send)
        arrays, means = strategy.aggregate_train(station_round, replies)
    if layers and task.settings.gram_model == "station":
        messages = strategy.configure_measure(arrays, grid)
        strategy.aggregate_measure(_ask(grid, messages, strategy.expected_grams()))
    if kept := strategy.station_rule.remember():
        memory.save(_moment(task), kept)
    if build_rule(task.settings).refines(task.settings, task.round):
        KeptModel(task, f"station-{task.station}").keep_own(record_to_state(arrays))
    if strategy.standing:
        values = {name: torch.tensor(value) for name, value in strategy.standing.items()}
        standing.save(_moment(task), values)
    return _trained(strategy, arrays, means)


def _moment(task: Task) -> tuple[int, int]:
    """Return the step of a job: an inner station may ask several times in a global round."""
    return task.round, task.station_round


def _trained(
    strategy: StationStrategy, model: ArrayRecord, means: Mapping[str, Any]
) -> StationResult:
    """Return the model and Grams of the last station round, with the numbers of all of them."""
    settings, arrays = strategy.settings, {"model": model}
    if strategy.layers:
        arrays["grams"] = grams_to_record(strategy.grams, settings.gram_dtype)
    if strategy.profiles is not None:
        arrays["profiles"] = profiles_to_record(strategy.profiles)
    metrics = {
        **means,
        "num-examples": strategy.num_examples,
        "num-clients": strategy.num_clients,
        "bytes-up": strategy.bytes_up,
        "gram-bytes-up": strategy.gram_bytes_up,
        "gram-seconds": strategy.gram_seconds,
        **strategy.station_rule.metrics(),
    }
    if is_private(settings):
        metrics["epsilon"] = strategy.epsilon
    return StationResult(metrics, arrays, strategy.failures, strategy.cuts)


def _ask(grid: Grid, messages: Sequence[Message], expected: Expected) -> Iterable[Message]:
    """Return the clients' replies one by one or, with secure aggregation, only their mean."""
    if expected.secure:
        return gather_securely(grid, messages, expected)
    return grid.send_and_receive(messages, timeout=expected.settings.client_timeout)


def _prepare(grid: Grid, content: RecordDict, task: Task) -> StationResult:
    strategy = StationStrategy(task)
    messages = strategy.configure_prepare(need_record(content, "model", ArrayRecord), grid)
    template = record_to_state(need_record(content, "shared", ArrayRecord))
    replies = _ask(grid, messages, strategy.expected_shared(template))
    mean = strategy.aggregate_prepare(replies, template)
    metrics = {"num-examples": strategy.num_examples, "bytes-up": strategy.bytes_up}
    return StationResult(metrics, {"shared": state_to_record(mean)}, strategy.failures)


def _share_in_station(
    grid: Grid, content: RecordDict, task: Task, moved: Callable[[int, State], State]
) -> ArrayRecord:
    """Average the method's shared arrays over this station alone; keep them for the next round."""
    memory = NodeMemory(task.run, f"station-{task.station}")
    mean = record_to_state(_prepare(grid, content, task).arrays["shared"])
    blended = build_method(task.settings).blend(memory.load(_moment(task), moved), mean)
    memory.save(_moment(task), blended)
    return state_to_record(blended)


def _refine(grid: Grid, content: RecordDict, task: Task) -> StationResult:
    strategy, kept = StationStrategy(task), KeptModel(task, f"station-{task.station}")
    model = kept.sending(content)
    merged = record_to_state(model.whole)
    asked = AskedLayers.of(content, merged)
    if "model" in content:  # the first exchange, in which clients get this station's model, too
        maps = read_maps(content, merged, task.round + 1)
        own = maps.moved(task.round, kept.own(), merged, {})
        model.along[OWN] = state_to_record(own)
    messages = strategy.configure_refine(model, asked, grid)
    replies = grid.send_and_receive(messages, timeout=task.settings.client_timeout)
    mean = strategy.aggregate_refine(replies, asked)
    kept.keep(merged, strategy.looked)
    metrics = {"num-examples": strategy.num_examples, "bytes-up": strategy.bytes_up}
    arrays = to_records(mean, strategy.grams, task.settings.gram_dtype)
    return StationResult(metrics, arrays, strategy.failures, strategy.cuts)


def _look(grid: Grid, content: RecordDict, task: Task) -> StationResult:
    strategy, kept = StationStrategy(task), KeptModel(task, f"station-{task.station}")
    model = kept.sending(content)
    messages = strategy.configure_look(model, grid)
    template = record_to_state(need_record(content, "statistics", ArrayRecord))
    replies = grid.send_and_receive(messages, timeout=task.settings.client_timeout)
    mean = strategy.aggregate_look(replies, template)
    kept.keep(record_to_state(model.whole), strategy.looked)
    metrics = {"num-examples": strategy.num_examples, "bytes-up": strategy.bytes_up}
    arrays = {"statistics": state_to_record(mean)}
    return StationResult(metrics, arrays, strategy.failures, strategy.cuts)


def _evaluate(grid: Grid, content: RecordDict, task: Task) -> StationResult:
    strategy = StationStrategy(task)
    strategy.sums = record_to_state(find_record(content, "sums", ArrayRecord) or ArrayRecord())
    strategy.sending = KeptModel(task, f"station-{task.station}").sending(content)
    arrays = strategy.sending.whole
    messages = strategy.configure_evaluate(task.round, arrays, ConfigRecord(), grid)
    replies = grid.send_and_receive(messages, timeout=task.settings.client_timeout)
    metrics = strategy.aggregate_evaluate(task.round, replies)
    sums = {"sums": state_to_record(strategy.sums)} if strategy.sums else {}
    return StationResult(metrics, sums, strategy.failures)


_JOBS: dict[str, Callable[[Grid, RecordDict, Task], StationResult]] = {
    "prepare": _prepare,
    "train": _train,
    "refine": _refine,
    "look": _look,
    "evaluate": _evaluate,
}
