"""Every setting that a run has with any server rule, with its bounds and its meaning.

Settings are flat ``key = scalar`` pairs, because ``flwr run -c`` carries only those. A setting that
only a server rule reads is a field of that rule (`hfedatm.base.rule_keys`).
`hfedatm.base.resolving` turns a user's values into settings.
"""

from __future__ import annotations

import warnings
from importlib import import_module
from typing import Any, Literal, Self

from pydantic import ConfigDict, Field, model_validator

from hfedatm.base.errors import UserError
from hfedatm.base.options import Checked, as_key
from hfedatm.base.privacy_settings import Mechanism, check_privacy_settings
from hfedatm.base.settings_together import check_params, check_together
from hfedatm.base.tiers import check_tiers

CARRIER = "rule_keys"
"""Field that carries the given values of the rules' keys to all tiers; users write the keys."""

LONGEST = 7 * 24 * 3600
"""Longest time limit, in seconds."""


class SettingsError(UserError):
    """A setting is unknown, malformed or out of bounds."""


class Settings(Checked):
    """The resolved settings of one run; immutable, and equal on every tier."""

    model_config = ConfigDict(alias_generator=as_key)

    preset: str = Field("demo", description="row of the table of hyper-parameters to start from")

    # --- data, and the clients that hold it
    dataset: str = Field(
        "digits", description="built-in name, entry point, or 'package.module:function'"
    )
    dataset_params: str = Field("", description="'key=value,...' for the data set's load function")
    data_dir: str = Field("", description="folder above the data set's own folder")
    target_domain: str = Field("45", description="the domain no client ever trains on")
    stations: int = Field(4, ge=1, description="number of stations with clients")
    clients_per_station: int = Field(3, ge=1, description="number of clients of each station")
    tiers: str = Field(
        "", description="children per level from the server on, '3x4x5'; '4x3' is 4 stations of 3"
    )
    lam: float = Field(
        0.0,
        ge=0,
        le=1,
        alias="lambda",
        description="heterogeneity: 0 gives each client its own domains, 1 mixes all evenly",
    )
    station_assignment: Literal["domain", "mixed", "eara", "suggest"] = Field(
        "domain",
        description="a station gets clients of neighbouring domains, of all domains, or such that "
        "its classes are even (eara); suggest trains nothing, asks clients for class counts",
    )
    validation_fraction: float = Field(
        0.1, ge=0, lt=1, description="share of each client's examples kept for validation"
    )
    augment: str = Field(
        "",
        description="changes to training batches: flip, crop, noise or 'package.module:function' "
        "(comma-separated)",
    )

    # --- model and local training
    task: str = Field(
        "classification",
        description="what is learned: classification, regression, multi-label, an entry point, or "
        "'package.module:Class'",
    )
    model: str = Field(
        "lenet5", description="built-in name, entry point, or 'package.module:function'"
    )
    model_params: str = Field("", description="'key=value,...' for the model's build function")
    station_models: str = Field(
        "", description="other models of the family, by station: '0-2=lenet5(width=0.5); 4=lenet5'"
    )
    train_only: str = Field(
        "",
        description="layers to train and send: 'fc2,fc3', 'last 2', or 'lora' for adapters and the "
        "head; the others are frozen",
    )
    lora_params: str = Field(
        "", description="'key=value,...' for train-only=lora: rank, alpha, targets, last"
    )
    client_method: str = Field(
        "fedavg", description="built-in name, entry point, or 'package.module:Class'"
    )
    client_params: str = Field("", description="'key=value,...' for the client method")
    train_fn: str = Field(
        "",
        description="entry point or 'package.module:function' that replaces the training loop",
    )
    local_epochs: int = Field(5, ge=1, description="E, epochs per station round")
    batch_size: int = Field(16, ge=1, description="examples per step of a client")
    optimizer: Literal["sgd", "adamw"] = Field("sgd", description="optimizer of the clients")
    lr: float = Field(0.05, gt=0, description="learning rate of the clients in round 1")
    momentum: float = Field(0.9, ge=0, lt=1, description="momentum of sgd, or beta1 of adamw")
    weight_decay: float = Field(0.0, ge=0, description="weight decay of the clients")
    schedule: Literal["cosine", "constant"] = Field(
        "cosine", description="course of the learning rate over all station rounds of the run"
    )

    # --- rounds
    server_rule: str = Field(
        "hfedatm", description="built-in name, entry point, or 'package.module:Class'"
    )
    rule_params: str = Field("", description="'key=value,...' for the server rule")
    rule_keys: str = Field("", description="values of the rule's own keys, as rule-params")
    rounds: int = Field(5, ge=1, description="global rounds")
    station_rounds: int = Field(2, ge=1, description="N, station rounds per global round")
    inner_rounds: str = Field(
        "", description="the same for stations of stations, outermost first, '2x1'; 1 unless given"
    )
    station_start: Literal["shared", "own"] = Field(
        "shared", description="round 1 starts from one model, or from one of each station's own"
    )
    client_fraction: float = Field(
        1.0, gt=0, le=1, description="share of clients per station round"
    )
    evaluate_every: int = Field(1, ge=1, description="evaluate in every n-th round and in the last")

    # --- Gram matrices, which clients measure, stations average and the server merges by
    alpha: float = Field(0.75, ge=0, le=1, description="shrinkage of a Gram towards its diagonal")
    regmean_bias: Literal["mean", "exact"] = Field(
        "mean", description="average biases, or merge them with the weights by a wider Gram"
    )
    regmean_conv: bool = Field(
        False, description="measure Grams of convolutions, too, and merge them by RegMean"
    )
    gram_layers: Literal["auto", "linear", "all"] = Field(
        "auto",
        description="measure Grams of Linear layers (and convolutions, if regmean-conv), or of all "
        "layers; auto: of all in a round whose stations did not share a start",
    )
    gram_weights: Literal["uniform", "examples"] = Field(
        "uniform", description="clients count alike in a station's mean Gram, or by examples"
    )
    gram_model: Literal["client", "station"] = Field(
        "client", description="measure Grams at each client's trained model or the station's mean"
    )
    gram_batches: int = Field(0, ge=0, description="mini-batches per Gram; 0 takes all")
    gram_max_dim: int = Field(4096, ge=1, description="wider layers send a low-rank factor")
    gram_rank: int = Field(256, ge=1, description="rank of the factor that wider layers send")
    gram_dtype: Literal["float32", "float16", "bfloat16"] = Field(
        "float16", description="number type of sent Grams; 16 bits come with a scale per matrix"
    )
    gram_min_rows: int = Field(64, ge=1, description="smaller Grams are refused unless DP is on")

    # --- privacy
    privacy_mechanism: Mechanism = Field(
        "none", alias="privacy.mechanism", description="whose contribution Gram noise hides"
    )
    privacy_clip: float = Field(
        1.0, gt=0, alias="privacy.clip", description="bound of a contribution, per Gram"
    )
    privacy_epsilon: float = Field(
        0.0, ge=0, alias="privacy.epsilon", description="budget of the whole run; 0 means not given"
    )
    privacy_delta: float = Field(
        1e-5, gt=0, lt=1, alias="privacy.delta", description="delta of (epsilon, delta)-privacy"
    )
    privacy_sigma: float = Field(
        0.0, ge=0, alias="privacy.sigma", description="noise multiplier; 0 derives it from epsilon"
    )
    privacy_rank: int = Field(
        0, ge=0, alias="privacy.rank", description="eigenvalues kept by 'paper'; 0 is all"
    )
    privacy_insecure_dp_seed: int = Field(
        -1,
        ge=-1,
        alias="privacy.insecure-dp-seed",
        description="makes the noise repeatable and so useless as protection; -1 is off",
    )
    dp_sgd: bool = Field(False, description="train with Opacus: protects the weights")
    dp_sgd_clip: float = Field(1.0, gt=0, description="bound of an example's gradient")
    fix_model: bool = Field(False, description="replace BatchNorm by GroupNorm on every tier")
    secure_aggregation: bool = Field(
        False, description="stations see only the sum of their clients' replies"
    )
    secure_threshold: float = Field(
        0.6, gt=0.5, le=1, description="share of the clients that must stay for a secure sum"
    )

    # --- where a run computes, and what happens when a node fails
    device: str = Field(
        "auto",
        pattern=r"^(auto|cpu|cuda(:\d+)?|mps)$",
        description="cpu, cuda, cuda:N or mps; auto takes a GPU when there is one",
    )
    threads: int = Field(
        1, ge=0, le=1024, description="CPU threads per client; 0 leaves it to torch"
    )
    seed: int = Field(0, ge=0, lt=2**63, description="every random choice is derived from it")
    client_timeout: float = Field(
        600.0, gt=0, le=LONGEST, description="seconds a station waits for a client"
    )
    station_timeout: float = Field(
        7200.0, gt=0, le=LONGEST, description="seconds the server waits for a station"
    )
    join_timeout: float = Field(
        120.0, gt=0, le=LONGEST, description="seconds to wait for nodes, or for a silent SuperLink"
    )
    client_quorum: float = Field(
        0.5, ge=0, le=1, description="share of the asked clients that must answer"
    )
    station_quorum: float = Field(
        0.5, ge=0, le=1, description="share of the stations that must answer"
    )
    max_examples: int = Field(
        1_000_000, ge=1, description="a client that claims to have more is left out"
    )
    bound_factor: float = Field(
        2.0,
        ge=0,
        description="an update moves a tensor at most this many times the median; 0 is no bound",
    )
    claim_factor: float = Field(
        3.0,
        ge=0,
        description="a node's examples count at most this many times the median; 0 is no bound",
    )
    least_agreement: float = Field(
        0.1,
        ge=0,
        lt=1,
        description="share of the median agreement that an update must reach; 0 is off",
    )
    robust_clients: str = Field(
        "none", description="robust rule of the stations: built-in name or 'package.module:Class'"
    )
    robust_stations: str = Field(
        "none", description="robust rule of the server: built-in name or 'package.module:Class'"
    )
    robust_liars: int = Field(
        1, ge=0, description="hostile children of one parent that a robust rule withstands"
    )
    max_fall: float = Field(
        0.25, ge=0, le=1, description="drop of source accuracy that undoes a round; 0 is off"
    )
    max_reply_mb: float = Field(
        0.0, ge=0, description="larger replies are dropped; 0 derives the limit from the model"
    )

    # --- results
    output: str = Field("results", description="folder that holds one folder per run")
    run_name: str = Field(
        "",
        pattern=r"^([A-Za-z0-9_][A-Za-z0-9._-]*)?$",
        description="name of the run's folder; empty makes one",
    )
    resume: str = Field("", description="folder of a run to continue")
    diagnostics: bool = Field(
        True, description="keep what the report shows of the first and last round"
    )
    track: str = Field("", description="also log to: tensorboard, mlflow, wandb (comma-separated)")
    metrics: str = Field(
        "", description="metrics of the evaluation besides accuracy: f1, auc (comma-separated)"
    )
    show_metrics: str = Field("", description="numbers that a round's line shows: 'grad_norm,f1'")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        check_params(self)
        check_privacy_settings(self)
        check_together(self)
        check_tiers(self)
        return self

    @property
    def num_clients(self) -> int:
        """Clients of all stations together."""
        return self.stations * self.clients_per_station


def keys() -> list[str]:
    """Every key of the run; server rules add keys of their own."""
    return [field.alias or as_key(n) for n, field in Settings.model_fields.items() if n != CARRIER]


_ELSEWHERE = {
    "resolve": "hfedatm.base.resolving",
    "validate": "hfedatm.base.resolving",
    "load_presets": "hfedatm.base.presets",
    "read_yaml": "hfedatm.base.presets",
}


def __getattr__(name: str) -> Any:
    """Return a name that has moved out of this module, with a deprecation notice."""
    if name not in _ELSEWHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    where = _ELSEWHERE[name]
    notice = f"{__name__}.{name} is deprecated; import it from {where}"
    warnings.warn(notice, DeprecationWarning, stacklevel=2)
    return getattr(import_module(where), name)
