"""The rows of each table: what differs from one row to the next."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hfedatm.base.resolving import resolve

Given = dict[str, Any]

METHODS = {"FedAvg": "fedavg", "FedProx": "fedprox", "FedSR": "fedsr", "FedIIR": "fediir"}
ABLATION = {
    "Avg": "avg",
    "HFedATM w/o FOT": "hfedatm-no-fot",
    "HFedATM w/o RegMean": "hfedatm-no-regmean",
    "HFedATM": "hfedatm",
}
RIVALS = {
    "MTGC": "mtgc",
    "FedRC (weights)": "fedrc-weights",
    "FedGA": "fedga",
    "FedGMA": "fedgma",
}
EPSILONS = (4.0, 2.0, 1.0, 0.5, 0.1)


def bounding_rows(base: Given) -> dict[str, list[Given]]:
    """Return rows for one client with all source data, and for the stations by themselves.

    Both see every example as often as the clients of the table. Stations that train apart differ
    more than stations that meet every round, so nothing is cut back to the median of the others.
    One client has all examples at every lambda, so central training runs at one of them only.
    """
    s = resolve(base)
    whole = s.rounds * s.station_rounds
    one: Given = {"stations": 1, "clients-per-station": 1, "station-rounds": 1, "lambda": 0.0}
    central = {**one, "server-rule": "avg", "rounds": whole, "evaluate-every": s.station_rounds}
    alone = {"rounds": 1, "station-rounds": whole, "server-rule": "one-station"}
    trusted = {"bound-factor": 0.0, "claim-factor": 0.0, "least-agreement": 0.0}
    return {
        "Central training": [central],
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
    return _of_rules(ABLATION)


def _rules(base: Given) -> dict[str, Given]:
    return _of_rules(ABLATION | RIVALS)


def _of_rules(rules: dict[str, str]) -> dict[str, Given]:
    return {label: {"server-rule": rule} for label, rule in rules.items()}


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
        **_of_rules(RIVALS),
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
    "rules": ("Rules of the server", _rules, (1.0, 0.1, 0.0)),
    "hfl": ("Hierarchical rivals", _hfl, (0.0,)),
    "systems": ("Other systems of the paper's related work", _systems, (0.0,)),
    "independent": ("Independently trained stations, merged once", _independent, (1.0, 0.0)),
    "options": ("Options of HFedATM", _options, (0.0,)),
    "past": ("Going past the merge", _past, (0.0,)),
    "latency": ("Seconds per round", _two_rules, (0.0,)),
    "communication": ("Bytes per round", _two_rules, (0.0,)),
    "privacy": ("Noise on Grams, example-level, budget of the whole run", _privacy, (0.0,)),
}
