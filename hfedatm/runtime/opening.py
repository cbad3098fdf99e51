"""Open a run: report every error in its settings, model, data or privacy before it starts."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from client_app.train_fn import load_train_fn, takes_context
from hfedatm.base import logs, presence, tracebacks
from hfedatm.base.building import (
    build_method,
    build_model,
    build_robust,
    build_rule,
    load_data,
    pick_device,
    target_domain,
    try_model,
    whole_model,
)
from hfedatm.base.counting import require_askable
from hfedatm.base.errors import explain
from hfedatm.base.resolving import resolve
from hfedatm.base.results import RunFolder
from hfedatm.base.settings import Settings
from hfedatm.base.station_fits import station_fits
from hfedatm.base.station_models import parse_station_models, settings_of
from hfedatm.base.trust.checking import check as check_policy
from hfedatm.base.trust.policy import Policy
from hfedatm.runtime.privacy_checks import check_privacy
from hfedatm.runtime.rehearsal import rehearse
from server_app.tracking import check_trackers

log = logging.getLogger("hfedatm")


@contextmanager
def open_run(given: Mapping[str, Any]) -> Iterator[RunFolder]:
    """Open the folder of a new or resumed run; refuse bad settings.

    A new run that ends before its first round is finished leaves no folder behind, unless the
    folder contains a traceback.
    """
    _narrate()
    policy, resumed = Policy.current(), bool(given.get("resume"))
    if resumed:
        folder = RunFolder.reopen(str(given["resume"]), given)
        check_policy(policy, folder.settings)
        _warn(check(folder.settings))
        folder.restore()  # report an unreadable file before writing anything
        presence.announce(folder.path)  # from here on, a process that was stopped writes nothing
        folder.go_on()
    else:
        settings = resolve(given)
        check_policy(policy, settings)
        for station in parse_station_models(settings.station_models, settings.stations):
            check_policy(policy, settings_of(settings, station))
        _warn(check(settings))
        folder = RunFolder.create(settings)
        presence.announce(folder.path)
    logs.about(folder.id)
    try:
        with tracebacks.kept_in(folder.path):
            try:
                yield folder
            except Exception as error:
                tracebacks.keep("server", tracebacks.whole(error))
                raise
    except (Exception, KeyboardInterrupt) as error:
        _close(folder, error)
        raise
    presence.withdraw(folder.path)


def _close(folder: RunFolder, error: BaseException) -> None:
    """Log what is kept of a run that ends early, and how to continue it."""
    if presence.taken_over(folder.path):
        return  # the folder belongs to the process that continues the run
    if (folder.path / tracebacks.FILE).is_file():
        log.info("The whole traceback: %s", folder.path / tracebacks.FILE)
    else:
        folder.discard_unless_begun()
    if not folder.path.is_dir():
        if isinstance(error, KeyboardInterrupt):
            log.info("Stopped before a round was finished: nothing is kept.")
        return
    by_hand = isinstance(error, KeyboardInterrupt)
    presence.say_stopped(folder.path, "it was interrupted" if by_hand else explain(error))
    if by_hand and (done := folder.finished_rounds()):
        log.info(
            "Stopped after round %d of %d. Continue with: hfedatm run resume=%s",
            done,
            folder.settings.rounds,
            os.path.relpath(folder.path),
        )


def check(settings: Settings) -> list[str]:
    """Build and try everything once, so that errors are reported before round 1.

    Return warnings about errors that some of the clients will have.
    """
    pick_device(settings)
    if settings.station_assignment == "suggest":
        require_askable(settings)
    data = load_data(settings)
    target_domain(settings, data)
    if settings.station_assignment == "suggest":  # nothing is trained
        return []
    warnings = _without_schedule(settings) if settings.train_fn else []
    method, rule = build_method(settings, data.spec), build_rule(settings)
    model = build_model(settings, data.spec, method)
    try_model(settings, model, data.spec)
    if settings.train_only:
        whole_model(settings, data.spec, method)  # refuses a part that does not fit the method
    check_privacy(settings, rule, method, model, data.spec)
    station_fits(settings, data.spec, method, rule, model)
    for tier in ("clients", "stations"):
        build_robust(settings, tier)
    check_trackers(settings)
    return warnings + rehearse(settings, data, rule, method, model)


def _without_schedule(settings: Settings) -> list[str]:
    """Warn if a training function cannot follow the schedule of the learning rate."""
    if takes_context(load_train_fn(settings)) or settings.schedule == "constant":
        return []
    return [
        f"{settings.train_fn} has no parameter 'context', so it trains at settings.lr = "
        f"{settings.lr:g} in every round: context.lr follows schedule={settings.schedule}; set "
        "schedule=constant if this is intended"
    ]


def _warn(warnings: list[str]) -> None:
    for warning in warnings:
        log.warning("warning: %s", warning)


def _narrate() -> None:
    """Send the run's lines to standard output without prefix, which `flwr run --stream` shows."""
    if logs.wanted():
        logs.configure()
        return
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(logging.Formatter("%(message)s"))
    log.handlers[:] = [handler]
    log.setLevel(logging.INFO)
    log.propagate = False
