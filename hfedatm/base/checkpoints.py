"""The checkpoints of a run: of the last round and of the one before it, and of the best round.

A disk that fails, or a file that somebody edits, must not cost a run of weeks. So the checkpoint of
the round before stays, and nothing damaged is overwritten: it is set aside under another name.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from hfedatm.base.errors import UserError
from hfedatm.base.round_record import RoundRecord
from hfedatm.base.tensor_files import read_metadata, read_tensors, save_tensors
from hfedatm.base.text import printable
from hfedatm_files import PRIVATE, keep_as

if TYPE_CHECKING:
    from hfedatm_core.tensors import State

log = logging.getLogger("hfedatm")


class Checkpoints:
    """The checkpoints in one run's folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.last, self.previous, self.best = (
            folder / f"{name}.safetensors" for name in ("last", "previous", "best")
        )

    @property
    def exist(self) -> bool:
        """Whether a round of the run is finished."""
        return self.last.is_file() or self.previous.is_file()

    def save(self, record: RoundRecord, model: State, server: State, is_best: bool) -> None:
        """Save the model and the server's memory of a round; the round before stays."""
        meta = {"round": str(record.round), "record": record.to_line()}
        if server:
            save_tensors(self._server(record.round), server)
        if is_best:
            save_tensors(self.best, model, meta)
        if self.last.is_file():
            keep_as(self.last, self.previous, mode=PRIVATE)
        save_tensors(self.last, model, {**meta, "server": str(bool(server))})

    def forget_before(self, number: int) -> None:
        """Remove the server's memory of rounds before this one."""
        for file in self.folder.glob("server-*.safetensors"):
            if not file.stem.removeprefix("server-").isdigit():
                continue
            if int(file.stem.removeprefix("server-")) < number:
                file.unlink()

    def newest(self) -> tuple[RoundRecord, State, State] | None:
        """Return the last round that can be read, its model and the server's memory then."""
        damaged: list[tuple[Path, str]] = []
        for file in filter(Path.is_file, (self.last, self.previous)):
            try:
                found = self._read(file)
            except UserError as error:
                damaged.append((file, str(error)))
                continue
            for bad, reason in damaged:
                kept = set_aside(bad)
                bad.unlink()
                log.warning(
                    "%s; it is kept as %s, and the run continues after round %s",
                    *(reason, kept.name, found[0].round),
                )
            return found
        if damaged:
            raise UserError("; ".join(reason for _, reason in damaged))
        return None

    def best_record(self) -> Iterator[RoundRecord]:
        """Yield the record of the best round so far, if there is one that can be read."""
        try:
            if self.best.is_file() and (line := read_metadata(self.best).get("record")):
                yield RoundRecord.from_line(line)
        except (UserError, ValueError) as error:
            log.warning("%s is left out of the choice of the best model: %s", self.best, error)

    def _read(self, file: Path) -> tuple[RoundRecord, State, State]:
        model, meta = read_tensors(file)
        try:
            number, record = int(meta["round"]), RoundRecord.from_line(meta["record"])
        except (KeyError, ValueError) as error:
            raise UserError(f"{file} is not the model of a round: {printable(error)}") from None
        server = self._server(number)
        needed = meta.get("server", str(server.is_file())) == "True"
        return record, model, read_tensors(server)[0] if needed else {}

    def _server(self, number: int) -> Path:
        return self.folder / f"server-{number}.safetensors"


def set_aside(file: Path) -> Path:
    """Copy a file to a name beside it that is free, and return the copy."""
    names = (file.with_name(f"{file.name}.damaged{n or ''}") for n in count())
    free = next(name for name in names if not name.exists())
    shutil.copy2(file, free)
    return free
