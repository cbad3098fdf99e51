"""Weights & Biases: project ``WANDB_PROJECT``; ``WANDB_MODE=offline`` logs to this machine only."""

import os
from collections.abc import Mapping
from pathlib import Path

from hfedatm.base.resolving import as_config
from hfedatm.base.settings import Settings
from hfedatm.contracts import Tracker


class WeightsAndBiases(Tracker):
    """Log under the run's name; a resumed run continues its own curves."""

    package, extra = "wandb", "wandb"

    def __init__(self, settings: Settings, folder: Path, done: int = 0) -> None:
        import wandb

        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "hfedatm"),
            name=folder.name,
            id=folder.name,
            dir=folder,
            resume="allow" if done else None,
            config=as_config(settings),
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Add one point per curve."""
        self._run.log(dict(values), step=step)

    def finish(self, values: Mapping[str, float]) -> None:
        """Log the outcome and end the run."""
        self._run.summary.update({f"outcome/{name}": value for name, value in values.items()})
        self._run.finish()
