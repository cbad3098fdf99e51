"""A run: check everything first, then rounds, each ending in one line and one checkpoint."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from flwr.serverapp import Grid
from torch import nn

from client_app.methods.base import Method
from client_app.work import load_train_fn
from hfedatm.assembly import (
    build_method,
    build_model,
    build_robust,
    build_rule,
    example_grams,
    load_data,
    pick_device,
    target_domain,
    try_model,
)
from hfedatm.records import state_to_record
from hfedatm.results import RunFolder, load_weights
from hfedatm.settings import Settings, resolve
from hfedatm.tracking import check_trackers
from hfedatm.trust.checking import check as check_policy
from hfedatm.trust.policy import Policy
from hfedatm_core import ChannelGraph
from hfedatm_core.data import DataSpec
from server_app.keeping import RoundKeeper
from server_app.narration import header
from server_app.privacy import check_privacy
from server_app.strategy import HFedATMStrategy

log = logging.getLogger("hfedatm")


@contextmanager
def open_run(given: Mapping[str, Any]) -> Iterator[RunFolder]:
    """Open the folder of a new run, or of the one to resume; bad settings are refused here.

    A new run that an error ends before its first round is finished leaves no folder behind.
    """
    _narrate()
    if given.get("resume"):
        folder = RunFolder.reopen(str(given["resume"]), given)
        check_policy(Policy.current(), folder.settings)
        yield folder
        return
    settings = resolve(given)
    check_policy(Policy.current(), settings)
    check(settings)
    folder = RunFolder.create(settings)
    try:
        yield folder
    except Exception:
        folder.discard_unless_begun()
        raise


def check(settings: Settings) -> None:
    """Build everything once, so that whatever is wrong is said before round 1."""
    pick_device(settings)
    data = load_data(settings)
    target_domain(settings, data)
    method = build_method(settings)
    model = build_model(settings, data.spec, method)
    try_model(settings, model, data.spec)
    check_privacy(settings, build_rule(settings), method, model, data.spec)
    for tier in ("clients", "stations"):
        build_robust(settings, tier)
    check_trackers(settings)
    if settings.train_fn:
        load_train_fn(settings)


def run_rounds(folder: RunFolder, stations: Grid) -> dict[str, Any]:
    """Run all rounds that are still to do over a Grid of stations; return the summary."""
    settings = folder.settings
    data = load_data(settings)
    method = build_method(settings)
    model = build_model(settings, data.spec, method)
    done, state, remembered = folder.restore()
    if done:
        load_weights(model, state, folder.path / "last.safetensors")
    strategy = make_strategy(folder, data.spec, method, model, done)
    strategy.restore(remembered)
    scores = [record["source"] for record in folder.rounds() if "source" in record]
    strategy.resume(model.state_dict(), scores[-1] if scores else None)
    keeper = RoundKeeper(folder, strategy, model, data)
    target = target_domain(settings, data)
    log.info(header(settings, target, data, folder.path, done, bool(strategy.layers)))
    logging.getLogger("flwr").setLevel(logging.WARNING)  # one line per round, not Flower's dozen
    strategy.start(
        stations,
        state_to_record(model.state_dict()),
        num_rounds=settings.rounds - done,
        timeout=settings.station_timeout,
        evaluate_fn=keeper,
    )
    return keeper.finish()


def make_strategy(
    folder: RunFolder, spec: DataSpec, method: Method, model: nn.Module, done: int
) -> HFedATMStrategy:
    """Return the strategy of a run of which ``done`` rounds are finished."""
    settings, rule = folder.settings, build_rule(folder.settings)
    grams = example_grams(settings, model, spec) if rule.needs_grams else {}
    strategy = HFedATMStrategy(
        settings,
        rule,
        method,
        ChannelGraph.trace(model, _example(spec)),
        layers={name: gram.dim for name, gram in grams.items()},
        template=_shared_template(model, method, spec),
        done=done,
        run=folder.id,
    )
    spent = [r["privacy"]["epsilon"] for r in folder.rounds() if "privacy" in r]
    strategy.epsilon = max(spent, default=0.0)
    if settings.station_start == "own":
        strategy.start_of = lambda station: state_to_record(
            build_model(settings, spec, method, station).state_dict()
        )
    return strategy


def _example(spec: DataSpec) -> tuple[Any, ...]:
    inputs = spec.example()
    return tuple(inputs.values()) if isinstance(inputs, dict) else (inputs,)


def _shared_template(model: nn.Module, method: Any, spec: DataSpec) -> dict[str, torch.Tensor]:
    if method.sharing == "none":
        return {}
    shared = method.share(model, [(spec.example(), torch.zeros(2, dtype=torch.long))])
    return {name: torch.zeros_like(value) for name, value in shared.items()}


def _narrate() -> None:
    """Send the run's lines to standard output, bare: that is what `flwr run --stream` shows."""
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(logging.Formatter("%(message)s"))
    log.handlers[:] = [handler]
    log.setLevel(logging.INFO)
    log.propagate = False
