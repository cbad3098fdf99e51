"""The runs of a deployment: what was submitted, and what became of it."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from secrets import token_hex
from shutil import rmtree
from typing import Any

from hfedatm.base import presence
from hfedatm.base.errors import UserError
from hfedatm.base.results import FLOWER_RUNS, read_json
from hfedatm.base.text import printable
from hfedatm.deploy import flower
from hfedatm.runs import Run, read_run
from hfedatm_files import write_text

LINK = "server"


@dataclass(frozen=True)
class Submission:
    """A run as the server's SuperLink and the run's folder describe it."""

    id: str
    state: str
    since: str
    name: str
    rounds: str
    results: str

    def plain(self) -> dict[str, str]:
        """Return the fields by name."""
        return asdict(self)


def submit(home: Path, given: Mapping[str, Any]) -> int:
    """Start a run with these settings; return the id that Flower gives it.

    Every submission has an app folder of its own: two at a time would read each other's settings.
    """
    app = home / f"app-{token_hex(8)}"
    try:
        flower.write_app(app, LINK, given)
        run_id = flower.start_run(app, LINK, home)
    finally:
        rmtree(app, ignore_errors=True)
    places = {k: str(given[k]) for k in ("output", "resume") if given.get(k)}
    (home / "runs").mkdir(exist_ok=True)
    write_text(home / "runs" / f"{run_id}.json", json.dumps(places) + "\n")
    return run_id


def submissions(home: Path) -> list[Submission]:
    """Return all runs of the deployment, the newest first."""
    return [_described(home, listed) for listed in flower.list_runs(LINK, home)]


def stop(home: Path, which: str, *, after_round: bool = False) -> Submission:
    """End a run, given by id or name, and return what it was.

    With ``after_round`` the round that goes on is finished first, so that no work is lost.
    """
    known = submissions(home)
    found = [each for each in known if which in (each.id, each.name)]
    going = [each for each in found if not each.state.startswith("finished")]
    if not going:
        others = ", ".join(e.id for e in known if not e.state.startswith("finished")) or "none"
        why = f"run {which} is over ({found[0].state})" if found else f"there is no run {which}"
        raise UserError(f"{why}; runs that go on: {others}")
    going[0] = _after_round(home, going[0]) if after_round else going[0]
    if not going[0].state.startswith("finished"):
        flower.stop_run(int(going[0].id), LINK, home)
    return _ended(home, going[0])


def _ended(home: Path, stopped: Submission) -> Submission:
    """Wait for the process of a stopped run, which may still save a round that it has computed."""
    while stopped.results and presence.lives(Path(stopped.results)):
        time.sleep(0.2)
    kept = stopped.results if _folder(home, stopped.id) else ""
    return replace(stopped, rounds=_rounds(home, stopped.id), results=kept)


def _after_round(home: Path, run: Submission) -> Submission:
    """Wait until a round has ended, or the run has; return the run as it is then."""
    asked = time.monotonic()
    while (now := _described(home, _listed(home, run.id))).rounds == run.rounds:
        if now.state.startswith("finished"):
            break
        # Asking a SuperLink takes a process, so the folder is looked at more often.
        until = time.monotonic() + min(30.0, 2.0 + (time.monotonic() - asked) / 10)
        while time.monotonic() < until and _rounds(home, run.id) == run.rounds:
            time.sleep(0.1)
    return now


def _listed(home: Path, id: str) -> Mapping[str, Any]:
    return next(each for each in flower.list_runs(LINK, home) if str(each["run-id"]) == id)


def _rounds(home: Path, id: str) -> str:
    run = _folder(home, id)
    return f"{len(run.rounds)}/{run.total}" if run else ""


def how_to_resume(home: Path, run_id: int) -> str:
    """Return the end of a sentence about a run that ended early: the command that continues it."""
    run = _folder(home, str(run_id))
    return f"; continue with: hfedatm submit resume={run.path}" if run and run.rounds else ""


def _described(home: Path, listed: Mapping[str, Any]) -> Submission:
    id, state = str(listed["run-id"]), str(listed["status"])
    when = "finished-at" if state.startswith("finished") else "running-at"
    since = listed.get(when) or listed.get("pending-at") or ""
    run = _folder(home, id)
    return Submission(
        id,
        printable(state),
        printable(since),
        run.name if run else "",
        _rounds(home, id),
        str(run.path) if run else "",
    )


def _folder(home: Path, id: str) -> Run | None:
    """Return the run's folder on this machine; a run that ended early may have none."""
    note = home / "runs" / f"{id}.json"
    if not note.is_file():
        return None
    places = read_json(note)
    output = Path(str(places.get("output", "")))
    folders = [Path(str(places["resume"]))] if "resume" in places else sorted(output.glob("*/"))
    for folder in folders:
        try:
            if int(id) in read_json(folder / "config.json").get(FLOWER_RUNS, []):
                return read_run(folder)
        except UserError:  # a folder of something else, or one that is being written
            continue
    return None
