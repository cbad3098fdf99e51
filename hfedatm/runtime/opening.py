"""Open a run: whatever is wrong with its settings, model, data or privacy is said here."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from client_app.client import load_train_fn
from hfedatm.base.building import (
    build_method,
    build_model,
    build_robust,
    build_rule,
    load_data,
    pick_device,
    target_domain,
    try_model,
)
from hfedatm.base.results import RunFolder
from hfedatm.base.settings import Settings, resolve
from hfedatm.base.trust.checking import check as check_policy
from hfedatm.base.trust.policy import Policy
from hfedatm.runtime.privacy_checks import check_privacy
from server_app.tracking import check_trackers

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


def _narrate() -> None:
    """Send the run's lines to standard output, bare: that is what `flwr run --stream` shows."""
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(logging.Formatter("%(message)s"))
    log.handlers[:] = [handler]
    log.setLevel(logging.INFO)
    log.propagate = False
