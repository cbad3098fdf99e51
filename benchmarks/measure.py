"""Helpers of all benchmarks: paired timing, peak memory of a new process, one JSON file each."""

from __future__ import annotations

import argparse
import gc
import json
import math
import multiprocessing
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
Prepared = tuple[Callable[..., Callable[[], object]], tuple[Any, ...]]
PACKAGES = ("torch", "numpy", "scipy", "flwr", "POT", "transformers")


@dataclass(frozen=True)
class Figure:
    """One measured number and its target."""

    name: str
    value: float
    limit: float | None
    compared_with: str
    unit: str = "x"
    at_least: bool = False
    details: dict[str, Any] = field(default_factory=dict)

    @property
    def reached(self) -> bool | None:
        """Whether the limit is kept; None if there is no limit."""
        if self.limit is None:
            return None
        return self.value >= self.limit if self.at_least else self.value <= self.limit

    @property
    def target(self) -> str:
        """The limit as it is written in the table."""
        if self.limit is None:
            return "–"
        return f"{'≥' if self.at_least else '≤'} {self.limit:g}"


def options(description: str | None, given: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line that every benchmark has, and fix the number of threads."""
    parser = argparse.ArgumentParser(description=(description or "").split("\n")[0])
    parser.add_argument("--smoke", action="store_true", help="tiny sizes: does it run at all?")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the JSON files")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch and BLAS")
    chosen = parser.parse_args(given)
    set_threads(chosen.threads)
    return chosen


def set_threads(count: int) -> None:
    """Give torch and the BLAS of numpy and scipy the same number of threads."""
    import scipy.linalg  # noqa: F401  a library that is loaded later would not be limited
    import torch
    from threadpoolctl import threadpool_limits

    torch.set_num_threads(count)
    threadpool_limits(count)


def paired(
    ours: Callable[[], object], theirs: Callable[[], object], repeats: int
) -> dict[str, float]:
    """Time two jobs in turn (ours, theirs, ours, theirs and so on), and compare each pair.

    The time is CPU time of the whole process, which other processes on the machine disturb
    little; with one thread it equals the time on an idle machine.

    Returns
    -------
    dict
        ``ratio`` is the median over the pairs, ``low`` and ``high`` their quartiles; ``ours`` and
        ``theirs`` are medians in seconds.
    """
    ours(), theirs()  # one-time costs (imports, caches, page faults) are not compared
    with _frozen():
        return _compared([(cpu_seconds(ours), cpu_seconds(theirs)) for _ in range(repeats)])


def side_by_side(ours: Prepared, theirs: Prepared, pairs: int, times: int = 1) -> dict[str, float]:
    """Time two jobs at once, each in a new process on a core of its own; returns as `paired`.

    Use it for jobs so long that the machine's speed changes while they take turns; at the same
    time, a slower machine slows both. The two jobs exchange cores from pair to pair. A side is a
    function and its arguments; the function returns the job, warmed up. The job runs ``times``
    times.
    """
    context = multiprocessing.get_context("spawn")
    cores = sorted(os.sched_getaffinity(0))
    found = []
    for number in range(pairs):
        ready = context.Barrier(2)
        queues = [context.SimpleQueue() for _ in range(2)]
        processes = [
            context.Process(
                target=_time, args=(queue, ready, cores[core % len(cores)], side, times)
            )
            for queue, side, core in zip(queues, (ours, theirs), (number, number + 1), strict=True)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        if any(process.exitcode for process in processes):
            raise RuntimeError("a side failed in its process")
        found.append((float(queues[0].get()), float(queues[1].get())))
    return _compared(found)


def _time(queue: Any, ready: Any, core: int, side: Prepared, times: int) -> None:
    os.sched_setaffinity(0, {core})
    set_threads(1)
    prepare, given = side
    try:
        job = prepare(*given)
    except BaseException:
        ready.abort()  # or the other side would wait for ever
        raise
    with _frozen():
        ready.wait(timeout=600)
        queue.put(sum(cpu_seconds(job) for _ in range(times)) / times)


@contextmanager
def _frozen() -> Iterator[None]:
    """Keep the garbage collector from scanning the objects that already exist.

    A scan of all imported modules takes longer than many a job. At the end all objects are
    unfrozen, because triton reports a leak for each of its objects that is frozen when Python ends.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _compared(pairs: Sequence[tuple[float, float]]) -> dict[str, float]:
    ratios = sorted(a / b for a, b in pairs)
    return {
        "ratio": statistics.median(ratios),
        "low": ratios[len(ratios) // 4],
        "high": ratios[-1 - len(ratios) // 4],
        "ours": statistics.median(a for a, _ in pairs),
        "theirs": statistics.median(b for _, b in pairs),
        "repeats": len(pairs),
    }


def cpu_seconds(job: Callable[[], object]) -> float:
    """Return the CPU time of a job."""
    gc.collect()
    start = time.process_time()
    job()
    return time.process_time() - start


def peak_bytes(prepare: Callable[..., Callable[[], object]], *given: Any) -> int:
    """Return how far the resident memory of ``prepare(*given)()`` rises above where it started.

    ``prepare`` runs in a new process; the memory in use when it returns the job is the start.
    """
    context = multiprocessing.get_context("spawn")
    queue = context.SimpleQueue()
    process = context.Process(target=_watch, args=(queue, prepare, given))
    # Freed tensors go back to the system at once; memory kept by the allocator would count, too.
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"
    process.start()
    del os.environ["MALLOC_MMAP_THRESHOLD_"]
    process.join()
    if process.exitcode:
        raise RuntimeError(f"{prepare.__name__}{given} failed in its process")
    return int(queue.get())


def _watch(
    queue: Any, prepare: Callable[..., Callable[[], object]], given: tuple[Any, ...]
) -> None:
    set_threads(1)
    job = prepare(*given)
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here
    before = _status("VmRSS")
    job()
    queue.put(_status("VmHWM") - before)


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))


def publish(script: str, figures: Sequence[Figure], chosen: argparse.Namespace) -> None:
    """Print the figures and write them to ``<output>/<script>.json``."""
    for figure in figures:
        if not math.isfinite(figure.value):
            raise ValueError(f"{figure.name}: {figure.value} is no figure")
        print(
            f"{figure.name}: {figure.value:.4g} {figure.unit} ({figure.target}) "
            f"{verdict(figure.reached)}; compared with {figure.compared_with}",
            flush=True,
        )
    chosen.output.mkdir(parents=True, exist_ok=True)
    path = chosen.output / f"{Path(script).stem}.json"
    path.write_text(
        json.dumps(
            {
                "figures": [
                    {**asdict(figure), "target": figure.target, "reached": figure.reached}
                    for figure in figures
                ],
                "smoke": chosen.smoke,
                "threads": chosen.threads,
                "machine": {
                    "cores": os.cpu_count(),
                    "load": os.getloadavg()[0],
                    "system": platform.platform(),
                },
                "versions": {
                    "python": platform.python_version(),
                    **{name: version(name) for name in PACKAGES},
                },
            },
            indent=2,
            ensure_ascii=False,
        )
        + "\n",
        encoding="utf-8",
    )


def verdict(reached: bool | None) -> str:
    """Return the word for the table."""
    return {True: "reached", False: "missed", None: "measured"}[reached]


def details(pair: Mapping[str, float]) -> dict[str, float]:
    """Round a pair's numbers for the JSON."""
    return {key: float(f"{value:.4g}") for key, value in pair.items()}
