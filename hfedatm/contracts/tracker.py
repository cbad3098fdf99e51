"""The contract of a tracker."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import ClassVar

from hfedatm.base.errors import UserError
from hfedatm.base.settings import Settings


class Tracker(ABC):
    """Base of all trackers.

    Parameters
    ----------
    settings
        The run's settings; a tracker may log them as hyper-parameters.
    folder
        The run's folder; its name is the run's name.
    done
        Number of rounds already logged, when a run is resumed.
    """

    package: ClassVar[str] = ""
    """The package that must be installed, by its import name."""
    extra: ClassVar[str] = ""
    """The extra of this project that installs the package."""

    @abstractmethod
    def __init__(self, settings: Settings, folder: Path, done: int = 0) -> None: ...

    @abstractmethod
    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Record the numbers of one round."""

    @abstractmethod
    def finish(self, values: Mapping[str, float]) -> None:
        """Record the outcome and close."""

    @classmethod
    def require(cls) -> None:
        """Raise an error that says what to install if the tracker cannot work here."""
        if cls.package and find_spec(cls.package) is None:
            raise UserError(
                f"track: {cls.extra} is not installed; pip install 'hfedatm[{cls.extra}]'"
            )
