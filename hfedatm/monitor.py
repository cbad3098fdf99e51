"""Health and metrics of the processes and runs of one machine, for Prometheus.

Flower's processes answer ``/health`` and nothing more. What an operator wants to know besides is on
disk: the processes that were started, the jobs in a station's spool, the rounds of a run, the
accounts of privacy. So one small process reads these files and answers for the whole machine.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import psutil
from cryptography import x509
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from hfedatm.base.errors import UserError
from hfedatm.deploy.processes import Processes
from hfedatm.runs import Run, read_run

MOST_RUNS = 20
"""How many runs are shown; the newest ones."""


@dataclass(frozen=True)
class Machine:
    """Where to look: the folder of a deployment or of one machine of it, and the runs' folders."""

    folder: Path
    results: tuple[Path, ...] = field(default_factory=tuple)
    secrets: tuple[Path, ...] = field(default_factory=tuple)
    """Folders of secrets besides those in ``folder``, as in a container."""

    def processes(self) -> dict[str, psutil.Process | None]:
        """Return the processes that ``hfedatm up`` started; None for one that has died."""
        known = Processes(self.folder)
        living = known.living()
        return {name: living.get(name) for name in known.noted()}

    def runs(self) -> list[Run]:
        """Return the newest runs; a folder that cannot be read is left out."""
        configs = [path for folder in self.results for path in folder.glob("*/config.json")]
        configs.sort(key=lambda path: path.stat().st_mtime, reverse=True)
        found = []
        for path in configs[:MOST_RUNS]:
            try:
                found.append(read_run(path.parent))
            except UserError:
                continue
        return found

    def spools(self) -> dict[str, int]:
        """Return the number of jobs that wait or are being done, by station."""
        return {
            spool.parent.name: len(list(spool.glob("*.request"))) for spool in self._inside("spool")
        }

    def epsilon_left(self) -> dict[str, float]:
        """Return what the policy still allows to spend, by machine; the least over its data."""
        left: dict[str, float] = {}
        for folder in self._inside("memory/.accounts"):
            for file in folder.glob("*.json"):
                try:
                    found = json.loads(file.read_text(encoding="utf-8"))["epsilon-left"]
                except (OSError, ValueError, KeyError, TypeError):
                    continue
                if isinstance(found, int | float):
                    name = folder.parent.parent.name
                    left[name] = min(found, left.get(name, found))
        return left

    def certificate_days(self) -> dict[str, float]:
        """Return the days until a machine's first certificate ends."""
        found: dict[str, float] = {}
        for folder in (*self.folder.glob("secrets/*/"), *self.secrets):
            for file in folder.glob("*.pem"):
                try:
                    ends = x509.load_pem_x509_certificate(file.read_bytes()).not_valid_after_utc
                except (OSError, ValueError):
                    continue
                days = (ends - datetime.now(UTC)).total_seconds() / 86400
                found[folder.name] = min(days, found.get(folder.name, days))
        return found

    def disk_free(self) -> dict[str, float]:
        """Return the bytes that are free where the deployment and the runs' folders are."""
        places = [place for place in (self.folder, *self.results) if place.is_dir()]
        return {str(place): float(shutil.disk_usage(place).free) for place in places}

    def _inside(self, path: str) -> Iterator[Path]:
        for folder in (self.folder, *sorted(self.folder.glob("*/"))):
            if (folder / path).is_dir():
                yield folder / path


class Collector:
    """What Prometheus reads, made anew for every request."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics."""
        yield from self._processes()
        yield from self._runs()
        yield _gauge("jobs", "Jobs in a station's spool", "machine", self._machine.spools())
        yield _gauge(
            "epsilon_left",
            "Epsilon that the owner's policy still allows on this machine's data",
            "machine",
            self._machine.epsilon_left(),
        )
        yield _gauge(
            "certificate_days_left",
            "Days until the first certificate of a machine ends",
            "machine",
            self._machine.certificate_days(),
        )
        yield _gauge("disk_free_bytes", "Free bytes", "folder", self._machine.disk_free())

    def _processes(self) -> Iterator[Metric]:
        known = self._machine.processes()
        alive = {name: float(process is not None) for name, process in known.items()}
        yield _gauge("process_up", "Whether a process is alive", "process", alive)
        memory = {name: _memory(process) for name, process in known.items() if process}
        yield _gauge(
            "process_memory_bytes", "Memory of a process and its children", "process", memory
        )

    def _runs(self) -> Iterator[Metric]:
        state = GaugeMetricFamily("hfedatm_run", "State of a run; 1", labels=["run", "state"])
        planned = GaugeMetricFamily("hfedatm_rounds_planned", "Rounds of a run", labels=["run"])
        accuracy = GaugeMetricFamily(
            "hfedatm_accuracy", "Accuracy after the last evaluated round", labels=["run", "on"]
        )
        spent = GaugeMetricFamily(
            "hfedatm_epsilon_spent", "Most epsilon that a client has spent", labels=["run"]
        )
        rounds = CounterMetricFamily("hfedatm_rounds", "Finished rounds", labels=["run"])
        replies = CounterMetricFamily(
            "hfedatm_replies", "Replies of nodes by outcome", labels=["run", "tier", "outcome"]
        )
        sent = CounterMetricFamily(
            "hfedatm_bytes_up", "Bytes that a tier has sent up", labels=["run", "tier"]
        )
        seconds = CounterMetricFamily(
            "hfedatm_seconds", "Seconds of rounds by phase", labels=["run", "phase"]
        )
        for run in self._machine.runs():
            records, name = run.rounds, run.name
            state.add_metric([name, run.status], 1)
            planned.add_metric([name], run.total)
            rounds.add_metric([name], len(records))
            answered = sum(r.stations.answered for r in records)
            asked = sum(r.stations.asked for r in records)
            replies.add_metric([name, "stations", "answered"], answered)
            replies.add_metric([name, "stations", "missing"], asked - answered)
            replies.add_metric(
                [name, "clients", "answered"], sum(r.clients.answered for r in records)
            )
            replies.add_metric([name, "all", "failed"], sum(len(r.failures) for r in records))
            sent.add_metric([name, "clients"], sum(r.bytes_up.clients for r in records))
            sent.add_metric([name, "stations"], sum(r.bytes_up.stations for r in records))
            training = sum(r.train_seconds or 0 for r in records)
            merging = sum(r.merge_seconds or 0 for r in records)
            seconds.add_metric([name, "train"], training)
            seconds.add_metric([name, "merge"], merging)
            seconds.add_metric([name, "all"], sum(r.seconds for r in records))
            for on in ("source", "unseen"):
                if scores := [s for r in records if (s := getattr(r, on))]:
                    accuracy.add_metric([name, on], scores[-1].accuracy)
            if private := [r.privacy.epsilon for r in records if r.privacy]:
                spent.add_metric([name], private[-1])
        yield from (state, planned, rounds, replies, sent, seconds, accuracy, spent)


def application(machine: Machine) -> Starlette:
    """Return the answers to ``/health`` and ``/metrics`` as an ASGI application."""
    registry = CollectorRegistry()
    registry.register(Collector(machine))

    def health(_: Request) -> Response:
        states = {name: process is not None for name, process in machine.processes().items()}
        dead = sorted(name for name, alive in states.items() if not alive)
        return JSONResponse({"dead": dead, "alive": len(states) - len(dead)}, 503 if dead else 200)

    def metrics(_: Request) -> Response:
        return Response(generate_latest(registry), media_type="text/plain; version=0.0.4")

    return Starlette(routes=[Route("/health", health), Route("/metrics", metrics)])


def _gauge(
    name: str, meaning: str, label: str, values: dict[str, float] | dict[str, int]
) -> Metric:
    metric = GaugeMetricFamily(f"hfedatm_{name}", meaning, labels=[label])
    for key, value in values.items():
        metric.add_metric([key], value)
    return metric


def _memory(process: psutil.Process) -> float:
    total = 0.0
    try:
        family = [process, *process.children(recursive=True)]
    except psutil.Error:
        return 0.0
    for each in family:
        try:
            # The share of memory that is this process's own: forks share most of theirs.
            total += each.memory_full_info().pss
        except (psutil.Error, AttributeError):
            continue
    return total
