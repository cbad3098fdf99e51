"""Settings without which an option for stations that did not share a start would do nothing."""

from __future__ import annotations

from hfedatm.base.errors import UserError
from hfedatm.base.privacy_settings import why_not_exact
from hfedatm.base.settings import Settings
from hfedatm.base.tiers import is_deep


def check_apart(settings: Settings, merges: bool, option: str, sends: str) -> None:
    """Raise `UserError` if an option has no merge of such stations, or would leave unprotected.

    Parameters
    ----------
    settings
        The run's settings.
    merges
        Whether the rule merges such stations by the Grams of all layers.
    option
        The option, as the user writes it.
    sends
        What clients send because of it.
    """
    if why := why_not_exact(settings):
        raise UserError(f"rule-params: {option} sends {sends}, but {why}")
    if is_deep(settings):
        raise UserError(f"rule-params: {option} needs stations right below the server")
    apart = settings.gram_layers == "auto" and settings.station_start == "own"
    if not (merges and (apart or settings.gram_layers == "all")):
        raise UserError(
            f"rule-params: {option} only helps to merge stations that did not share a start: also "
            "set station-start=own or gram-layers=all, with server-rule=hfedatm"
        )
