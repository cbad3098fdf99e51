"""Assemble the page from the facts in the run's folder, the figures and the template."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from pydantic import ValidationError

from hfedatm.base.errors import UserError
from hfedatm.base.privacy_settings import statement
from hfedatm.base.resolving import as_config
from hfedatm.base.round_record import LayerMergeQuality, RoundRecord
from hfedatm.base.settings import Settings, keys
from hfedatm.base.text import printable
from hfedatm.comparison import differing
from hfedatm.report import curves, inside, tree
from hfedatm.runs import Run, measure_of
from hfedatm_files import write_text
from server_app.narration import size
from server_app.scores import summarise


def write_report(runs: Sequence[Run], path: Path) -> None:
    """Write the report of one or several runs; the file appears whole or not at all."""
    page = render(runs)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, page)
    except OSError as error:
        raise UserError(f"output: cannot write {path}: {error.strerror}") from None


def render(runs: Sequence[Run]) -> str:
    """Return the page as text; it refers to nothing outside itself."""
    for run in runs:
        if not run.rounds:
            raise UserError(f"{run.name}: no round is finished yet, so there is nothing to show")
    pages = Environment(
        loader=PackageLoader("hfedatm.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    pages.filters |= {"size": size, "percent": _percent, "duration": duration}
    facts = []
    for run in runs:
        try:
            facts.append(_facts(run))
        except UserError:
            raise
        except Exception as error:  # for example arrays of a wrong shape
            why = printable(f"{type(error).__name__}: {error}")
            raise UserError(
                f"{run.name}: something in its folder cannot be shown ({why}); is it damaged, or "
                "of another version? Delete its folder 'diagnostics' to continue"
            ) from error
    return pages.get_template("page.html.j2").render(
        runs=facts,
        accuracy=curves.accuracy(runs),
        differing=differing(runs),
        measure=measure_of(runs),
    )


def _facts(run: Run) -> dict[str, Any]:
    last = run.rounds[-1]
    shown = [(number, _inside(run, number)) for number in sorted(run.diagnostics)]
    final = run.diagnostics[max(run.diagnostics)] if run.diagnostics else {}
    return {
        "run": run,
        "outcome": summarise(run.rounds),
        "unseen": run.unseen_domain,
        "privacy": _privacy(run),
        "failed": [{"round": r.round, **f.model_dump()} for r in run.rounds for f in r.failures],
        "kept": [r for r in run.rounds if r.kept],
        "stations": _stations(run, last),
        "domains_seen": sorted({d for s in _stations(run, last) for d in s["domains"]}),
        "domain_numbers": curves.domain_numbers(run),
        "figures": {
            "tree": tree.draw(str(run.settings.get("tiers", "")), last),
            "domains": curves.domains(run),
            "numbers": curves.numbers(run),
            "bytes": curves.bytes_sent(run),
            "seconds": curves.seconds(run),
            "moved": curves.moved(run),
            "failures": curves.failures(run),
            "privacy": curves.privacy(run),
            "confusion": inside.confusion(final),
        },
        "mistakes": inside.mistakes(final),
        "inside": shown,
        "quality": _quality(run),
        "settings": _settings(run),
        "command": _command(run),
    }


def _inside(run: Run, number: int) -> dict[str, Any]:
    """Return the figures of one round's merge."""
    arrays = run.diagnostics[number]
    record = next((r for r in run.rounds if r.round == number), None)
    merge = record.merge if record else None
    reference = merge.reference if merge else None
    names = [str(name) for name in arrays.get("stations", [])]
    station = inside.station_moved_most(arrays) or next((n for n in names if n != reference), None)
    covered, weights = (int(n) for n in arrays.get("covered", (0, 0)))
    return {
        "station": station,
        "moved": (record.moved or 0) if record else 0,
        "reference": reference,
        "assignment": inside.assignment(arrays, station) if station else None,
        "filters": inside.filters(arrays, station, reference) if station else None,
        "spectra": inside.spectra(arrays),
        "distances": inside.distances(arrays),
        "covered": covered / weights if weights else 0.0,
        "layers": merge.layers if merge else {},
    }


def _quality(run: Run) -> tuple[int, dict[str, LayerMergeQuality]] | None:
    """Return the last round that merged stations without a common start, and each layer's fit."""
    rounds = [(r.round, r.merge.quality) for r in run.rounds if r.merge and r.merge.quality]
    return rounds[-1] if rounds else None


def _stations(run: Run, record: RoundRecord) -> list[dict[str, Any]]:
    """Return the facts about each station: its size, domains, pace and failures."""
    pace = statistics.median([s.seconds for s in record.per_station] or [0.0])
    evaluated = record.source.stations if record.source else {}
    stations = []
    for station in sorted(record.per_station, key=lambda s: _natural(s.name)):
        name, score = station.name, evaluated.get(station.name)
        failed = sum(f.node.split(",")[0] == name for r in run.rounds for f in r.failures)
        stations.append(
            {
                "name": name,
                "clients": int(station.num_clients),
                "examples": int(station.num_examples),
                "seconds": station.seconds,
                "slow": station.seconds > 2 * pace,
                "failed": failed,
                "accuracy": score.accuracy if score else None,
                "domains": score.domains if score else {},
            }
        )
    return stations


def _privacy(run: Run) -> str:
    """Return a sentence on what the run protects, if this version understands its settings."""
    try:
        known = {key: value for key, value in run.settings.items() if key in keys()}
        settings = Settings.model_validate(known)
    except ValidationError:
        return ""
    return statement(settings, any(s.gram_bytes_below for s in run.rounds[-1].per_station))


def _settings(run: Run) -> list[tuple[str, Any, bool]]:
    """Return each key, its value and whether the value differs from the default."""
    defaults = as_config(Settings())
    return [(key, value, defaults.get(key) != value) for key, value in run.settings.items()]


def _command(run: Run) -> str:
    own = {"run-name", "resume", "output"}
    given = [
        f"{key}={_quoted(value)}" for key, value, new in _settings(run) if new and key not in own
    ]
    return " ".join(["hfedatm run", *given])


def _quoted(value: Any) -> str:
    text = str(value)
    return text if text and all(c.isalnum() or c in "-_./:=,+" for c in text) else f"'{text}'"


def _natural(name: str) -> tuple[int, str]:
    digits = "".join(c for c in name if c.isdigit())
    return (int(digits) if digits else -1, name)


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.1f} %"


def duration(seconds: float) -> str:
    """Return a duration in a form that people can read."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return (
        str(timedelta(seconds=round(seconds))).removesuffix(":00")
        if seconds >= 3600
        else (f"{seconds // 60:.0f} min {seconds % 60:.0f} s")
    )
