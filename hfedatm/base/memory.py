"""The tensors that a node keeps to itself from one round to the next.

A node may be a new process for every message, may be killed, and may be asked again for a round it
has already done. So a node writes one file per step and reads the newest file from *before* the
current round: a repeated round starts from the same memory as the first time.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from hfedatm.base.environment import state_root
from hfedatm.base.errors import UserError
from hfedatm_files import PRIVATE, replacing

NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,199}")
"""Pattern of a run's or node's name in a path: one part, so it never leads out of the folder."""

Moment = tuple[int, int]
"""A step of a run: global round, station round."""
_MOMENT = re.compile(r"(\d{1,9})-(\d{1,9})\.safetensors")


class NodeMemory:
    """Tensors of one node in one run, by step.

    Parameters
    ----------
    run
        Name of the run.
    node
        Name of the node, for example ``client-3``.
    root
        Folder of all memories; default ``$HFEDATM_STATE`` or the user's cache folder.
    kept
        Number of rounds whose tensors stay: the current round, the one before it, and one more for
        a server that was set back.
    """

    MAX_AGE = 30 * 24 * 3600.0
    KEPT = 3

    def __init__(
        self, run: str, node: str, root: str | Path | None = None, kept: int = KEPT
    ) -> None:
        for what, name in (("run", run), ("node", node)):
            if not isinstance(name, str) or not NAME.fullmatch(name):  # both come with a message
                raise UserError(f"{what}: {str(name)[:60]!r} is not a valid name")
        self.root = state_root(root)
        self.folder = self.root / run / node
        self._kept = kept

    def load(
        self,
        before: Moment,
        moved: Callable[[int, dict[str, torch.Tensor]], dict[str, torch.Tensor]] | None = None,
    ) -> dict[str, torch.Tensor]:
        """Return the tensors that were saved last before this step; empty at first.

        ``moved`` gets the round in which they were saved, and returns them in today's channel
        order.
        """
        earlier = [moment for moment in self._moments() if moment < before]
        if not earlier:
            return {}
        kept = self.at(newest := max(earlier))
        return moved(newest[0], kept) if moved else kept

    def at(self, moment: Moment) -> dict[str, torch.Tensor]:
        """Return the tensors that were saved in this very step; empty if none were."""
        path = self._path(moment)
        if not path.is_file():
            return {}
        try:
            return load_file(path)
        except (OSError, ValueError, SafetensorError) as error:
            raise UserError(
                f"this node's memory cannot be read: {path.name}: {error}; delete it to continue"
            ) from None

    def save(self, at: Moment, tensors: Mapping[str, torch.Tensor]) -> None:
        """Keep tensors; the file appears whole or not at all."""
        if not self.folder.is_dir():  # tidy up when a node saves for the first time in a run
            self.folder.mkdir(parents=True, exist_ok=True)
            self._forget_old_runs()
        path = self._path(at)
        with replacing(path, mode=PRIVATE) as part:
            save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, part)
        rounds = sorted({moment[0] for moment in self._moments()})[: -self._kept]
        for moment in self._moments():
            if moment[0] in rounds:
                self._path(moment).unlink(missing_ok=True)

    def _forget_old_runs(self) -> None:
        """Remove tensors of runs untouched for a month; ledgers are small and stay."""
        limit = time.time() - self.MAX_AGE
        for path in self.folder.parent.parent.glob("*/*/*.safetensors"):
            if path.stat().st_mtime < limit:
                path.unlink(missing_ok=True)

    def _moments(self) -> list[Moment]:
        found = [_MOMENT.fullmatch(path.name) for path in self.folder.glob("*-*.safetensors")]
        return [(int(name[1]), int(name[2])) for name in found if name]

    def _path(self, moment: Moment) -> Path:
        return self.folder / f"{moment[0]}-{moment[1]}.safetensors"
