"""The runs of each table.

A table is rows x columns x seeds; each row and each column is a set of settings.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from hfedatm.base.errors import UserError
from hfedatm.base.resolving import resolve
from hfedatm.reproduce.cells import Cell

Given = dict[str, Any]

PRESETS = {
    "digits": "demo",
    "digits4": "digits4-lenet5",
    "pacs": "pacs-lenet5",
    "office-home": "office-home-lenet5",
    "terra-incognita": "terra-incognita-lenet5",
    "amazon": "amazon-minilm",
    "amazon-features": "amazon-features-mlp",
}
METHODS = {"FedAvg": "fedavg", "FedProx": "fedprox", "FedSR": "fedsr", "FedIIR": "fediir"}
ABLATION = {
    "Avg": "avg",
    "HFedATM w/o FOT": "hfedatm-no-fot",
    "HFedATM w/o RegMean": "hfedatm-no-regmean",
    "HFedATM": "hfedatm",
}
EPSILONS = (4.0, 2.0, 1.0, 0.5, 0.1)


@dataclass(frozen=True)
class Table:
    """Rows and columns of settings over seeds.

    ``columns`` maps a group (for example a lambda) to its columns (target domains).
    """

    name: str
    title: str
    rows: dict[str, Given]
    columns: dict[str, dict[str, Given]]
    seeds: tuple[int, ...]
    base: Given
    bounds: dict[str, list[Given]] = field(default_factory=dict)
    """Rows to compare with by eye: of several choices, source validation takes one."""

    @property
    def all_rows(self) -> list[str]:
        """Every row that is printed: those that are tested, then the bounds."""
        return [*self.rows, *self.bounds]

    def baseline(self, row: str) -> str:
        """Return the row to compare with: the same method or model with Avg, or the first row."""
        method, _, rule = row.rpartition(" + ")
        return f"{method} + Avg" if method and rule else next(iter(self.rows))

    def cell(self, row: str, group: str, column: str, seed: int) -> Cell:
        """Return one cell; of a bound, the first choice."""
        return self.choices(row, group, column, seed)[0]

    def choices(self, row: str, group: str, column: str, seed: int) -> list[Cell]:
        """Return the cells of which one stands in this place: a single one, but for bounds."""
        place = {**self.columns[group][column], "seed": seed}
        given = self.bounds.get(row) or [self.rows[row]]
        return [Cell.of({**self.base, **one, **place}) for one in given]

    def cells(self) -> list[Cell]:
        """Return all cells, seed by seed, so that a stopped table is complete for some seeds."""
        found = [
            cell
            for seed in self.seeds
            for group, columns in self.columns.items()
            for column in columns
            for row in self.all_rows
            for cell in self.choices(row, group, column, seed)
        ]
        return list(dict.fromkeys(found))


def make(
    name: str,
    dataset: str,
    given: Given,
    seeds: Sequence[int],
    lambdas: Sequence[float] | None = None,
    targets: Sequence[str] | None = None,
    only: Sequence[str] | None = None,
    bounds: bool = False,
) -> Table:
    """Return a table; ``given`` holds settings of every run, ``only`` the rows to keep.

    With ``bounds`` there are rows for central training and for the best single station.
    """
    if name not in TABLES:
        raise UserError(f"table: got {name!r}; available: {', '.join(TABLES)}")
    if dataset not in PRESETS:
        raise UserError(f"--dataset: got {dataset!r}; available: {', '.join(PRESETS)}")
    title, rows, preferred = TABLES[name]
    base = {"preset": PRESETS[dataset], **given}
    settings = resolve(base)
    if settings.dataset != dataset:
        raise UserError(f"--dataset {dataset}, but the settings say dataset={settings.dataset}")
    domains = targets or _domains(dataset)
    columns = {
        f"λ = {lam:g}": {d: {"lambda": lam, "target-domain": d} for d in domains}
        for lam in (lambdas or preferred)
    }
    found = rows(base)
    if wrong := [label for label in only or () if label not in found]:
        raise UserError(f"--row: got {wrong[0]!r}; available: {'; '.join(found)}")
    chosen = {label: row for label, row in found.items() if not only or label in only}
    beside = _bounds(base) if bounds else {}
    return Table(name, title, chosen, columns, tuple(seeds), base, beside)


def conditions(table: Table) -> str:
    """Return a sentence on the first row's settings; labels of other rows say how they differ."""
    s = resolve({**table.base, **next(iter(table.rows.values()))})
    params = f" ({s.dataset_params})" if s.dataset_params else ""
    part = f" (trained: {s.train_only}; the rest is frozen)" if s.train_only else ""
    return (
        f"{s.dataset}{params}, {s.model}{part}, {s.client_method} clients "
        "unless the row says otherwise; "
        f"{s.stations} stations x {s.clients_per_station} clients ({s.station_assignment} order), "
        f"{s.rounds} rounds x {s.station_rounds} station rounds x {s.local_epochs} epochs, "
        f"batch {s.batch_size}, {s.optimizer} lr {s.lr:g} momentum {s.momentum:g}, "
        f"{s.schedule} schedule"
        + ("; every station starts from a model of its own." if s.station_start == "own" else ".")
    )


def _domains(dataset: str) -> list[str]:
    module = importlib.import_module(f"hfedatm_core.data.{dataset.replace('-', '_')}")
    return list(module.DOMAINS)


# --- rows


def _bounds(base: Given) -> dict[str, list[Given]]:
    """Return rows for one client with all source data, and for the stations by themselves.

    Both see every example as often as the clients of the table. Stations that train apart differ
    more than stations that meet every round, so nothing is cut back to the median of the others.
    """
    s = resolve(base)
    whole = s.rounds * s.station_rounds
    central = {"stations": 1, "clients-per-station": 1, "station-rounds": 1, "rounds": whole}
    alone = {"rounds": 1, "station-rounds": whole, "server-rule": "one-station"}
    trusted = {"bound-factor": 0.0, "claim-factor": 0.0, "least-agreement": 0.0}
    return {
        "Central training": [{"server-rule": "avg", "evaluate-every": s.station_rounds, **central}],
        "Best single station": [
            {**alone, **trusted, "rule-params": f"station={number}"} for number in range(s.stations)
        ],
    }


def _main(base: Given) -> dict[str, Given]:
    methods: dict[str, Given] = {k: {"client-method": v} for k, v in METHODS.items()}
    if (norms := _with_batch_norm(base)) is not None:
        methods["gPerXAN, BatchNorm"] = {"client-method": "gperxan", **norms}
    return {
        f"{label} + {rule_label}": {**method, "server-rule": rule}
        for label, method in methods.items()
        for rule_label, rule in (("Avg", "avg"), ("HFedATM", "hfedatm"))
    }


def _with_batch_norm(base: Given) -> Given | None:
    """Return settings that give the network BatchNorm, which gPerXAN mixes; None if impossible."""
    s = resolve(base)
    if s.model in ("lenet5", "vgg11"):
        return {"model-params": ",".join(filter(None, [s.model_params, "batch_norm=true"]))}
    return {} if s.model == "resnet18" else None


def _architectures(base: Given) -> dict[str, Given]:
    models = {
        "LeNet-5": {"model": "lenet5"},
        "ResNet-18": {"model": "resnet18", "model-params": "small_input=true"},
        "VGG-11": {"model": "vgg11", "model-params": "small_input=true"},
    }
    if resolve(base).dataset == "amazon":
        models = {"MiniLM": {"model": "minilm"}}
    if resolve(base).dataset == "amazon-features":
        hidden = {"linear head": 0, "1 hidden layer": 1, "2 hidden layers": 2}
        models = {k: {"model": "mlp", "model-params": f"layers={n}"} for k, n in hidden.items()}
    return {
        f"{label} + {rule_label}": {**model, "server-rule": rule}
        for label, model in models.items()
        for rule_label, rule in (("Avg", "avg"), ("HFedATM", "hfedatm"))
    }


def _ablation(base: Given) -> dict[str, Given]:
    return {label: {"server-rule": rule} for label, rule in ABLATION.items()}


def _hfl(base: Given) -> dict[str, Given]:
    s = resolve(base)
    # The flat row has the same clients and local epochs; every client round ends at the server.
    flat = {
        "stations": 1,
        "clients-per-station": s.num_clients,
        "station-rounds": 1,
        "rounds": s.rounds * s.station_rounds,
        "evaluate-every": s.station_rounds,
    }
    return {
        "HierFAVG (Avg)": {"server-rule": "avg"},
        "FedAvg (no stations)": {"server-rule": "avg", **flat},
        "MTGC": {"server-rule": "mtgc"},
        "FedRC (weights)": {"server-rule": "fedrc-weights"},
        "FedGA": {"server-rule": "fedga"},
        "FedGMA": {"server-rule": "fedgma"},
        "HFedATM": {"server-rule": "hfedatm"},
    }


def _systems(base: Given) -> dict[str, Given]:
    return {
        "HierFAVG (Avg)": {"server-rule": "avg"},
        "EARA": {"server-rule": "avg", "station-assignment": "eara"},
        "FedHiSyn": {"server-rule": "fedhisyn"},
        "sFedHP": {"server-rule": "sfedhp"},
        "FedRC (clusters)": {"server-rule": "fedrc-clusters"},
        "ELCFS": {"server-rule": "avg", "client-method": "elcfs"},
        "HFedATM": {"server-rule": "hfedatm"},
    }


def _independent(base: Given) -> dict[str, Given]:
    s = resolve(base)
    alone = {"station-start": "own", "rounds": 1, "station-rounds": s.rounds * s.station_rounds}
    linear, units = {"gram-layers": "linear"}, {"ot-scope": "all"}
    rows: dict[str, Given] = {
        "Avg": {"server-rule": "avg"},
        "HFedATM w/o FOT": {"server-rule": "hfedatm-no-fot"},
        "HFedATM w/o RegMean": {"server-rule": "hfedatm-no-regmean"},
        "the paper's HFedATM": {"server-rule": "hfedatm", **linear},
        "HFedATM w/o RegMean, all units": {"server-rule": "hfedatm-no-regmean", **units},
        "the paper's HFedATM, all units": {"server-rule": "hfedatm", **linear, **units},
        "HFedATM (Grams of all layers)": {"server-rule": "hfedatm", "gram-layers": "all"},
    }
    return {label: {**row, **alone} for label, row in rows.items()}


def _options(base: Given) -> dict[str, Given]:
    rows: dict[str, Given] = {"Avg": {"server-rule": "avg"}}
    variants: dict[str, Given] = {
        "HFedATM": {},
        "Grams at the station model": {"gram-model": "station"},
        "RegMean on convolutions": {"regmean-conv": True},
        "both of these": {"gram-model": "station", "regmean-conv": True},
        "exact bias": {"regmean-bias": "exact"},
        "γ by examples": {"regmean-weights": "examples"},
        "α = 0.25": {"alpha": 0.25},
        "ridge 0.1": {"ridge": 0.1},
        "Grams as float32": {"gram-dtype": "float32"},
        "align all units": {"ot-scope": "all"},
        "merged sent out (paper)": {"broadcast": "merged"},
        "merged out, every 2nd round": {"broadcast": "merged", "rule-params": "every=2"},
        "merged out, β = 0.5": {"broadcast": "merged", "rule-params": "beta=0.5"},
        "merged out, β from 1 to 0": {"broadcast": "merged", "rule-params": "beta=1,beta_end=0"},
        "merged out, β from 0 to 1": {"broadcast": "merged", "rule-params": "beta=0,beta_end=1"},
        "merged out, momentum 0.5": {"broadcast": "merged", "rule-params": "momentum=0.5"},
        "merged out, convolutions": {"broadcast": "merged", "regmean-conv": True},
    }
    if (norms := _with_batch_norm(base)) is not None:
        rows["BatchNorm + Avg"] = {"server-rule": "avg", **norms}
        variants["BatchNorm + HFedATM"] = norms
        variants["BatchNorm + variances pooled"] = norms | {"rule-params": "pool_variances=true"}
    return rows | {label: {"server-rule": "hfedatm", **v} for label, v in variants.items()}


def _past(base: Given) -> dict[str, Given]:
    rows: dict[str, Given] = {"HFedATM (β = 1)": {"server-rule": "hfedatm"}}
    for beta in (1.25, 1.5):
        rows[f"β = {beta:g}"] = {"server-rule": "hfedatm", "rule-params": f"beta={beta:g}"}
    return rows


def _two_rules(base: Given) -> dict[str, Given]:
    return {"Avg": {"server-rule": "avg"}, "HFedATM": {"server-rule": "hfedatm"}}


def _privacy(base: Given) -> dict[str, Given]:
    rows: dict[str, Given] = {"ε = ∞": {"server-rule": "hfedatm"}}
    for epsilon in EPSILONS:
        rows[f"ε = {epsilon:g}"] = {
            "server-rule": "hfedatm",
            "privacy.mechanism": "example",
            "privacy.epsilon": epsilon,
        }
    return {**rows, "Avg (no Grams)": {"server-rule": "avg"}}


TABLES: dict[str, tuple[str, Callable[[Given], dict[str, Given]], tuple[float, ...]]] = {
    "main": ("Client methods with and without HFedATM", _main, (1.0, 0.1, 0.0)),
    "architectures": ("Architectures", _architectures, (0.0,)),
    "ablation": ("Ablation", _ablation, (1.0, 0.1, 0.0)),
    "hfl": ("Hierarchical rivals", _hfl, (0.0,)),
    "systems": ("Other systems of the paper's related work", _systems, (0.0,)),
    "independent": ("Independently trained stations, merged once", _independent, (1.0, 0.0)),
    "options": ("Options of HFedATM", _options, (0.0,)),
    "past": ("Going past the merge", _past, (0.0,)),
    "latency": ("Seconds per round", _two_rules, (0.0,)),
    "communication": ("Bytes per round", _two_rules, (0.0,)),
    "privacy": ("Noise on Grams, example-level, budget of the whole run", _privacy, (0.0,)),
}
