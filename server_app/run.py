"""The rounds of a run, each ending in one line and one checkpoint."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from flwr.app import ArrayRecord
from flwr.serverapp import Grid
from torch import nn

from hfedatm.base.building import (
    build_method,
    build_metrics,
    build_model,
    build_rule,
    example_grams,
    frozen_part,
    load_data,
    measures_all,
    target_domain,
    trace_channels,
)
from hfedatm.base.class_profiles import ProfileShapes
from hfedatm.base.records import state_to_record
from hfedatm.base.results import RunFolder
from hfedatm.base.seeding import torch_turn
from hfedatm.base.settings import Settings
from hfedatm.base.station_fits import station_fits
from hfedatm.base.station_models import settings_of
from hfedatm.base.tensor_files import load_weights
from hfedatm.contracts import Method
from hfedatm_core import collect_profiles
from hfedatm_core.data import DataSpec
from server_app.after_round import AfterRound
from server_app.narration import header
from server_app.refining import exchanges
from server_app.second_look import norms_to_measure
from server_app.shapes import StationShapes
from server_app.strategy import HFedATMStrategy
from server_app.suggesting import suggest

log = logging.getLogger("hfedatm")


def run_rounds(folder: RunFolder, stations: Grid) -> dict[str, Any]:
    """Run all remaining rounds over a Grid of stations; return the summary."""
    settings = folder.settings
    if settings.station_assignment == "suggest":
        return suggest(folder, stations)
    data = load_data(settings)
    method = build_method(settings, data.spec)
    model = build_model(settings, data.spec, method)
    done, state, remembered = folder.restore()
    part = frozen_part(settings, data.spec)
    if done:
        last = folder.path / "last.safetensors"
        load_weights(model, part.without(state, last) if part else state, last)
    strategy = make_strategy(folder, data.spec, method, model, done)
    if not done:
        model.load_state_dict(strategy.shapes.start(model.state_dict()))
    strategy.restore(remembered)
    if scores := [record.source for record in folder.rounds() if record.source]:
        strategy.memory.resume(model.state_dict(), scores[-1], done)
    after_round = AfterRound(folder, strategy, model, data)
    target = target_domain(settings, data)
    log.info(header(settings, target, data, folder.path, done, bool(strategy.layers)))
    if part:
        log.info("  %s", part.describe(model))
    reveals = [*method.reveals, *(["class-profiles"] if strategy.profile_shapes else [])]
    reveals += ["sums-over-layers"] if strategy.exchanges else []
    if reveals:
        log.info("  clients also send: %s", ", ".join(n.replace("-", " ") for n in reveals))
    with _quiet_flower():
        strategy.start(
            strategy.paced(stations),
            state_to_record(model.state_dict()),
            num_rounds=settings.rounds - done,
            timeout=settings.station_timeout,
            evaluate_fn=after_round,
        )
    return after_round.finish()


@contextmanager
def _quiet_flower() -> Iterator[None]:
    """Silence Flower's dozen lines per round, and nothing that the process does afterwards."""
    flower = logging.getLogger("flwr")
    before = flower.level
    flower.setLevel(logging.WARNING)
    try:
        yield
    finally:
        flower.setLevel(before)


def make_strategy(
    folder: RunFolder, spec: DataSpec, method: Method, model: nn.Module, done: int
) -> HFedATMStrategy:
    """Return the strategy of a run that has finished ``done`` rounds."""
    settings, rule = folder.settings, build_rule(folder.settings)
    grams = example_grams(settings, model, spec) if rule.needs_grams else {}
    strategy = HFedATMStrategy(
        settings,
        rule,
        method,
        trace_channels(settings, rule, model, spec),
        layers={name: gram.dim for name, gram in grams.items()},
        template=_shared_template(model, method, spec),
        done=done,
        run=folder.id,
    )
    strategy.shapes = StationShapes(settings, station_fits(settings, spec, method, rule, model))
    strategy.metrics = build_metrics(settings, spec)
    strategy.norms = norms_to_measure(settings, rule, model, spec)
    strategy.exchanges = exchanges(settings, rule, model, strategy.graph, spec)
    if rule.needs_grams and measures_all(settings, 1):
        everything = example_grams(settings, model, spec, round=1)
        strategy.all_layers = {name: gram.dim for name, gram in everything.items()}
    if any(rule.wants_profiles(settings, r) for r in range(1, settings.rounds + 1)):
        examples = [(spec.example(), method.task.example())]
        found = collect_profiles(model, strategy.graph, examples, spec.num_classes)
        strategy.profile_shapes = ProfileShapes.of(found)
    spent = [record.privacy.epsilon for record in folder.rounds() if record.privacy]
    strategy.epsilon = max(spent, default=0.0)
    if settings.station_start == "own":
        strategy.start_of = partial(_own_start, settings, spec, method)
    return strategy


def _own_start(settings: Settings, spec: DataSpec, method: Method, station: int) -> ArrayRecord:
    """Return the model a station starts from; called again while other stations still train."""
    own = settings_of(settings, station)
    with torch_turn:
        return state_to_record(build_model(own, spec, method, station).state_dict())


def _shared_template(model: nn.Module, method: Any, spec: DataSpec) -> dict[str, torch.Tensor]:
    if method.sharing == "none":
        return {}
    shared = method.share(model, [(spec.example(), method.task.example())])
    return {name: torch.zeros_like(value) for name, value in shared.items()}
