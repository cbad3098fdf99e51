"""TensorBoard: event files in the run's own folder, ``tensorboard --logdir results``."""

from collections.abc import Mapping
from pathlib import Path

from hfedatm.base.settings import Settings
from hfedatm.contracts import Tracker


class TensorBoard(Tracker):
    """Write to ``<run>/tensorboard``."""

    package, extra = "tensorboard", "tensorboard"

    def __init__(self, settings: Settings, folder: Path, done: int = 0) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # A round that was logged but not finished is repeated: hide its first points.
        self._writer = SummaryWriter(folder / "tensorboard", purge_step=done + 1 if done else None)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Add one point per curve."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def finish(self, values: Mapping[str, float]) -> None:
        """Close the event file; its last round is the outcome."""
        self._writer.close()
