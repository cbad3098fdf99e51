"""What is fuzzed on disk and on the wire: parcels, spool files, node memory, results folders."""

from __future__ import annotations

import json
import math
import shutil
import tempfile
from io import BytesIO
from pathlib import Path
from random import Random
from typing import Any
from zlib import crc32

import numpy as np
import torch
from flwr.app import ConfigRecord, Message, RecordDict
from fuzz_mutations import flip, spoil_json
from fuzz_targets import Target, trained
from helpers import run_small
from rich.console import Console
from safetensors.torch import save

from hfedatm.base.errors import UserError
from hfedatm.base.handover import parcel, recordfile
from hfedatm.base.handover.service import do
from hfedatm.base.handover.spool import HandoverError, Job
from hfedatm.base.memory import NodeMemory
from hfedatm.base.results import RunFolder
from hfedatm.cli.compare import describe as compared
from hfedatm.cli.watch import describe, view
from hfedatm.report import render
from hfedatm.runs import read_run

HONEST = recordfile.to_bytes(trained(0, "model", "grams", "failures"))


def spoil_file(data: bytes, rng: Random) -> bytes:
    """Return a file of records that is damaged, or sound but for what its index says."""
    if rng.random() < 0.4:
        return flip(data, rng)
    start = len(recordfile.MAGIC) + 8
    length = int.from_bytes(data[start - 4 : start], "little")
    text, rest = data[start : start + length], data[start + length :]
    if rng.random() < 0.5:
        text = json.dumps(spoil_json(json.loads(text), rng)).encode()
    else:
        text = flip(text, rng)
    if rng.random() < 0.2:
        rest = flip(rest, rng)
    body = len(text).to_bytes(4, "little") + text + rest
    return recordfile.MAGIC + crc32(body).to_bytes(4, "little") + body


class Parcels:
    """Parcels that a node sends."""

    name = "parcels"

    def make(self, rng: Random) -> Any:
        return spoil_file(HONEST, rng)

    def check(self, given: bytes) -> str:
        content = RecordDict({"parcel": ConfigRecord({"parcel": given})})
        reply = parcel.opened(Message(content, reply_to=Message(RecordDict(), 1, "train")))
        return "dropped" if "failure" in reply.content else "accepted"


class SpoolFiles:
    """Requests, results and errors in a station's spool."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.name, self._kind, self._folder = f"spool: {kind}", kind, folder
        folder.mkdir(parents=True)

    def make(self, rng: Random) -> Any:
        return (
            rng.randbytes(rng.randrange(9000)) if self._kind == "error" else spoil_file(HONEST, rng)
        )

    def check(self, given: bytes) -> str:
        job = Job(self._folder / "1-job")
        for path in (job.request, job.result, job.error):
            path.unlink(missing_ok=True)
        (self._folder / f"1-job.{self._kind}").write_bytes(given)
        if self._kind == "request":
            do(job, lambda content: content)
            assert job.done and not job.request.exists()
        try:
            job.answer()
        except HandoverError as error:
            assert len(str(error)) <= 4100
            return "dropped"
        return "accepted"


class Memories:
    """What a node has kept from an earlier round."""

    name = "node memory"

    def __init__(self, folder: Path) -> None:
        self._memory = NodeMemory("run", "client-0", folder)
        self._memory.folder.mkdir(parents=True)

    def make(self, rng: Random) -> Any:
        return flip(save({"a": torch.ones(3, 4), "b": torch.zeros(2)}), rng)

    def check(self, given: bytes) -> str:
        (self._memory.folder / "1-1.safetensors").write_bytes(given)
        (self._memory.folder / "1-x.safetensors").touch()
        try:
            self._memory.load(before=(2, 0))
        except UserError:
            return "dropped"
        return "accepted"


class Results:
    """A results folder that somebody gave us."""

    def __init__(self, file: str, run: Path, folder: Path, show: bool = False) -> None:
        self.name = f"results: {file}" + (", report" if show else "")
        self._file, self._run, self._folder, self._show = file, run, folder / "run", show
        shutil.copytree(run, self._folder)
        shutil.copytree(run, folder / "other")
        self._other = read_run(folder / "other")

    def make(self, rng: Random) -> Any:
        data = (self._run / self._file).read_bytes()
        if self._file.endswith("npz") and rng.random() < 0.7:
            return _spoil_archive(data, rng)
        if rng.random() < 0.3 or self._file.endswith(("npz", "safetensors")):
            return flip(data, rng)
        if self._file.endswith("jsonl"):
            lines = [json.loads(line) for line in data.splitlines()]
            lines = spoil_json(lines, rng)
            lines = lines if isinstance(lines, list) else [lines]
            return "".join(json.dumps(line) + "\n" for line in lines).encode()
        return json.dumps(spoil_json(json.loads(data), rng)).encode()

    def check(self, given: bytes) -> str:
        (self._folder / self._file).write_bytes(given)
        try:
            run = read_run(self._folder)
            Console(file=Path("/dev/null").open("w"), width=100).print(view(run))
            json.dumps(describe(run))
            if run.rounds:
                compared([run, self._other])
                if self._show:
                    render([run])
            RunFolder.reopen(str(self._folder), {}).restore()
        except UserError as error:
            assert str(error)
            return "dropped"
        finally:
            for name in ("rounds.jsonl", self._file):  # a resumed run writes its lines anew
                shutil.copyfile(self._run / name, self._folder / name)
        return "accepted"


def _spoil_archive(data: bytes, rng: Random) -> bytes:
    with np.load(BytesIO(data)) as file:
        arrays = dict(file)
    key = rng.choice(list(arrays))
    values = arrays.pop(key)
    changes = [
        lambda v: None,
        lambda v: v.reshape(-1),
        lambda v: v[:0] if v.ndim else v,
        lambda v: np.stack([v, v]),
        lambda v: np.full(v.shape, rng.choice((math.nan, math.inf, -1.0, 1e300))),
        lambda v: v.astype(str),
        lambda v: np.array("\x1b[2J$\\frac{$"),
        lambda v: np.zeros((3, 1)),
    ]
    with np.errstate(all="ignore"):
        changed = rng.choice(changes)(values)
    if changed is not None:
        name = key if rng.random() < 0.8 else rng.choice([f"{key}/x", f"filters/{key}", "stations"])
        arrays[name] = changed
    stream = BytesIO()
    np.savez(stream, **arrays)
    return stream.getvalue()


def make_file_targets(folder: Path) -> list[Target]:
    run = run_small(folder, "honest", rounds=2, station_rounds=1)
    array = next((run / "diagnostics").glob("*.npz")).relative_to(run)
    return [
        Parcels(),
        *(SpoolFiles(kind, folder / f"spool-{kind}") for kind in ("request", "result", "error")),
        Memories(folder / "memory"),
        *(
            Results(name, run, Path(tempfile.mkdtemp(dir=folder)))
            for name in ("config.json", "rounds.jsonl", "summary.json", "last.safetensors")
        ),
        Results("rounds.jsonl", run, Path(tempfile.mkdtemp(dir=folder)), show=True),
        Results(str(array), run, Path(tempfile.mkdtemp(dir=folder)), show=True),
    ]
