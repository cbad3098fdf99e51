"""Compare runs: which settings differ, which run is better, and how certain that is."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from scipy import stats

from hfedatm.base.resolving import as_config
from hfedatm.base.settings import Settings
from hfedatm.runs import Run
from server_app.scores import summarise

NOT_COMPARED = {"seed", "run-name", "output", "resume", "diagnostics", "track", "threads", "device"}
"""Settings in which two runs of the same experiment may differ."""

MOST_NUMBERS = 40
"""Most plugged-in numbers that are compared."""

Score = Callable[[Run], float | None]


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds with its 95 % confidence interval (Student's t)."""

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        """The mean."""
        return statistics.fmean(self.values)

    @property
    def half_width(self) -> float | None:
        """Half the interval's width; unknown for a single run."""
        n = len(self.values)
        if n < 2:
            return None
        error = statistics.stdev(self.values) / math.sqrt(n)
        return float(stats.t.ppf(0.975, n - 1)) * error


@dataclass(frozen=True)
class Group:
    """Runs that share all settings but the seed."""

    label: str
    runs: tuple[Run, ...]

    def estimate(self, score: Score) -> Estimate | None:
        """Return the estimate over the runs that have this score."""
        values = tuple(v for v in map(score, self.runs) if v is not None)
        return Estimate(values) if values else None


def differing(runs: Sequence[Run]) -> dict[str, list[Any]]:
    """Return the settings in which the runs differ, with each run's value.

    A run that is older than a setting counts as having that setting's default.
    """
    defaults = as_config(Settings())
    keys = dict.fromkeys(key for run in runs for key in run.settings)
    table = {key: [run.settings.get(key, defaults.get(key)) for run in runs] for key in keys}
    hidden = NOT_COMPARED - {"seed"}
    return {
        key: values
        for key, values in table.items()
        if key not in hidden and any(value != values[0] for value in values)
    }


def group(runs: Sequence[Run]) -> list[Group]:
    """Group runs that differ only in the seed; a group's label names the settings that differ."""
    table = differing(runs)
    different = [key for key in table if key != "seed"]
    found: dict[tuple[str, ...], list[Run]] = {}
    for number, run in enumerate(runs):
        found.setdefault(tuple(str(table[key][number]) for key in different), []).append(run)
    groups = []
    for values, members in found.items():
        label = ", ".join(f"{k}={v}" for k, v in zip(different, values, strict=True))
        groups.append(Group(label or members[0].name, tuple(members)))
    return groups


def scores(runs: Sequence[Run]) -> dict[str, Score]:
    """Return the scores that are compared: name -> function of a run."""
    found: dict[str, Score] = {
        "unseen, best by source": lambda run: _of(run, "best_by_source", "unseen_accuracy"),
        "unseen, last round": lambda run: _of(run, "last", "unseen_accuracy"),
        "source, last round": lambda run: _of(run, "last", "source_accuracy"),
    }
    for domain in sorted({domain for run in runs for domain in run.domains}):
        found[f"source {domain}, last round"] = _domain(domain)
    return found


def numbers(runs: Sequence[Run]) -> dict[str, Score]:
    """Return the plugged-in numbers of the last round; it is unknown whether more is better."""
    names = sorted({name for run in runs for name in run.numbers})[:MOST_NUMBERS]
    return {f"{name}, last round": _number(name) for name in names}


def p_value(a: Group, b: Group, score: Score) -> float | None:
    """Return the probability of so large a difference by chance.

    Runs are paired by seed when both groups have the same seeds (paired t-test), else compared by
    Welch's t-test; None with fewer than two runs on a side.
    """
    first, second = _by_seed(a, score), _by_seed(b, score)
    if len(first) < 2 or len(second) < 2:
        return None
    if first.keys() == second.keys():
        pairs = [(first[seed], second[seed]) for seed in first]
        if len({round(x - y, 12) for x, y in pairs}) == 1:
            return 1.0 if pairs[0][0] == pairs[0][1] else 0.0
        return float(stats.ttest_rel(*zip(*pairs, strict=True)).pvalue)
    return float(
        stats.ttest_ind(list(first.values()), list(second.values()), equal_var=False).pvalue
    )


def _by_seed(group: Group, score: Score) -> dict[Any, float]:
    values = {run.settings.get("seed"): score(run) for run in group.runs}
    return {seed: value for seed, value in values.items() if value is not None}


def _of(run: Run, model: str, key: str) -> float | None:
    value = (summarise(run.rounds)[model] or {}).get(key)
    return None if value is None else float(value)


def _number(name: str) -> Score:
    return lambda run: run.rounds[-1].numbers.get(name) if run.rounds else None


def _domain(domain: str) -> Score:
    def score(run: Run) -> float | None:
        points = run.domain_curve(domain)
        return points[-1][1] if points else None

    return score
