"""A run's folder: its settings, its rounds, and its models.

``config.json``        settings, versions, start time, and a proof of the user who made it
``rounds.jsonl``       one line per finished round, flushed as it ends
``last.safetensors``   the model after the last finished round (its number is in the metadata)
``previous.safetensors``  the one before it, from which a run continues if the last is damaged
``best.safetensors``   the model of the round with the best source-validation accuracy
``server-N.safetensors``  the rule's memory after round N, for the last two rounds
``summary.json``       the outcome, written at the end
``progress.json``      progress of the current round, while the run goes on
``process.json``       the process that works on the run; why it stopped, if it stopped early
``errors.txt``         whole tracebacks of failures, each once; only if something failed

A round is finished when ``last.safetensors`` has been replaced; that file also carries the round's
line, so a crash between the two files loses nothing.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import re
import secrets
import shutil
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hfedatm.base import presence
from hfedatm.base.checkpoints import Checkpoints, set_aside
from hfedatm.base.errors import UserError
from hfedatm.base.privacy_settings import is_private
from hfedatm.base.resolving import as_config, validate
from hfedatm.base.round_record import BadLine, RoundRecord
from hfedatm.base.settings import Settings
from hfedatm.base.text import printable
from hfedatm.base.trust import authorship
from hfedatm_files import write_text

if TYPE_CHECKING:
    from hfedatm_core.tensors import State

log = logging.getLogger("hfedatm")

FLOWER_RUNS = "flower-runs"
"""Key of ``config.json``: the ids of Flower's runs that have worked on this folder."""

PACKAGES = ("hfedatm", "flwr", "torch", "torchvision", "numpy", "POT", "opacus", "transformers")


class RunFolder:
    """One run's folder."""

    def __init__(self, path: Path, settings: Settings, id: str) -> None:
        self.path, self.settings, self.id = path, settings, id
        self.checkpoints = Checkpoints(path)

    @classmethod
    def create(cls, settings: Settings) -> RunFolder:
        """Make the folder of a new run; refuse a name that is taken."""
        stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
        words = f"{settings.dataset}-{settings.model}-{settings.server_rule}"
        made = re.sub(r"[^A-Za-z0-9]+", "-", words).strip("-")
        name = settings.run_name or f"{stamp}-{made}-{secrets.token_hex(2)}"
        path = (Path(settings.output).expanduser() / name).resolve()
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            raise UserError(
                f"run-name: {path} exists; choose another name, or continue that run with "
                f"resume={path}"
            ) from None
        except OSError as error:
            raise UserError(f"output: cannot make {path}: {error.strerror}") from None
        # Nodes file their memory under the id, so a later run of the same name needs another id.
        id = f"{name.lstrip('_')[:80] or 'run'}-{secrets.token_hex(4)}"
        folder = cls(path, settings.model_copy(update={"run_name": name}), id)
        _write_json(
            path / "config.json",
            {
                "settings": as_config(folder.settings),
                "versions": {
                    "python": platform.python_version(),
                    **{name: version(name) for name in PACKAGES},
                },
                "id": id,
                authorship.FIELD: authorship.sign(as_config(folder.settings)),
                "started": datetime.now(UTC).isoformat(timespec="seconds"),
            },
        )
        return folder

    @classmethod
    def reopen(cls, resume: str, given: Mapping[str, Any]) -> RunFolder:
        """Open the folder of a run to continue it with its own settings."""
        path = Path(resume).expanduser().resolve()
        if not (path / "config.json").is_file():
            raise UserError(f"resume: {path} is not a run's folder (it has no config.json)")
        config = read_json(path / "config.json")
        stored, id = config.get("settings"), config.get("id")
        if not isinstance(stored, dict) or not isinstance(id, str):
            raise UserError(f"resume: {path / 'config.json'} has no 'settings' or no 'id'")
        asked = {k: v for k, v in given.items() if v != "" and k not in ("resume", "output")}
        then, now = as_config(validate(stored)), as_config(validate({**stored, **asked}))
        for key, value in now.items():
            if value != then[key] and key != "rounds":
                raise UserError(
                    f"resume: {key} was {then[key]!r} when the run started and cannot become "
                    f"{value!r}"
                )
        settings = validate({**stored, "rounds": now["rounds"]})
        authorship.require_own(config, settings, asked.values(), "{key}={name}")
        folder = cls(path, settings, id)
        folder._check_rounds(stored.get("rounds"))
        return folder

    def _check_rounds(self, before: Any) -> None:
        """Refuse fewer rounds than are already done, and any other number for a private run."""
        if self.settings.rounds == before:
            return
        if self.settings.rounds < (done := self.finished_rounds()):
            raise UserError(f"rounds: got {self.settings.rounds}; {done} rounds are done already")
        if is_private(self.settings):
            raise UserError(
                f"rounds: got {self.settings.rounds}; this run's noise was chosen for {before} "
                "rounds, and more would spend more than its budget: start a new run"
            )

    def go_on(self) -> None:
        """Continue the run; a new number of rounds is written into its settings."""
        config = read_json(self.path / "config.json")
        if config["settings"].get("rounds") == self.settings.rounds:
            return
        own = authorship.verifies(config)
        config["settings"] = {**config["settings"], "rounds": self.settings.rounds}
        config[authorship.FIELD] = authorship.sign(config["settings"]) if own else ""
        _write_json(self.path / "config.json", config)
        (self.path / "summary.json").unlink(missing_ok=True)  # the run is no longer finished

    def note_flower_run(self, run_id: int) -> None:
        """Note which of Flower's runs works on this folder; a resumed run has several."""
        config = read_json(self.path / "config.json")
        config[FLOWER_RUNS] = [*config.get(FLOWER_RUNS, []), run_id]
        _write_json(self.path / "config.json", config)

    def finished_rounds(self) -> int:
        """Return the number of the last finished round; 0 before the first."""
        return self.restore()[0]

    def discard_unless_begun(self) -> None:
        """Remove the folder if no round of the run is finished."""
        if not self.checkpoints.exist:
            shutil.rmtree(self.path, ignore_errors=True)

    def save_round(self, record: RoundRecord, model: State, server: State) -> None:
        """Finish a round: save the model and the server's memory, then add the round's line."""
        if presence.taken_over(self.path):
            raise UserError(f"{self.path}: another process continues this run, so this one ends")
        self.checkpoints.save(record, model, server, self._is_best(record))
        self._append(record)
        self.checkpoints.forget_before(record.round - 1)

    def restore(self) -> tuple[int, State, State]:
        """Return the last finished round (0: none), its model and the server's memory.

        A damaged checkpoint is set aside under another name, and the run continues after the round
        before it. Lines of ``rounds.jsonl`` that cannot be read are set aside likewise.
        """
        found = self.checkpoints.newest()
        if found is None:
            return 0, {}, {}
        record, model, server = found
        rounds = self.path / "rounds.jsonl"
        readable, bad = _read_lines(rounds)
        if bad:
            kept = set_aside(rounds)
            log.warning("%s cannot be read: %s; the file is kept as %s", rounds, bad, kept.name)
        finished = [r for r in readable if r.round < record.round]
        write_text(rounds, "".join(r.to_line() + "\n" for r in [*finished, record]))
        return record.round, model, server

    def _is_best(self, record: RoundRecord) -> bool:
        """Return whether no round before had a better score on the source domains."""
        earlier = [*self.rounds(), *self.checkpoints.best_record()]
        ranks = [r.source.rank for r in earlier if r.source]
        source = record.source
        return source is not None and all(source.rank > rank for rank in ranks)

    def rounds(self) -> list[RoundRecord]:
        """Return the rounds so far; a half-written last line is left out."""
        return read_rounds(self.path)

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Write the outcome."""
        _write_json(self.path / "summary.json", summary)

    def _append(self, record: RoundRecord) -> None:
        with (self.path / "rounds.jsonl").open("a", encoding="utf-8") as file:
            file.write(record.to_line() + "\n")
            file.flush()
            os.fsync(file.fileno())


def read_rounds(folder: Path) -> list[RoundRecord]:
    """Return the finished rounds of a run's folder; a half-written last line is left out."""
    path = folder / "rounds.jsonl"
    records, bad = _read_lines(path)
    if bad:
        raise UserError(f"{path} cannot be read: {bad}")
    return records


def _read_lines(path: Path) -> tuple[list[RoundRecord], str]:
    """Return the lines that can be read, and what is wrong with the first that cannot."""
    records: list[RoundRecord] = []
    bad = ""
    try:
        # Only \n ends a line: a name may contain other characters that Python counts as line ends.
        lines = path.read_bytes().split(b"\n")[:-1] if path.is_file() else []
        for number, line in enumerate(lines, 1):
            try:
                records.append(RoundRecord.from_line(line.decode()))
            except (BadLine, UnicodeDecodeError) as error:
                bad = bad or f"line {number}: {printable(error)}"
    except (OSError, ValueError, MemoryError) as error:
        bad = printable(error)
    return records, bad


def read_json(path: Path) -> dict[str, Any]:
    """Return the object a JSON file holds."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError, MemoryError) as error:
        raise UserError(f"{path} cannot be read: {printable(error)}") from None
    if not isinstance(value, dict):
        raise UserError(f"{path}: must hold a JSON object")
    return value


def _write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(value, indent=2) + "\n")
