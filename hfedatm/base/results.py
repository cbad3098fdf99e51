"""A run's folder: what was asked, what happened round by round, and the models.

``config.json``        settings, versions, start time, and a proof that its reader made it
``rounds.jsonl``       one line per finished round, flushed as it ends
``last.safetensors``   the model after the last finished round (its number is in the metadata)
``best.safetensors``   the model of the round with the best source-validation accuracy
``server-N.safetensors``  what the rule must remember after round N; some rules remember nothing
``summary.json``       the outcome, written at the end

A round is finished when ``last.safetensors`` has been replaced; that file also carries the round's
line, so a crash between the two files loses nothing.
"""

from __future__ import annotations

import json
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

from hfedatm.base.errors import UserError
from hfedatm.base.roundlines import BadLine, read_line
from hfedatm.base.settings import Settings, validate
from hfedatm.base.text import printable
from hfedatm.base.trust import authorship
from hfedatm_files import PRIVATE, replacing, write_text

if TYPE_CHECKING:
    from torch import nn

    from hfedatm.base.state import State

PACKAGES = ("hfedatm", "flwr", "torch", "torchvision", "numpy", "POT", "opacus", "transformers")


class RunFolder:
    """One run's folder."""

    def __init__(self, path: Path, settings: Settings, id: str) -> None:
        self.path, self.settings, self.id = path, settings, id

    @classmethod
    def create(cls, settings: Settings) -> RunFolder:
        """Make the folder of a new run; a name that is taken is refused."""
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
        # Nodes file what they remember under the id: a later run of the same name gets its own.
        id = f"{name.lstrip('_')[:80] or 'run'}-{secrets.token_hex(4)}"
        folder = cls(path, settings.model_copy(update={"run_name": name}), id)
        _write_json(
            path / "config.json",
            {
                "settings": folder.settings.as_config(),
                "versions": {
                    "python": platform.python_version(),
                    **{name: version(name) for name in PACKAGES},
                },
                "id": id,
                authorship.FIELD: authorship.sign(folder.settings.as_config()),
                "started": datetime.now(UTC).isoformat(timespec="seconds"),
            },
        )
        return folder

    @classmethod
    def reopen(cls, resume: str, given: Mapping[str, Any]) -> RunFolder:
        """Open the folder of a run to continue; its own settings hold."""
        path = Path(resume).expanduser().resolve()
        if not (path / "config.json").is_file():
            raise UserError(f"resume: {path} is not a run's folder (it has no config.json)")
        config = read_json(path / "config.json")
        stored, id = config.get("settings"), config.get("id")
        if not isinstance(stored, dict) or not isinstance(id, str):
            raise UserError(f"resume: {path / 'config.json'} has no 'settings' or no 'id'")
        asked = {k: v for k, v in given.items() if v != "" and k not in ("resume", "output")}
        now = validate({**stored, **asked}).as_config()
        for key in asked:
            if now[key] != stored.get(key):
                raise UserError(
                    f"resume: {key} was {stored.get(key)!r} when the run started and cannot become "
                    f"{now[key]!r}"
                )
        settings = validate(stored)
        authorship.require_own(config, settings, asked.values(), "{key}={name}")
        return cls(path, settings, id)

    def discard_unless_begun(self) -> None:
        """Remove the folder if no round of the run is finished."""
        if not (self.path / "last.safetensors").is_file():
            shutil.rmtree(self.path, ignore_errors=True)

    def save_round(self, record: Mapping[str, Any], model: State, server: State) -> None:
        """Finish a round: keep the model and what the server must remember, then add the line."""
        number = int(record["round"])
        if server:
            _save(self.path / f"server-{number}.safetensors", server)
        score = source_rank(record)
        earlier = [s for s in map(source_rank, self.rounds()) if s is not None]
        if score is not None and all(score > other for other in earlier):
            _save(self.path / "best.safetensors", model, {"round": str(number)})
        _save(
            self.path / "last.safetensors",
            model,
            {"round": str(number), "record": json.dumps(record)},
        )
        self._append(record)
        for old in self.path.glob("server-*.safetensors"):
            if old.stem != f"server-{number}":
                old.unlink()

    def restore(self) -> tuple[int, State, State]:
        """Return the last finished round (0: none), its model and what the server remembered."""
        last = self.path / "last.safetensors"
        if not last.is_file():
            return 0, {}, {}
        model, meta = read_tensors(last)
        try:
            number, line = int(meta["round"]), read_line(meta["record"])
        except (KeyError, ValueError) as error:
            raise UserError(f"{last} is not the model of a round: {printable(error)}") from None
        finished = [r for r in self.rounds() if r["round"] < number]
        rounds = self.path / "rounds.jsonl"
        write_text(rounds, "".join(json.dumps(r) + "\n" for r in [*finished, line]))
        server = self.path / f"server-{number}.safetensors"
        return number, model, read_tensors(server)[0] if server.is_file() else {}

    def rounds(self) -> list[dict[str, Any]]:
        """Return the lines so far; a half-written last line is left out."""
        return read_rounds(self.path)

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Write the outcome."""
        _write_json(self.path / "summary.json", summary)

    def _append(self, record: Mapping[str, Any]) -> None:
        with (self.path / "rounds.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
            file.flush()
            os.fsync(file.fileno())


def read_rounds(folder: Path) -> list[dict[str, Any]]:
    """Return the finished rounds of a run's folder; a half-written last line is left out."""
    path = folder / "rounds.jsonl"
    if not path.is_file():
        return []
    records: list[dict[str, Any]] = []
    try:
        # Lines end with \n and nothing else: a name may hold what else ends a line for Python.
        for line in path.read_text(encoding="utf-8").split("\n")[:-1]:
            records.append(read_line(line))
    except BadLine as error:
        raise UserError(f"{path} cannot be read: line {len(records) + 1}: {error}") from None
    except (OSError, ValueError, MemoryError) as error:
        raise UserError(f"{path} cannot be read: {printable(error)}") from None
    return records


def read_json(path: Path) -> dict[str, Any]:
    """Return the object a JSON file holds."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError, MemoryError) as error:
        raise UserError(f"{path} cannot be read: {printable(error)}") from None
    if not isinstance(value, dict):
        raise UserError(f"{path}: must hold a JSON object")
    return value


def source_rank(record: Mapping[str, Any]) -> tuple[float, float] | None:
    """Return what the best model is chosen by: the score of its round, then the accuracy.

    Rounds of older runs have no score.
    """
    source = record.get("source")
    if source is None:
        return None
    return float(source.get("score", source["accuracy"])), float(source["accuracy"])


def read_tensors(path: Path) -> tuple[State, dict[str, str]]:
    """Return the tensors and the metadata of a safetensors file."""
    # late: what only looks at a run's JSON, such as `hfedatm watch`, does not wait for torch
    from safetensors import SafetensorError, safe_open
    from safetensors.torch import load_file

    try:
        with safe_open(path, "pt") as file:
            meta = file.metadata() or {}
        return load_file(path), meta
    except (OSError, SafetensorError, ValueError, KeyError, MemoryError) as error:
        raise UserError(f"{path} cannot be read: {printable(error)}") from None


def load_weights(model: nn.Module, state: State, path: Path) -> None:
    """Give a model the weights that were read from a file."""
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        raise UserError(
            f"{path} does not fit the model; has its code changed since, or is it of another run? "
            f"{error}"
        ) from None


def _save(path: Path, state: State, metadata: dict[str, str] | None = None) -> None:
    from safetensors.torch import save_file

    with replacing(path, mode=PRIVATE) as part:
        save_file({name: tensor.contiguous() for name, tensor in state.items()}, part, metadata)


def _write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(value, indent=2) + "\n")
