"""Settings without which an option for stations that did not share a start would do nothing."""

from __future__ import annotations

from dataclasses import dataclass

from hfedatm.base.errors import UserError
from hfedatm.base.learning import find_task
from hfedatm.base.privacy_settings import why_not_exact
from hfedatm.base.settings import Settings
from hfedatm.base.tiers import is_deep


@dataclass(frozen=True)
class Apart:
    """Checks an option of a rule; ``option`` is written as the user writes it.

    Parameters
    ----------
    settings
        The run's settings.
    merges
        Whether the rule merges such stations by the Grams of all layers.
    """

    settings: Settings
    merges: bool

    def check(self, option: str, sends: str) -> None:
        """Refuse an option without such a merge, or beside numbers that are hidden.

        ``sends`` says what clients send because of the option.
        """
        s = self.settings
        if why := why_not_exact(s):
            raise UserError(f"rule-params: {option} sends {sends}, but {why}")
        if is_deep(s):
            raise UserError(f"rule-params: {option} needs stations right below the server")
        apart = s.gram_layers == "auto" and s.station_start == "own"
        if not (self.merges and (apart or s.gram_layers == "all")):
            raise UserError(
                f"rule-params: {option} only helps to merge stations that did not share a start: "
                "also set station-start=own or gram-layers=all, with server-rule=hfedatm"
            )

    def check_classes(self, option: str) -> None:
        """Refuse an option that needs classes if the task has none."""
        if not find_task(self.settings.task).has_classes:
            raise UserError(f"rule-params: {option} needs classes; got task={self.settings.task}")

    def check_together(self, option: str, buffer: bool) -> None:
        """Refuse an option that compares models if they may be late or of another shape."""
        if buffer or self.settings.station_models:
            raise UserError(
                f"rule-params: {option} compares the merged model with every station's, which must "
                "be of this round and of its shape: leave out buffer and station-models"
            )
